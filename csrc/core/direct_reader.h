// Multi-threaded chunked reads of whole files into shared segments.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "shared_segment.h"

namespace ft {

// Threads pull chunks of all submitted files in order of submission. Reads bypass the page cache (O_DIRECT) where the
// file system allows it and the destination is aligned; otherwise, file by file, they are buffered and the pages are
// dropped behind the read. The first failure stops everything that is left. Every method may be called from any thread.
class DirectReader {
 public:
  // chunk_bytes must be a positive multiple of 4,096 (std::invalid_argument).
  DirectReader(int num_threads, std::size_t chunk_bytes, bool direct);
  ~DirectReader();  // cancels
  DirectReader(const DirectReader&) = delete;
  DirectReader& operator=(const DirectReader&) = delete;

  // Reads size_bytes, which must be the size of the file. std::invalid_argument when the destination does not hold it
  // or after cancel(); a missing or unfit file is a failure of wait().
  void submit(const std::string& path, std::size_t size_bytes, std::shared_ptr<SharedSegment> destination,
              std::size_t destination_offset);

  std::uint64_t progress() const;

  // True when everything submitted is read, false when the time is over. Throws the first failure (std::system_error
  // naming the file) once no thread touches a destination any more.
  bool wait_for(int milliseconds);

  // Whether any byte was read with O_DIRECT.
  bool used_direct() const;

  // Drops what is left; wait_for() then fails with ECANCELED unless everything was done. Returns at once.
  void cancel();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ft
