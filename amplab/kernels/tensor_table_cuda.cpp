// As tensor_table.cpp, for tensors on a CUDA device. Not in a .cu file: nvcc takes half a minute for c10's classes.
#if defined(USE_CUDA)

#include "tensor_table.h"
#include "unscale_cuda.h"

namespace amplab::unscale_cuda {
namespace {

using torch::stable::detail::to;

void unscale(StableIValue* stack, uint64_t /*inputs*/, uint64_t /*outputs*/) {
  TensorTable& list = table_of(stack[0]);
  const Handle found_inf(stack[1]);
  const Handle inv_scale(stack[2]);
  const Receivers receivers{take_optional(stack[5]), take_optional(stack[6]), take_optional(stack[7])};
  const auto* spans = list.lay_out(to<bool>(stack[3]), to<bool>(stack[4]));
  if (spans != nullptr) {
    check_receivers(receivers, list.size(), found_inf);
    const Request request{found_inf.device_index(),
                          list.size(),
                          static_cast<float*>(found_inf.mutable_data()),
                          receiver<float>(receivers.norm),
                          receiver<float>(receivers.norms),
                          receiver<int64_t>(receivers.first_bad)};
    unscale_spans(*spans, request, static_cast<const float*>(inv_scale.data()));
  }
  stack[0] = torch::stable::detail::from(reply(list, spans));
}

void clip(StableIValue* stack, uint64_t /*inputs*/, uint64_t /*outputs*/) {
  const Handle norm(stack[1]);
  const auto max_norm = static_cast<float>(to<double>(stack[2]));
  TensorTable& list = table_of(stack[0]);
  const auto is_float = [](const TypedSpan& typed) { return typed.input_dtype == kFloat; };
  const auto* spans = list.lay_out(true, false);
  if (spans != nullptr && !std::all_of(spans->begin(), spans->end(), is_float)) {
    spans = nullptr;
  }
  if (spans != nullptr) {
    clip_spans(*spans, norm.device_index(), static_cast<float*>(norm.mutable_data()), max_norm);
  }
  stack[0] = torch::stable::detail::from(reply(list, spans));
}

STABLE_TORCH_LIBRARY_IMPL(amplab, CUDA, m) {
  m.impl("make_tensor_table", &make_tensor_table);
  m.impl("unscale_table_", &unscale);
  m.impl("clip_table_", &clip);
}

}  // namespace
}  // namespace amplab::unscale_cuda

#endif
