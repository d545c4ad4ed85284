// The operations of unscale.cu on given spans, for tensor_table_cuda.cpp. Sync: none.
#pragma once

#include <vector>

#include "tensor_lists.h"

namespace amplab::unscale_cuda {

using Spans = std::vector<TypedSpan>;

// The device, the number of tensors, and the outputs; null for those not requested.
struct Request {
  int32_t device;
  size_t tensors;
  float* found_inf;
  float* norm;
  float* norms;
  int64_t* first_bad;
};

// Unscales each span in place, as amplab::multi_tensor_unscale_.
void unscale_spans(const Spans& spans, const Request& request, const float* inv_scale);

// Writes the 2-norm of all spans and scales them down to max_norm; writes nothing if the norm is smaller.
void clip_spans(const Spans& spans, int32_t device, float* norm, float max_norm);

}  // namespace amplab::unscale_cuda
