// The CPU kernel of amplab::update_scale_; schema and reference are in update_scale.py.
#include "scale_arguments.h"

namespace amplab::scale {
namespace {

template <class T>
void update_in_place(const Arguments& arguments) {
  update(*static_cast<T*>(arguments.scale()), *arguments.growth_tracker(), arguments.hysteresis_tracker(),
         *arguments.found_inf(), arguments.rule());
}

void update_scale(StableIValue* stack, uint64_t /*inputs*/, uint64_t /*outputs*/) {
  const Arguments arguments(stack);
  arguments.is_double() ? update_in_place<double>(arguments) : update_in_place<float>(arguments);
}

STABLE_TORCH_LIBRARY_IMPL(amplab, CPU, m) { m.impl("update_scale_", &update_scale); }

}  // namespace
}  // namespace amplab::scale
