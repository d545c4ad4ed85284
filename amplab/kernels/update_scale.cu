// The CUDA kernel of amplab::update_scale_: one thread. Nothing waits for the host; the launch can be captured in a
// graph.
#include <cuda_runtime.h>

#include "scale_arguments.h"

namespace amplab::scale {
namespace {

template <class T>
__global__ void update_kernel(T* scale, int32_t* growth_tracker, int32_t* hysteresis_tracker, const float* found_inf,
                              Constants rule) {
  update(*scale, *growth_tracker, hysteresis_tracker, *found_inf, rule);
}

template <class T>
void launch(const Arguments& arguments, cudaStream_t stream) {
  update_kernel<T><<<1, 1, 0, stream>>>(static_cast<T*>(arguments.scale()), arguments.growth_tracker(),
                                        arguments.hysteresis_tracker(), arguments.found_inf(), arguments.rule());
}

class DeviceGuard {
 public:
  explicit DeviceGuard(int32_t index) { check(aoti_torch_create_cuda_guard(index, &guard_), "Choosing the device"); }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  ~DeviceGuard() { aoti_torch_delete_cuda_guard(guard_); }

 private:
  CUDAGuardHandle guard_;
};

void update_scale(StableIValue* stack, uint64_t /*inputs*/, uint64_t /*outputs*/) {
  const Arguments arguments(stack);
  const DeviceGuard guard(arguments.device_index());
  void* stream = nullptr;
  check(aoti_torch_get_current_cuda_stream(arguments.device_index(), &stream), "Finding the stream");
  if (arguments.is_double()) {
    launch<double>(arguments, static_cast<cudaStream_t>(stream));
  } else {
    launch<float>(arguments, static_cast<cudaStream_t>(stream));
  }
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
  }
}

STABLE_TORCH_LIBRARY_IMPL(amplab, CUDA, m) { m.impl("update_scale_", &update_scale); }

}  // namespace
}  // namespace amplab::scale
