#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "check.h"
#include "direct_reader.h"
#include "shared_segment.h"

namespace {

using ft::DirectReader;
using ft::SharedSegment;

constexpr int kLongMs = 60000;

class TemporaryFile {
 public:
  explicit TemporaryFile(std::size_t size) : data_(size) {
    std::mt19937 generator(static_cast<unsigned>(size));
    for (char& byte : data_) byte = static_cast<char>(generator());
    const int fd = mkstemp(path_);
    CHECK(fd >= 0);
    CHECK(write(fd, data_.data(), size) == static_cast<ssize_t>(size));
    close(fd);
  }
  ~TemporaryFile() { unlink(path_); }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  std::string path() const { return path_; }
  const std::vector<char>& data() const { return data_; }

 private:
  char path_[32] = "ft_reader_XXXXXX";
  std::vector<char> data_;
};

void wait(DirectReader& reader) { CHECK(reader.wait_for(kLongMs)); }

bool fails(DirectReader& reader, const std::string& part, int code) {
  try {
    wait(reader);
  } catch (const std::system_error& error) {
    return std::string(error.what()).find(part) != std::string::npos && error.code().value() == code;
  }
  return false;
}

void reads_files_of_any_size() {
  for (const bool direct : {true, false}) {
    for (const int threads : {1, 4}) {
      for (const std::size_t size : {std::size_t{1}, std::size_t{4095}, std::size_t{4096}, std::size_t{100001}}) {
        const TemporaryFile file(size);
        const auto segment = SharedSegment::create("reader", size + 8192);
        segment->populate();
        DirectReader reader(threads, 8192, direct);
        for (const std::size_t offset : {std::size_t{0}, std::size_t{4096}, std::size_t{100}}) {
          std::memset(segment->data(), 0, segment->size_bytes());
          reader.submit(file.path(), size, segment, offset);
          wait(reader);
          CHECK(std::memcmp(segment->data() + offset, file.data().data(), size) == 0);
          CHECK(segment->data()[offset + size] == std::byte{0});
        }
        CHECK(reader.progress() == 3 * size);
        CHECK(direct || !reader.used_direct());
      }
    }
  }
}

void many_files_from_many_threads() {
  const TemporaryFile file(50000);
  const auto segment = SharedSegment::create("reader", 16 * 53248);
  DirectReader reader(3, 4096, true);
  std::vector<std::thread> submitters;
  for (std::size_t i = 0; i < 4; ++i) {
    submitters.emplace_back([&, i] {
      for (std::size_t k = 0; k < 4; ++k) reader.submit(file.path(), 50000, segment, (4 * i + k) * 53248);
    });
  }
  for (std::thread& submitter : submitters) submitter.join();
  wait(reader);
  for (std::size_t i = 0; i < 16; ++i) {
    CHECK(std::memcmp(segment->data() + i * 53248, file.data().data(), 50000) == 0);
  }
}

void failures_name_the_file() {
  const TemporaryFile file(10000);
  const auto segment = SharedSegment::create("reader", 1 << 20);
  {
    DirectReader reader(2, 4096, true);
    reader.submit(file.path(), 10001, segment, 0);
    CHECK(fails(reader, file.path() + ": file has 10000 bytes, expected 10001", EIO));
    CHECK(fails(reader, file.path(), EIO));  // it stays failed
  }
  {
    DirectReader reader(2, 4096, true);
    reader.submit("absent", 1, segment, 0);
    reader.submit(file.path(), 10000, segment, 0);
    CHECK(fails(reader, "absent", ENOENT));
  }
  {
    DirectReader reader(2, 4096, true);
    bool refused = false;
    try {
      reader.submit(file.path(), 10000, segment, (1 << 20) - 9999);
    } catch (const std::invalid_argument&) {
      refused = true;
    }
    CHECK(refused);
    wait(reader);
  }
}

// The file loses its tail between submission and reading.
void a_file_that_shrinks_is_an_error() {
  const TemporaryFile file(64 * 4096);
  const auto segment = SharedSegment::create("reader", 1 << 20);
  for (const bool direct : {true, false}) {
    DirectReader reader(1, 4096, direct);
    reader.submit(file.path(), 64 * 4096, segment, 0);
    CHECK(truncate(file.path().c_str(), 5000) == 0);
    bool failed = false;
    try {
      wait(reader);
    } catch (const std::system_error& error) {
      failed = std::string(error.what()).find("expected 262144") != std::string::npos;
    }
    CHECK(failed || reader.progress() == 64 * 4096);  // all of it may have been read before
    CHECK(truncate(file.path().c_str(), 64 * 4096) == 0);
  }
}

void cancelling() {
  const TemporaryFile file(1 << 20);
  const auto segment = SharedSegment::create("reader", 1 << 20);
  DirectReader reader(2, 4096, true);
  for (int i = 0; i < 20; ++i) reader.submit(file.path(), 1 << 20, segment, 0);
  reader.cancel();
  CHECK(fails(reader, "cancelled", ECANCELED) || reader.progress() == std::uint64_t{20} << 20);
  for (int i = 0; i < 5; ++i) {
    DirectReader dropped(2, 4096, true);
    for (int k = 0; k < 5; ++k) dropped.submit(file.path(), 1 << 20, segment, 0);
  }
}

}  // namespace

int main() {
  reads_files_of_any_size();
  many_files_from_many_threads();
  failures_name_the_file();
  a_file_that_shrinks_is_an_error();
  cancelling();
  return 0;
}
