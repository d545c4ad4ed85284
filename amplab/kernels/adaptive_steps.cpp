// The CPU kernels of Adagrad, Adadelta and RMSprop; schemas and references are in adaptive_steps.py, the arithmetic is
// in adaptive_steps.h, the loop in step_driver.h.
#include "adaptive_steps.h"
#include "step_driver.h"

namespace amplab {
namespace {

STABLE_TORCH_LIBRARY_IMPL(amplab, CPU, m) {
  m.impl("multi_tensor_adagrad_", &step<Adagrad>);
  m.impl("multi_tensor_adadelta_", &step<Adadelta>);
  m.impl("multi_tensor_rmsprop_", &step<Rmsprop>);
  m.impl("multi_tensor_rmsprop_centered_", &step<CenteredRmsprop>);
  m.impl("multi_tensor_rmsprop_momentum_", &step<MomentumRmsprop>);
  m.impl("multi_tensor_rmsprop_centered_momentum_", &step<CenteredMomentumRmsprop>);
}

}  // namespace
}  // namespace amplab
