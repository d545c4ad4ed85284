// The CPU kernels of amplab::multi_tensor_sgd_ and amplab::multi_tensor_adam_; schemas and references are in steps.py,
// the arithmetic is in steps.h, the loop in step_driver.h.
#include "step_driver.h"

namespace amplab {
namespace {

void sgd(StableIValue* stack, uint64_t /*inputs*/, uint64_t /*outputs*/) {
  const StepLists lists(stack, 1, false, true);
  lists.has_states() ? step_unless_found<MomentumSgd>(lists) : step_unless_found<PlainSgd>(lists);
}

STABLE_TORCH_LIBRARY_IMPL(amplab, CPU, m) {
  m.impl("multi_tensor_sgd_", &sgd);
  m.impl("multi_tensor_adam_", &step<Adam>);
}

}  // namespace
}  // namespace amplab
