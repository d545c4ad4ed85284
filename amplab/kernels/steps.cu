// The CUDA kernels of amplab::multi_tensor_sgd_ and amplab::multi_tensor_adam_; schemas and references are in steps.py,
// the arithmetic is in steps.h, the loop in step_device.h.
#include "step_launch.h"

namespace amplab {
namespace {

void sgd_on_device(StableIValue* stack, uint64_t /*inputs*/, uint64_t /*outputs*/) {
  const StepLists lists(stack, 1, false, true);
  lists.has_states() ? launch_step<MomentumSgd>(lists) : launch_step<PlainSgd>(lists);
}

STABLE_TORCH_LIBRARY_IMPL(amplab, CUDA, m) {
  m.impl("multi_tensor_sgd_", &sgd_on_device);
  m.impl("multi_tensor_adam_", &step_on_device<Adam>);
}

}  // namespace
}  // namespace amplab
