// Bells and words between threads and processes; layout and life of the mailbox.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "mailbox.h"

namespace {

constexpr ft::MailboxGeometry kGeometry{8, 2, 16, 3, 5, 6};

template <class Function>
std::string message_of(const Function& function) {
  try {
    function();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

std::shared_ptr<ft::Mailbox> make_mailbox(std::uint32_t first_seq = 0) {
  auto segment = ft::SharedSegment::create("mailbox", ft::Mailbox::required_bytes(kGeometry));
  return ft::Mailbox::create(segment, 7, kGeometry, first_seq);
}

// Two parties answer each other; every number must arrive, whatever the mix of spinning and sleeping.
void ping_pong(ft::Word& there, ft::Word& back, std::uint32_t first, int count, int spin_us, int echo_spin_us) {
  std::thread echo([&] {
    for (int i = 1; i <= count; ++i) {
      const std::uint32_t expected = first + i;
      CHECK(there.bell.wait([&] { return there.load() == expected; }, echo_spin_us, -1));
      back.publish(expected);
    }
  });
  for (int i = 1; i <= count; ++i) {
    const std::uint32_t seq = first + i;
    there.publish(seq);
    CHECK(back.bell.wait([&] { return back.load() == seq; }, spin_us, -1));
  }
  echo.join();
}

void test_words_between_threads() {
  for (const int spin_us : {0, 20}) {
    for (const int echo_spin_us : {0, 20}) {
      auto mailbox = make_mailbox(0xfffffff0u);  // wraps
      ping_pong(mailbox->req(), mailbox->plan(), 0xfffffff0u, 2000, spin_us, echo_spin_us);
    }
  }
}

void test_words_between_processes() {
  auto mailbox = make_mailbox();
  const pid_t child = fork();
  CHECK(child >= 0);
  ft::Word& there = mailbox->req();
  ft::Word& back = mailbox->plan();
  constexpr std::uint32_t kCount = 2000;
  if (child == 0) {
    for (std::uint32_t i = 1; i <= kCount; ++i) {
      there.bell.wait([&] { return there.load() == i; }, 0, -1);
      back.publish(i);
    }
    _exit(0);
  }
  for (std::uint32_t i = 1; i <= kCount; ++i) {
    there.publish(i);
    CHECK(back.bell.wait([&] { return back.load() == i; }, 0, std::int64_t{60} * 1'000'000'000));
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

void test_timeout() {
  auto mailbox = make_mailbox();
  const auto never = [] { return false; };
  for (const int spin_us : {0, 50, 5000}) {
    const std::int64_t start = ft::monotonic_ns();
    CHECK(!mailbox->plan().bell.wait(never, spin_us, 2'000'000));
    CHECK(ft::monotonic_ns() - start >= 2'000'000);
  }
  CHECK(!mailbox->plan().bell.wait(never, 0, 0));
}

void test_abort_wakes_all() {
  for (int round = 0; round < 50; ++round) {
    auto mailbox = make_mailbox();
    const auto aborted = [&] { return mailbox->aborted(); };
    std::vector<std::thread> waiters;
    waiters.emplace_back([&] { CHECK(mailbox->req().bell.wait(aborted, 0, -1)); });
    waiters.emplace_back([&] { CHECK(mailbox->plan().bell.wait(aborted, round % 2 * 10, -1)); });
    waiters.emplace_back([&] { CHECK(mailbox->part().bell.wait(aborted, 0, -1)); });
    waiters.emplace_back([&] { CHECK(mailbox->ring().bell().wait(aborted, 0, -1)); });
    mailbox->abort(ft::AbortReason::kPlanLate);
    for (std::thread& waiter : waiters) waiter.join();
    CHECK(mailbox->req().bell.wait(aborted, 0, -1));  // later waits fall through as well
    mailbox->abort(ft::AbortReason::kRequested);
    CHECK(mailbox->abort_reason() == ft::AbortReason::kPlanLate);  // the first reason stays
  }
}

void test_layout() {
  auto segment = ft::SharedSegment::create("mailbox", ft::Mailbox::required_bytes(kGeometry));
  auto mailbox = ft::Mailbox::create(segment, 7, kGeometry);
  const auto* header = reinterpret_cast<const ft::MailboxHeader*>(segment->data());
  CHECK(std::memcmp(header->magic, "FTMAILBX", 8) == 0 && header->epoch == 7 && header->max_entries == 5);
  const ft::MailboxOffsets& o = header->offsets;
  const std::uint64_t offsets[] = {o.req,     o.plan,   o.part,    o.abort, o.request,
                                   o.hidden,  o.ids,    o.weights, o.admit, o.plan_header,
                                   o.entries, o.routes, o.slot_of, o.ring,  o.partial};
  std::uint64_t previous = 0;
  for (const std::uint64_t offset : offsets) {
    CHECK(offset % ft::kLineBytes == 0 && offset >= previous + ft::kLineBytes);
    previous = offset;
  }
  CHECK(o.partial + kGeometry.max_shared_tokens * kGeometry.top_k * kGeometry.hidden * sizeof(float) <= o.total_bytes);
  CHECK(o.total_bytes == ft::Mailbox::required_bytes(kGeometry));
  CHECK(reinterpret_cast<std::byte*>(mailbox->partial()) == segment->data() + o.partial);

  auto mirror = ft::Mailbox::attach(ft::SharedSegment::attach(segment->fd(), segment->size_bytes(), "mirror"));
  for (int i = 0; i < 3 * 5; ++i) CHECK(mirror->slot_of()[i] == -1);
  CHECK(mirror->epoch() == 7 && mirror->geometry().num_experts == 5);
  mailbox->hidden()[3] = 2.5f;
  CHECK(mirror->hidden()[3] == 2.5f);
  mailbox->abort();
  CHECK(mirror->aborted());
}

void test_refusals() {
  CHECK(message_of([] { ft::Mailbox::required_bytes({0, 2, 16, 3, 5}); }).find("max_tokens 0") != std::string::npos);
  CHECK(message_of([] { ft::Mailbox::required_bytes({8, 2, 16, 3, 1u << 20}); }).find("num_experts 1048576") !=
        std::string::npos);
  CHECK(message_of([] { ft::Mailbox::required_bytes({8, 2, 16, 3, 5, 9}); }).find("max_shared_tokens 9") !=
        std::string::npos);
  ft::MailboxGeometry unlimited = kGeometry;
  unlimited.max_shared_tokens = 0;  // means max_tokens
  ft::MailboxGeometry full = kGeometry;
  full.max_shared_tokens = 8;
  CHECK(ft::Mailbox::required_bytes(unlimited) == ft::Mailbox::required_bytes(full));
  auto small = ft::SharedSegment::create("small", 4096);
  CHECK(message_of([&] { ft::Mailbox::create(small, 1, kGeometry); }).find("4096") != std::string::npos);
  CHECK(message_of([&] { ft::Mailbox::attach(small); }).find("no mailbox") != std::string::npos);

  auto segment = ft::SharedSegment::create("mailbox", ft::Mailbox::required_bytes(kGeometry));
  ft::Mailbox::create(segment, 1, kGeometry);
  auto* header = reinterpret_cast<ft::MailboxHeader*>(segment->data());
  header->version = 99;
  CHECK(message_of([&] { ft::Mailbox::attach(segment); }).find("version 99") != std::string::npos);
  header->version = ft::kMailboxVersion;
  header->geometry.hidden = 1 << 16;  // would lie beyond the segment
  CHECK(message_of([&] { ft::Mailbox::attach(segment); }).find("contradict") != std::string::npos);
}

}  // namespace

int main() {
  test_words_between_processes();  // first: it forks, so no thread may be running
  test_words_between_threads();
  test_timeout();
  test_abort_wakes_all();
  test_layout();
  test_refusals();
  return 0;
}
