#include "shared_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <system_error>

#include "memory_info.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace ft {
namespace {

[[noreturn]] void throw_errno(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

// Kernels before 6.3 reject the flag; the file then stays executable, which nothing depends on.
int create_memfd(const char* name) {
  const int fd = memfd_create(name, MFD_CLOEXEC | MFD_NOEXEC_SEAL);
  if (fd < 0 && errno == EINVAL) return memfd_create(name, MFD_CLOEXEC);
  return fd;
}

std::byte* map_shared(int fd, std::size_t size_bytes) {
  void* address = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (address == MAP_FAILED) return nullptr;
  // Where the administrator set shmem huge pages to "advise", this saves most of the TLB misses; elsewhere it is a
  // no-op.
  madvise(address, size_bytes, MADV_HUGEPAGE);
  return static_cast<std::byte*>(address);
}

}  // namespace

std::shared_ptr<SharedSegment> SharedSegment::create(const std::string& name, std::size_t size_bytes) {
  if (size_bytes == 0) throw std::invalid_argument("size_bytes must be at least 1, got 0");
  const int fd = create_memfd(name.c_str());
  if (fd < 0) throw_errno(errno, "memfd_create " + name);
  std::byte* data = nullptr;
  if (ftruncate(fd, static_cast<off_t>(size_bytes)) != 0 || (data = map_shared(fd, size_bytes)) == nullptr) {
    const int error = errno;
    ::close(fd);
    throw_errno(error, "segment " + name + " of " + std::to_string(size_bytes) + " bytes");
  }
  return std::shared_ptr<SharedSegment>(new SharedSegment(fd, data, size_bytes, name));
}

std::shared_ptr<SharedSegment> SharedSegment::attach(int fd, std::size_t size_bytes, const std::string& name) {
  if (size_bytes == 0) throw std::invalid_argument("size_bytes must be at least 1, got 0");
  const int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (own < 0) throw_errno(errno, "segment " + name + ": cannot duplicate descriptor " + std::to_string(fd));
  struct stat status = {};
  int error = 0;
  std::byte* data = nullptr;
  if (fstat(own, &status) != 0) {
    error = errno;
  } else if (static_cast<std::uint64_t>(status.st_size) < size_bytes) {
    ::close(own);
    throw_errno(EINVAL, "segment " + name + ": file has " + std::to_string(status.st_size) + " bytes, expected " +
                            std::to_string(size_bytes));
  } else if ((data = map_shared(own, size_bytes)) == nullptr) {
    error = errno;
  }
  if (error != 0) {
    ::close(own);
    throw_errno(error, "segment " + name + " of " + std::to_string(size_bytes) + " bytes");
  }
  return std::shared_ptr<SharedSegment>(new SharedSegment(own, data, size_bytes, name));
}

std::shared_ptr<SharedSegment> SharedSegment::reserve(const std::string& name, std::size_t size_bytes) {
  if (size_bytes == 0) throw std::invalid_argument("size_bytes must be at least 1, got 0");
  void* address = mmap(nullptr, size_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) {
    throw_errno(errno, "address range " + name + " of " + std::to_string(size_bytes) + " bytes");
  }
  return std::shared_ptr<SharedSegment>(new SharedSegment(-1, static_cast<std::byte*>(address), size_bytes, name));
}

SharedSegment::~SharedSegment() {
  munmap(data_, size_bytes_);
  if (fd_ >= 0) ::close(fd_);
}

void SharedSegment::check_range(const char* what, std::size_t offset, std::size_t size_bytes) const {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  if (size_bytes == 0 || size_bytes > size_bytes_ || offset > size_bytes_ - size_bytes || offset % page != 0 ||
      size_bytes % page != 0) {
    throw std::invalid_argument(std::string(what) + ": bytes " + std::to_string(offset) + " to " +
                                std::to_string(offset + size_bytes) + " of " + name_ + " (" +
                                std::to_string(size_bytes_) + ") are not whole pages of it");
  }
}

void SharedSegment::map(std::size_t offset, std::size_t size_bytes, const SharedSegment& source,
                        std::size_t source_offset) {
  if (fd_ >= 0) throw std::invalid_argument("segment " + name_ + " has memory of its own");
  if (source.fd_ < 0) throw std::invalid_argument("segment " + source.name_ + " has no memory of its own");
  check_range("map", offset, size_bytes);
  source.check_range("map", source_offset, size_bytes);
  // The pages exist: populating only enters them into the page table, so that no step pays for it later.
  void* address = mmap(data_ + offset, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_POPULATE,
                       source.fd_, static_cast<off_t>(source_offset));
  if (address == MAP_FAILED) throw_errno(errno, "mapping " + std::to_string(size_bytes) + " bytes into " + name_);
  madvise(address, size_bytes, MADV_HUGEPAGE);
}

void SharedSegment::unmap(std::size_t offset, std::size_t size_bytes) {
  if (fd_ >= 0) throw std::invalid_argument("segment " + name_ + " has memory of its own");
  check_range("unmap", offset, size_bytes);
  void* address =
      mmap(data_ + offset, size_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  if (address == MAP_FAILED) throw_errno(errno, "unmapping " + std::to_string(size_bytes) + " bytes of " + name_);
}

void SharedSegment::populate() {
  if (fd_ < 0) throw std::invalid_argument("segment " + name_ + " has no memory of its own");
  // A memfd is not counted against the commit limit, so fallocate would go on until the kernel kills somebody.
  struct stat status = {};
  if (fstat(fd_, &status) != 0) throw_errno(errno, "segment " + name_);
  const std::uint64_t present = static_cast<std::uint64_t>(status.st_blocks) * 512;
  const std::uint64_t missing = size_bytes_ - std::min<std::uint64_t>(size_bytes_, present);
  const std::uint64_t available = available_memory_bytes();
  if (missing > available) {
    throw_errno(ENOMEM, "segment " + name_ + " needs " + std::to_string(missing) + " more bytes, but " +
                            std::to_string(available) + " are available");
  }
  const int error = posix_fallocate(fd_, 0, static_cast<off_t>(size_bytes_));
  if (error != 0) throw_errno(error, "segment " + name_ + " of " + std::to_string(size_bytes_) + " bytes");
  if (madvise(data_, size_bytes_, MADV_POPULATE_WRITE) == 0) return;
  if (errno != EINVAL) throw_errno(errno, "segment " + name_ + " of " + std::to_string(size_bytes_) + " bytes");
  // Kernels before 5.14: the pages exist already, so reading one byte of each maps it.
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  for (std::size_t offset = 0; offset < size_bytes_; offset += page) {
    static_cast<void>(*reinterpret_cast<volatile std::byte*>(data_ + offset));
  }
}

}  // namespace ft
