#include "memory_info.h"

#include <algorithm>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>

namespace ft {
namespace {

constexpr const char* kCgroupRoot = "/sys/fs/cgroup";

std::optional<std::uint64_t> read_number(const std::string& path) {
  std::ifstream file(path);
  std::uint64_t value = 0;
  if (file >> value) return value;
  return std::nullopt;  // absent, or "max"
}

// The value behind `key` in a file of "key value" lines.
std::optional<std::uint64_t> read_entry(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string name;
    std::uint64_t value = 0;
    if (words >> name >> value && name == key) return value;
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

std::string own_cgroup() {
  std::ifstream file("/proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {
    if (line.rfind("0::", 0) == 0) return line.substr(3);
  }
  return "";
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
