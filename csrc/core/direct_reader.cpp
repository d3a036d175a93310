#include "direct_reader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace ft {
namespace {

constexpr std::size_t kAlignment = 4096;

class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }

 private:
  int fd_;
};

[[noreturn]] void throw_file_error(int error, const std::string& path, const std::string& what) {
  throw std::system_error(error, std::generic_category(), path + ": " + what);
}

std::string size_message(std::uint64_t found, std::uint64_t expected) {
  return "file has " + std::to_string(found) + " bytes, expected " + std::to_string(expected);
}

// One submitted file. Descriptors close with the last chunk.
struct File {
  std::string path;
  std::size_t size_bytes = 0;
  std::shared_ptr<SharedSegment> destination;
  std::byte* target = nullptr;
  Descriptor buffered;
  Descriptor direct;
  std::atomic<bool> use_direct{false};

  void open(bool want_direct) {
    buffered = Descriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!buffered.valid()) throw_file_error(errno, path, "cannot open");
    struct stat status = {};
    if (fstat(buffered.get(), &status) != 0) throw_file_error(errno, path, "cannot stat");
    if (static_cast<std::uint64_t>(status.st_size) != size_bytes) {
      throw_file_error(EIO, path, size_message(static_cast<std::uint64_t>(status.st_size), size_bytes));
    }
    if (want_direct && reinterpret_cast<std::uintptr_t>(target) % kAlignment == 0) {
      direct = Descriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT));
      if (!direct.valid() && errno != EINVAL) throw_file_error(errno, path, "cannot open");
    }
    use_direct.store(direct.valid(), std::memory_order_relaxed);
    if (!direct.valid()) posix_fadvise(buffered.get(), 0, 0, POSIX_FADV_SEQUENTIAL);
  }
};

struct Chunk {
  std::shared_ptr<File> file;
  std::size_t offset = 0;
  std::size_t size = 0;
};

}  // namespace

struct DirectReader::Impl {
  std::size_t chunk_bytes = 0;
  bool want_direct = false;

  mutable std::mutex mutex;
  std::condition_variable work_ready;
  std::condition_variable work_done;
  std::deque<std::shared_ptr<File>> files;  // not wholly handed out yet
  std::size_t front_offset = 0;             // of files.front()
  std::size_t running = 0;                  // chunks being read
  bool stopping = false;
  bool cancelled = false;
  std::exception_ptr failure;

  std::atomic<std::uint64_t> bytes_read{0};
  std::atomic<bool> direct_seen{false};
  std::atomic<bool> abandon{false};  // lets a reader leave a chunk early
  std::vector<std::thread> threads;

  ~Impl() {
    {
      const std::lock_guard lock(mutex);
      stopping = true;
      files.clear();
      abandon.store(true, std::memory_order_relaxed);
    }
    work_ready.notify_all();
    for (std::thread& thread : threads) thread.join();
  }

  void thread_main() {
    for (;;) {
      Chunk chunk;
      {
        std::unique_lock lock(mutex);
        work_ready.wait(lock, [&] { return stopping || !files.empty(); });
        if (stopping) return;
        chunk.file = files.front();
        chunk.offset = front_offset;
        chunk.size = std::min(chunk_bytes, chunk.file->size_bytes - front_offset);
        front_offset += chunk.size;
        if (front_offset == chunk.file->size_bytes) {
          files.pop_front();
          front_offset = 0;
        }
        running += 1;
      }
      std::exception_ptr problem;
      try {
        read_chunk(chunk);
      } catch (...) {
        problem = std::current_exception();
      }
      chunk.file.reset();
      const std::lock_guard lock(mutex);
      running -= 1;
      if (problem) drop_rest(problem);
      if (running == 0 && files.empty()) work_done.notify_all();
    }
  }

  // With the mutex held.
  void drop_rest(const std::exception_ptr& cause) {
    if (!failure) failure = cause;
    files.clear();
    front_offset = 0;
    abandon.store(true, std::memory_order_relaxed);
    if (running == 0) work_done.notify_all();
  }

  void read_chunk(const Chunk& chunk) {
    File& file = *chunk.file;
    std::size_t done = 0;
    while (done < chunk.size && !abandon.load(std::memory_order_relaxed)) {
      const std::size_t offset = chunk.offset + done;
      const std::size_t left = chunk.size - done;
      const std::size_t aligned = left / kAlignment * kAlignment;
      const bool direct = file.use_direct.load(std::memory_order_relaxed) && offset % kAlignment == 0 && aligned != 0;
      const ssize_t count = direct ? pread(file.direct.get(), file.target + offset, aligned, static_cast<off_t>(offset))
                                   : pread(file.buffered.get(), file.target + offset, left, static_cast<off_t>(offset));
      if (count > 0) {
        done += static_cast<std::size_t>(count);
        bytes_read.fetch_add(static_cast<std::uint64_t>(count), std::memory_order_relaxed);
        if (direct) {
          direct_seen.store(true, std::memory_order_relaxed);
        } else {
          // The segment holds the bytes now; a second copy in the page cache would only take memory from it.
          posix_fadvise(file.buffered.get(), static_cast<off_t>(offset), count, POSIX_FADV_DONTNEED);
        }
      } else if (count == 0) {
        throw_file_error(EIO, file.path, size_message(offset, file.size_bytes));
      } else if (errno == EINVAL && direct) {
        file.use_direct.store(false, std::memory_order_relaxed);
      } else if (errno != EINTR) {
        throw_file_error(errno, file.path, "cannot read at byte " + std::to_string(offset));
      }
    }
  }
};

DirectReader::DirectReader(int num_threads, std::size_t chunk_bytes, bool direct) : impl_(std::make_unique<Impl>()) {
  if (num_threads < 1 || num_threads > 256) {
    throw std::invalid_argument("num_threads must be 1..256, got " + std::to_string(num_threads));
  }
  if (chunk_bytes == 0 || chunk_bytes % kAlignment != 0) {
    throw std::invalid_argument("chunk_bytes must be a positive multiple of 4096, got " + std::to_string(chunk_bytes));
  }
  impl_->chunk_bytes = chunk_bytes;
  impl_->want_direct = direct;
  for (int i = 0; i < num_threads; ++i) impl_->threads.emplace_back([impl = impl_.get()] { impl->thread_main(); });
}

DirectReader::~DirectReader() = default;

void DirectReader::submit(const std::string& path, std::size_t size_bytes, std::shared_ptr<SharedSegment> destination,
                          std::size_t destination_offset) {
  const std::size_t room = destination->size_bytes();
  if (destination_offset > room || size_bytes > room - destination_offset) {
    throw std::invalid_argument("size_bytes " + std::to_string(size_bytes) + " at destination_offset " +
                                std::to_string(destination_offset) + " leaves the segment of " + std::to_string(room) +
                                " bytes");
  }
  auto file = std::make_shared<File>();
  file->path = path;
  file->size_bytes = size_bytes;
  file->target = destination->data() + destination_offset;
  file->destination = std::move(destination);
  std::exception_ptr problem;
  try {
    file->open(impl_->want_direct);
  } catch (const std::system_error&) {
    problem = std::current_exception();
  }
  {
    const std::lock_guard lock(impl_->mutex);
    if (impl_->cancelled) throw std::invalid_argument("the reader was cancelled");
    if (problem) {
      impl_->drop_rest(problem);
    } else if (!impl_->failure && size_bytes > 0) {
      impl_->files.push_back(std::move(file));
    }
  }
  impl_->work_ready.notify_all();
}

std::uint64_t DirectReader::progress() const { return impl_->bytes_read.load(std::memory_order_relaxed); }

bool DirectReader::wait_for(int milliseconds) {
  std::unique_lock lock(impl_->mutex);
  const bool idle = impl_->work_done.wait_for(lock, std::chrono::milliseconds(milliseconds),
                                              [&] { return impl_->running == 0 && impl_->files.empty(); });
  if (idle && impl_->failure) std::rethrow_exception(impl_->failure);
  return idle;
}

bool DirectReader::used_direct() const { return impl_->direct_seen.load(std::memory_order_relaxed); }

void DirectReader::cancel() {
  const std::lock_guard lock(impl_->mutex);
  impl_->cancelled = true;
  if (impl_->running == 0 && impl_->files.empty()) return;
  impl_->drop_rest(
      std::make_exception_ptr(std::system_error(ECANCELED, std::generic_category(), "reading was cancelled")));
}

}  // namespace ft
