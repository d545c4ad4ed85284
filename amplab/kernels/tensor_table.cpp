// The operators on tensor tables; schemas are in tensor_table.py.
#include "tensor_table.h"

#include "unscale_spans.h"

namespace amplab {
namespace {

void delete_tensor_table(StableIValue* stack, uint64_t /*inputs*/, uint64_t /*outputs*/) {
  const Handle here(stack[1]);
  delete &table_of(stack[0]);
}

void unscale_table(StableIValue* stack, uint64_t /*inputs*/, uint64_t /*outputs*/) {
  TensorTable& list = table_of(stack[0]);
  const Handle found_inf(stack[1]);
  const Handle inv_scale(stack[2]);
  require_memory("found_inf", found_inf);
  require_memory("inv_scale", inv_scale);
  const Receivers receivers{take_optional(stack[5]), take_optional(stack[6]), take_optional(stack[7])};
  const auto* spans = list.lay_out(torch::stable::detail::to<bool>(stack[3]), torch::stable::detail::to<bool>(stack[4]));
  if (spans != nullptr) {
    check_receivers(receivers, list.size(), found_inf);
    const bool squares = receivers.norm || receivers.norms;
    const Task task{Write::replace, *static_cast<const float*>(inv_scale.data()), true, squares};
    Findings findings(list.size(), task);
    unscale_spans(*spans, task, findings);
    findings.write(static_cast<float*>(found_inf.mutable_data()), receiver<float>(receivers.norm),
                   receiver<float>(receivers.norms), receiver<int64_t>(receivers.first_bad));
  }
  stack[0] = torch::stable::detail::from(reply(list, spans));
}

// Writes the 2-norm of float32 gradients and scales them down to max_norm.
void clip_table(StableIValue* stack, uint64_t /*inputs*/, uint64_t /*outputs*/) {
  TensorTable& list = table_of(stack[0]);
  const Handle norm(stack[1]);
  require_memory("norm", norm);
  const double max_norm = torch::stable::detail::to<double>(stack[2]);
  const auto is_float = [](const TypedSpan& typed) { return typed.input_dtype == kFloat; };
  const auto* spans = list.lay_out(true, false);
  if (spans != nullptr && !std::all_of(spans->begin(), spans->end(), is_float)) {
    spans = nullptr;
  }
  if (spans != nullptr) {
    const Task measure{Write::nothing, 1.0f, true, true};
    Findings findings(list.size(), measure);
    unscale_spans(*spans, measure, findings);
    const float total = findings.norm();
    const float factor = static_cast<float>(max_norm) / (total + 1e-6f);
    *static_cast<float*>(norm.mutable_data()) = total;
    if (!(factor >= 1.0f)) {  // NaN is also applied, as in torch
      unscale_spans(*spans, {Write::replace, factor, true, false}, findings);
    }
  }
  stack[0] = torch::stable::detail::from(reply(list, spans));
}

STABLE_TORCH_LIBRARY_IMPL(amplab, CPU, m) {
  m.impl("make_tensor_table", &make_tensor_table);
  m.impl("delete_tensor_table", &delete_tensor_table);
  m.impl("unscale_table_", &unscale_table);
  m.impl("clip_table_", &clip_table);
}

}  // namespace
}  // namespace amplab
