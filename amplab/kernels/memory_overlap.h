// Whether the tensors of a list share memory; the twin of check_memory in list_checks.py, in the same order and words.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

namespace amplab {

// The bytes of a tensor.
struct Extent {
  uintptr_t begin;
  uintptr_t end;
  int index;
  bool is_input;  // only read

  bool operator<(const Extent& other) const {
    return std::tie(begin, is_input, index) < std::tie(other.begin, other.is_input, other.index);
  }
};

inline Extent extent_of(const void* memory, int64_t bytes, bool is_input, int index) {
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  return {begin, begin + static_cast<uintptr_t>(bytes), index, is_input};
}

// Throws where something is written twice, or read for one tensor and written for another.
inline void require_apart(std::vector<Extent>& extents, bool in_place) {
  if (!std::is_sorted(extents.begin(), extents.end())) {
    std::sort(extents.begin(), extents.end());
  }
  const Extent none{0, 0, 0, false};
  const Extent* furthest = &none;          // of all that lies before
  const Extent* furthest_written = &none;  // of what is written there
  for (const Extent& extent : extents) {
    const Extent& other = extent.is_input ? *furthest_written : *furthest;
    if (extent.begin < other.end) {
      const auto name = [&](const Extent& each) {
        return (each.is_input || in_place ? "input " : "output ") + std::to_string(each.index);
      };
      throw std::runtime_error(name(other) + " and " + name(extent) +
                               " overlap in memory: list each tensor once, and no views that share elements.");
    }
    furthest = extent.end > furthest->end ? &extent : furthest;
    if (!extent.is_input) {
      furthest_written = extent.end > furthest_written->end ? &extent : furthest_written;
    }
  }
}

}  // namespace amplab
