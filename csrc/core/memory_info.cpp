#include "memory_info.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <optional>
#include <string>

#include "text_file.h"

namespace ft {
namespace {

constexpr const char* kCgroupRoot = "/sys/fs/cgroup";

// Nothing unless the text begins with digits, after blanks ("max" does not).
std::optional<std::uint64_t> parse_number(const char* text) {
  while (*text == ' ' || *text == '\t') ++text;
  if (std::isdigit(static_cast<unsigned char>(*text)) == 0) return std::nullopt;
  return std::strtoull(text, nullptr, 10);
}

std::optional<std::uint64_t> read_number(const std::string& path) {
  const auto text = read_text_file(path);
  return text ? parse_number(text->c_str()) : std::nullopt;
}

// The value behind `key` in a file of "key value" lines.
std::optional<std::uint64_t> read_entry(const std::string& path, const std::string& key) {
  const auto text = read_text_file(path);
  if (!text) return std::nullopt;
  for (std::size_t line = 0; line < text->size();) {
    const std::size_t after = line + key.size();
    if (text->compare(line, key.size(), key) == 0 && after < text->size() && std::isspace((*text)[after]) != 0) {
      return parse_number(text->c_str() + after);
    }
    const std::size_t newline = text->find('\n', line);
    if (newline == std::string::npos) break;
    line = newline + 1;
  }
  return std::nullopt;
}

// What a control group leaves; its page cache can be reclaimed and counts as free.
std::uint64_t room_in_cgroup(const std::string& directory) {
  const auto limit = read_number(directory + "/memory.max");
  const auto used = read_number(directory + "/memory.current");
  if (!limit || !used) return UINT64_MAX;
  const std::string stat = directory + "/memory.stat";
  const std::uint64_t cache =
      read_entry(stat, "inactive_file").value_or(0) + read_entry(stat, "active_file").value_or(0);
  const std::uint64_t held = *used - std::min(*used, cache);
  return *limit - std::min(*limit, held);
}

// Path of this process's version 2 group below the root.
std::string own_cgroup() {
  const auto text = read_text_file("/proc/self/cgroup");
  if (!text) return "";
  const std::size_t begin = text->rfind("0::", 0) == 0 ? 0 : text->find("\n0::");
  if (begin == std::string::npos) return "";
  const std::size_t path = text->find('/', begin);
  if (path == std::string::npos) return "";
  return text->substr(path, text->find('\n', path) - path);
}

}  // namespace

std::uint64_t available_memory_bytes() {
  std::uint64_t available = UINT64_MAX;
  if (const auto kib = read_entry("/proc/meminfo", "MemAvailable:")) available = *kib * 1024;
  // Every group on the way up may set a limit; the root of a container's own hierarchy is among them.
  std::string path = own_cgroup();
  for (;;) {
    available = std::min(available, room_in_cgroup(kCgroupRoot + path));
    const std::size_t slash = path.find_last_of('/');
    if (slash == std::string::npos) break;
    path.resize(slash);
  }
  return available;
}

}  // namespace ft
