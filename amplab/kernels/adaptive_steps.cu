// The CUDA kernels of Adagrad, Adadelta and RMSprop; schemas and references are in adaptive_steps.py, the arithmetic is
// in adaptive_steps.h, the loop in step_device.h.
#include "adaptive_steps.h"
#include "step_launch.h"

namespace amplab {
namespace {

STABLE_TORCH_LIBRARY_IMPL(amplab, CUDA, m) {
  m.impl("multi_tensor_adagrad_", &step_on_device<Adagrad>);
  m.impl("multi_tensor_adadelta_", &step_on_device<Adadelta>);
  m.impl("multi_tensor_rmsprop_", &step_on_device<Rmsprop>);
  m.impl("multi_tensor_rmsprop_centered_", &step_on_device<CenteredRmsprop>);
  m.impl("multi_tensor_rmsprop_momentum_", &step_on_device<MomentumRmsprop>);
  m.impl("multi_tensor_rmsprop_centered_momentum_", &step_on_device<CenteredMomentumRmsprop>);
}

}  // namespace
}  // namespace amplab
