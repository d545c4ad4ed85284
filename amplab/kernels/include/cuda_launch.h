// The host's side of a CUDA launch: where to launch, and the filling of the table that goes along (launch_table.h,
// which shows how both are used). For .cu files alone.
#pragma once

#include <cuda_runtime.h>

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

// A TableFiller that launches on the current device, as many blocks as are resident at once.
template <int kPointers>
class Launches : public TableFiller<kPointers> {
 public:
  using typename TableFiller<kPointers>::Launch;

  Launches(const LaunchPlace& place, Launch launch)
      : TableFiller<kPointers>(place.resident_blocks,
                               [launch = std::move(launch)](const LaunchTable<kPointers>& table, uint32_t blocks) {
                                 launch(table, blocks);
                                 check_cuda(cudaGetLastError());
                               }) {}
};

}  // namespace amplab
