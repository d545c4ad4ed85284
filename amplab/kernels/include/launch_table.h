// The table of tensors in the parameters of one launch, and the loop of a block over its share of them; the same code
// on the host, without a torch header. The launch is in cuda_launch.h.
//
// A tensor is cut into units of 1024 elements. The units of the whole list are numbered and divided evenly among the
// blocks, whatever the sizes of the tensors: one large tensor occupies all of them, and a thousand small ones are one
// launch. A block finds its first tensor by binary search and continues from there.
//
//   template <class T>
//   __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
//       step_kernel(const __grid_constant__ LaunchTable<3> table, const float* inv_scale) {
//     for_each_piece(table, blockIdx.x, gridDim.x, [&](const Piece& piece) {
//       T* param = table.memory<T>(0, piece);                  // the first element of the piece, not of the tensor
//       const T* grad = table.memory<const T>(1, piece);
//       for (int64_t i = threadIdx.x; i < piece.numel; i += kThreads) …
//     });
//   }
//
//   Launches<3> launches(place, [&](const LaunchTable<3>& table, uint32_t blocks) {          // cuda_launch.h
//     step_kernel<float><<<blocks, kThreads, 0, place.stream>>>(table, inv_scale);
//   });
//   for (…) launches.add({param, grad, exp_avg}, numel, index_in_the_list);
//   launches.flush();
//
// A piece begins at a multiple of 1024 elements, so it is aligned as its tensor is. All threads of a block see the same
// pieces in the same order: __syncthreads() may be used inside the body. The other parameters of a kernel may take
// kArgumentBytes. All .cu files are compiled as one: each defines its names in a namespace of its own inside amplab.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <memory>

#include "unscale.h"

namespace amplab {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 4;  // 64 registers a thread
constexpr int kUnit = 1024;                  // elements; a multiple of every pack of 16 bytes

constexpr int kParameterBytes = 32764;  // of a launch, from CUDA 12.1 on
constexpr int kArgumentBytes = 500;     // of them for the other parameters

// A part of one tensor, for one block.
struct Piece {
  int tensor;     // its index in the table
  int64_t first;  // element of the tensor
  int64_t numel;
};

// Each line has kPointers tensors of equal size, which are read and written together.
template <int kPointers>
struct LaunchTable {
  static constexpr int kCapacity = (kParameterBytes - kArgumentBytes - 8) / (8 * kPointers + 8);

  void* pointers[kPointers][kCapacity];
  uint32_t ends[kCapacity];    // units of the whole table up to the end of this tensor
  uint16_t tails[kCapacity];   // elements in the tensor's last unit, less one
  uint16_t places[kCapacity];  // in the caller's list, less `first_place`
  int32_t first_place;
  int32_t count;

  AMPLAB_FUNCTION uint32_t begin(int tensor) const { return tensor == 0 ? 0 : ends[tensor - 1]; }

  AMPLAB_FUNCTION int place(int tensor) const { return first_place + places[tensor]; }

  // The last unit of a tensor may be short.
  AMPLAB_FUNCTION Piece piece(int tensor, uint32_t from, uint32_t to) const {
    const int64_t first = static_cast<int64_t>(from - begin(tensor)) * kUnit;
    const int64_t missing = to == ends[tensor] ? kUnit - 1 - tails[tensor] : 0;
    return {tensor, first, static_cast<int64_t>(to - from) * kUnit - missing};
  }

  template <class T>
  AMPLAB_FUNCTION T* memory(int pointer, const Piece& piece) const {
    return static_cast<T*>(pointers[pointer][piece.tensor]) + piece.first;
  }
};

// The first unit of a block's share; `block` == `blocks` gives the end of the last one's.
AMPLAB_FUNCTION uint32_t share(uint32_t units, uint32_t block, uint32_t blocks) {
  return static_cast<uint32_t>(static_cast<uint64_t>(units) * block / blocks);
}

// The block whose share contains `unit`; the inverse of `share`.
AMPLAB_FUNCTION uint32_t block_of(uint32_t unit, uint32_t units, uint32_t blocks) {
  return static_cast<uint32_t>(((static_cast<uint64_t>(unit) + 1) * blocks - 1) / units);
}

template <int kPointers, class Body>
AMPLAB_FUNCTION void for_each_piece(const LaunchTable<kPointers>& table, uint32_t block, uint32_t blocks,
                                    const Body& body) {
  const uint32_t units = table.ends[table.count - 1];
  uint32_t at = share(units, block, blocks);
  const uint32_t end = share(units, block + 1, blocks);
  if (at == end) {
    return;
  }
  for (int tensor = find_span(table.ends, table.count, at); at < end; ++tensor) {
    const uint32_t to = end < table.ends[tensor] ? end : table.ends[tensor];
    body(table.piece(tensor, at, to));
    at = to;
  }
}

// Collects tensors and launches whenever the table is full, and at `flush`: a list of up to LaunchTable::kCapacity
// tensors (2016 of one pointer, 1344 of two, 672 of five) is one launch. A table in device memory would have no such
// bound, but would have to be copied whenever a gradient has another address, which costs more than a launch.
template <int kPointers>
class TableFiller {
 public:
  using Table = LaunchTable<kPointers>;
  using Launch = std::function<void(const Table&, uint32_t blocks)>;

  // Launches `blocks` blocks, or as many more as give each at most `most_units`; never more than there are units.
  TableFiller(uint32_t blocks, Launch launch, uint32_t most_units = UINT32_MAX)
      : blocks_(blocks), most_units_(most_units), launch_(std::move(launch)), table_(new Table) {
    table_->count = 0;
  }

  // `pointers` to the first elements of tensors of `numel` elements each; `place` in the caller's list, ascending.
  void add(const std::array<const void*, kPointers>& pointers, int64_t numel, int64_t place) {
    if (numel == 0) {
      return;
    }
    const int64_t units = (numel + kUnit - 1) / kUnit;
    if (!fits(units, place)) {
      flush();
    }
    const int at = table_->count;
    if (at == 0) {
      table_->first_place = static_cast<int32_t>(place);
    }
    for (int pointer = 0; pointer < kPointers; ++pointer) {
      table_->pointers[pointer][at] = const_cast<void*>(pointers[pointer]);
    }
    table_->ends[at] = static_cast<uint32_t>(units_ += units);
    table_->tails[at] = static_cast<uint16_t>((numel - 1) % kUnit);
    table_->places[at] = static_cast<uint16_t>(place - table_->first_place);
    table_->count = at + 1;
  }

  void flush() {
    if (table_->count > 0) {
      const uint32_t units = table_->ends[table_->count - 1];
      launch_(*table_, std::min(units, std::max(blocks_, units / most_units_ + (units % most_units_ != 0))));
    }
    table_->count = 0;
    units_ = 0;
  }

 private:
  bool fits(int64_t units, int64_t place) const {
    return table_->count == 0 || (table_->count < Table::kCapacity && units_ + units <= UINT32_MAX &&
                                  place - table_->first_place <= UINT16_MAX);
  }

  uint32_t blocks_;
  uint32_t most_units_;
  Launch launch_;
  std::unique_ptr<Table> table_;
  int64_t units_ = 0;
};

}  // namespace amplab
