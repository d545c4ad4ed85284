// The kernels that find the gradients of remembered parameters by themselves; schemas are in parameter_list.py.
#include "parameter_list.h"

#include "unscale_spans.h"

namespace amplab {
namespace {

const ParameterList& parameter_list(StableIValue value) {
  return *reinterpret_cast<const ParameterList*>(torch::stable::detail::to<int64_t>(value));
}

void remember_parameters(StableIValue* stack, uint64_t /*inputs*/, uint64_t /*outputs*/) {
  const auto* list = new ParameterList(take_list(stack[0]));
  stack[0] = torch::stable::detail::from(reinterpret_cast<int64_t>(list));
}

void forget_parameters(StableIValue* stack, uint64_t /*inputs*/, uint64_t /*outputs*/) {
  const Handle here(stack[1]);
  delete &parameter_list(stack[0]);
}

// Returns how many gradients were unscaled; -1 where the general operator has to do it, and nothing was written.
void unscale_remembered(StableIValue* stack, uint64_t /*inputs*/, uint64_t /*outputs*/) {
  const Handle found_inf(stack[1]);
  const Handle inv_scale(stack[2]);
  std::vector<TypedSpan> spans;
  if (!parameter_list(stack[0]).lay_out_gradients(torch::stable::detail::to<bool>(stack[3]), spans)) {
    stack[0] = torch::stable::detail::from(int64_t{-1});
    return;
  }
  const Task task{Write::replace, *static_cast<const float*>(inv_scale.data()), true, false};
  Findings findings(spans.size(), task);
  unscale_spans(spans, task, findings);
  findings.write(static_cast<float*>(found_inf.mutable_data()), nullptr, nullptr, nullptr);
  stack[0] = torch::stable::detail::from(static_cast<int64_t>(spans.size()));
}

// Writes the 2-norm of the gradients and scales them down to max_norm; returns as unscale_remembered.
void clip_remembered(StableIValue* stack, uint64_t /*inputs*/, uint64_t /*outputs*/) {
  const Handle norm(stack[1]);
  std::vector<TypedSpan> spans;
  bool floats = parameter_list(stack[0]).lay_out_gradients(false, spans);
  for (const TypedSpan& typed : spans) {
    floats = floats && typed.input_dtype == kFloat;
  }
  if (!floats) {
    stack[0] = torch::stable::detail::from(int64_t{-1});
    return;
  }
  const Task task{Write::nothing, 1.0f, true, true};
  Findings findings(spans.size(), task);
  unscale_spans(spans, task, findings);
  const float total = findings.norm();
  const float factor = static_cast<float>(torch::stable::detail::to<double>(stack[2])) / (total + 1e-6f);
  *static_cast<float*>(norm.mutable_data()) = total;
  if (!(factor >= 1.0f)) {  // NaN goes on, as in torch
    unscale_spans(spans, {Write::replace, factor, true, false}, findings);
  }
  stack[0] = torch::stable::detail::from(static_cast<int64_t>(spans.size()));
}

STABLE_TORCH_LIBRARY_IMPL(amplab, CPU, m) {
  m.impl("remember_parameters", &remember_parameters);
  m.impl("forget_parameters", &forget_parameters);
  m.impl("unscale_remembered_", &unscale_remembered);
  m.impl("clip_remembered_", &clip_remembered);
}

}  // namespace
}  // namespace amplab
