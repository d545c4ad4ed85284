// What unscale.cu does for tensors that were found already, as in tensor_table_cuda.cpp. Sync: none.
#pragma once

#include <vector>

#include "tensor_lists.h"

namespace amplab::unscale_cuda {

using Spans = std::vector<TypedSpan>;

// On which device, for how many tensors, and where to leave what was found; null where nobody asked.
struct Request {
  int32_t device;
  size_t tensors;
  float* found_inf;
  float* norm;
  float* norms;
  int64_t* first_bad;
};

// Each span in place, as amplab::multi_tensor_unscale_ does.
void unscale_spans(const Spans& spans, const Request& request, const float* inv_scale);

// Writes the 2-norm of all spans and scales them down to max_norm, without a write where they are within it.
void clip_spans(const Spans& spans, int32_t device, float* norm, float max_norm);

}  // namespace amplab::unscale_cuda
