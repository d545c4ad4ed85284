// The host side of a CUDA launch: the device and stream, and filling the table of the launch (launch_table.h, which
// shows how both are used). Only for .cu files.
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

// Makes a device current within the scope; has torch's stream on it, and the number of resident blocks of kThreads
// threads.
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

// A TableFiller that launches on the current device, with as many blocks as can be resident, or more if each would
// otherwise get more than `most_units`.
template <int kPointers>
class Launches : public TableFiller<kPointers> {
 public:
  using typename TableFiller<kPointers>::Launch;

  Launches(const LaunchPlace& place, Launch launch, uint32_t most_units = UINT32_MAX)
      : TableFiller<kPointers>(
            place.resident_blocks,
            [launch = std::move(launch)](const LaunchTable<kPointers>& table, uint32_t blocks) {
              launch(table, blocks);
              check_cuda(cudaGetLastError());
            },
            most_units) {}
};

}  // namespace amplab
