// The host's side of a CUDA launch: where to launch, and the filling of the table that goes along (launch_table.h,
// which shows how both are used). For .cu files alone.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <functional>
#include <memory>

#include "launch_table.h"
#include "tensor_lists.h"

namespace amplab {

inline void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
  }
}

// Makes a device the current one, and back at the end of the scope; knows torch's stream there, and how many blocks of
// kThreads threads are resident at once.
class LaunchPlace {
 public:
  explicit LaunchPlace(int32_t device) {
    check(aoti_torch_create_cuda_guard(device, &guard_), "Choosing the device");
    void* current = nullptr;
    check(aoti_torch_get_current_cuda_stream(device, &current), "Finding the stream");
    stream = static_cast<cudaStream_t>(current);
    int multiprocessors = 0;
    check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
    resident_blocks = static_cast<uint32_t>(multiprocessors * kBlocksPerMultiprocessor);
  }
  LaunchPlace(const LaunchPlace&) = delete;
  LaunchPlace& operator=(const LaunchPlace&) = delete;
  ~LaunchPlace() { aoti_torch_delete_cuda_guard(guard_); }

  cudaStream_t stream = nullptr;
  uint32_t resident_blocks = 0;

 private:
  CUDAGuardHandle guard_ = nullptr;
};

// Collects tensors and launches whenever the table is full, and at `flush`: a list of up to LaunchTable::kCapacity
// tensors (2016 of one pointer, 1344 of two, 672 of five) is one launch. A table in device memory would have no such
// bound, but would have to be copied there whenever a gradient has moved, which costs more than a launch.
template <int kPointers>
class Launches {
 public:
  using Table = LaunchTable<kPointers>;
  using Launch = std::function<void(const Table&, uint32_t blocks)>;

  Launches(const LaunchPlace& place, Launch launch)
      : most_blocks_(place.resident_blocks), launch_(std::move(launch)), table_(new Table) {
    table_->count = 0;
  }

  // `pointers` to the first elements of tensors of `numel` elements each; `place` in the caller's list, rising.
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
      launch_(*table_, std::min(table_->ends[table_->count - 1], most_blocks_));
      check_cuda(cudaGetLastError());
    }
    table_->count = 0;
    units_ = 0;
  }

 private:
  bool fits(int64_t units, int64_t place) const {
    return table_->count == 0 || (table_->count < Table::kCapacity && units_ + units <= UINT32_MAX &&
                                  place - table_->first_place <= UINT16_MAX);
  }

  uint32_t most_blocks_;
  Launch launch_;
  std::unique_ptr<Table> table_;
  int64_t units_ = 0;
};

}  // namespace amplab
