// As parameter_list.cpp, for parameters on a CUDA device. Not in a .cu file: nvcc takes half a minute for c10's classes.
#if defined(USE_CUDA)

#include "parameter_list.h"
#include "unscale_cuda.h"

namespace amplab::unscale_cuda {
namespace {

const ParameterList& remembered(StableIValue value) {
  return *reinterpret_cast<const ParameterList*>(torch::stable::detail::to<int64_t>(value));
}

void remember(StableIValue* stack, uint64_t /*inputs*/, uint64_t /*outputs*/) {
  const auto* list = new ParameterList(take_list(stack[0]));
  stack[0] = torch::stable::detail::from(reinterpret_cast<int64_t>(list));
}

void unscale(StableIValue* stack, uint64_t /*inputs*/, uint64_t /*outputs*/) {
  const Handle found_inf(stack[1]);
  const Handle inv_scale(stack[2]);
  Spans spans;
  if (!remembered(stack[0]).lay_out_gradients(torch::stable::detail::to<bool>(stack[3]), spans)) {
    stack[0] = torch::stable::detail::from(int64_t{-1});
    return;
  }
  unscale_spans(spans, found_inf, inv_scale);
  stack[0] = torch::stable::detail::from(static_cast<int64_t>(spans.size()));
}

void clip(StableIValue* stack, uint64_t /*inputs*/, uint64_t /*outputs*/) {
  const Handle norm(stack[1]);
  Spans spans;
  bool floats = remembered(stack[0]).lay_out_gradients(false, spans);
  for (const TypedSpan& typed : spans) {
    floats = floats && typed.input_dtype == kFloat;
  }
  if (!floats) {
    stack[0] = torch::stable::detail::from(int64_t{-1});
    return;
  }
  clip_spans(spans, norm, static_cast<float>(torch::stable::detail::to<double>(stack[2])));
  stack[0] = torch::stable::detail::from(static_cast<int64_t>(spans.size()));
}

STABLE_TORCH_LIBRARY_IMPL(amplab, CUDA, m) {
  m.impl("remember_parameters", &remember);
  m.impl("unscale_remembered_", &unscale);
  m.impl("clip_remembered_", &clip);
}

}  // namespace
}  // namespace amplab::unscale_cuda

#endif
