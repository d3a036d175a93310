// Small text files of /proc and /sys, read with C stdio: iostreams depend on locale objects that clash when an
// extension carries its own copy of the C++ library into a process that has another.
#pragma once

#include <cstdio>
#include <optional>
#include <string>

namespace ft {

// The whole file, at most 1 MiB of it; nothing when it cannot be read.
inline std::optional<std::string> read_text_file(const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "re");
  if (file == nullptr) return std::nullopt;
  std::string text;
  char buffer[4096];
  std::size_t count = 0;
  while (text.size() < (1u << 20) && (count = std::fread(buffer, 1, sizeof buffer, file)) != 0) {
    text.append(buffer, count);
  }
  const bool failed = std::ferror(file) != 0;
  std::fclose(file);
  if (failed) return std::nullopt;
  return text;
}

}  // namespace ft
