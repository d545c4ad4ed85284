// Whether the tensors of a list share memory; the counterpart of check_memory in list_checks.py, with the same order
// and messages.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <optional>
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
    return begin != other.begin ? begin < other.begin
                                : std::tie(is_input, index) < std::tie(other.is_input, other.index);
  }
};

inline Extent extent_of(const void* memory, int64_t bytes, bool is_input, int index) {
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  return {begin, begin + static_cast<uintptr_t>(bytes), index, is_input};
}

// Two that overlap, in ascending order.
struct Overlap {
  Extent first;
  Extent second;
};

// Examines the extents in the given order. True if it is ascending up to the end or to the first overlap.
inline bool search(const std::vector<Extent>& extents, const std::vector<int>& order, std::optional<Overlap>& found) {
  const Extent none{0, 0, 0, false};
  const Extent* previous = &none;
  const Extent* furthest = &none;          // of everything before
  const Extent* furthest_written = &none;  // of what is written before
  for (const int place : order) {
    const Extent& extent = extents[place];
    if (extent < *previous) {
      return false;
    }
    const Extent& other = extent.is_input ? *furthest_written : *furthest;
    if (extent.begin < other.end) {
      found = Overlap{other, extent};
      return true;
    }
    previous = &extent;
    furthest = extent.end > furthest->end ? &extent : furthest;
    furthest_written = !extent.is_input && extent.end > furthest_written->end ? &extent : furthest_written;
  }
  return true;
}

// Finds memory that is written twice, or read for one tensor and written for another.
//
// Sorting costs more than unscaling small tensors does. An allocator returns the same addresses at every step, so the
// order of the last list is tried first.
inline std::optional<Overlap> find_overlap(const std::vector<Extent>& extents, std::vector<int>& order) {
  if (order.size() != extents.size()) {
    order.resize(extents.size());
    std::iota(order.begin(), order.end(), 0);
  }
  std::optional<Overlap> found;
  if (!search(extents, order, found)) {
    std::sort(order.begin(), order.end(), [&](int a, int b) { return extents[a] < extents[b]; });
    search(extents, order, found);
  }
  return found;
}

// Throws if two overlap, with their names from `name`. `order` is kept between calls.
template <class Name>
void require_apart(const std::vector<Extent>& extents, std::vector<int>& order, Name name) {
  if (const auto overlap = find_overlap(extents, order)) {
    throw std::runtime_error(name(overlap->first) + " and " + name(overlap->second) +
                             " overlap in memory: list each tensor once, and no views that share elements.");
  }
}

}  // namespace amplab
