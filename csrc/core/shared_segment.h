// A memfd mapped read-write and shared between processes; or a range of addresses into which parts of others are
// mapped.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace ft {

class SharedSegment {
 public:
  // Both throw std::system_error; attach duplicates fd and checks that the file has at least size_bytes.
  static std::shared_ptr<SharedSegment> create(const std::string& name, std::size_t size_bytes);
  static std::shared_ptr<SharedSegment> attach(int fd, std::size_t size_bytes, const std::string& name);
  // Addresses without memory (fd() is -1), to be filled by map. Touching what is not mapped is a segmentation fault.
  static std::shared_ptr<SharedSegment> reserve(const std::string& name, std::size_t size_bytes);
  ~SharedSegment();
  SharedSegment(const SharedSegment&) = delete;
  SharedSegment& operator=(const SharedSegment&) = delete;

  int fd() const { return fd_; }
  const std::string& name() const { return name_; }
  std::byte* data() const { return data_; }
  std::size_t size_bytes() const { return size_bytes_; }
  // Allocates every page; throws std::system_error (ENOMEM/ENOSPC) when memory is short.
  void populate();

  // Only of a reserved range. All sizes and offsets are multiples of the page size; the same bytes of `source` may be
  // mapped at several places. map keeps what was mapped there before when it fails (std::system_error). Threads may use
  // other parts of the range meanwhile.
  void map(std::size_t offset, std::size_t size_bytes, const SharedSegment& source, std::size_t source_offset);
  void unmap(std::size_t offset, std::size_t size_bytes);

 private:
  void check_range(const char* what, std::size_t offset, std::size_t size_bytes) const;

  SharedSegment(int fd, std::byte* data, std::size_t size_bytes, std::string name)
      : fd_(fd), data_(data), size_bytes_(size_bytes), name_(std::move(name)) {}
  int fd_;
  std::byte* data_;
  std::size_t size_bytes_;
  std::string name_;
};

}  // namespace ft
