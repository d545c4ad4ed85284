// What unscale.cu does for gradients that were found already, as in parameter_list_cuda.cpp. Sync: none.
#pragma once

#include <vector>

#include "tensor_lists.h"

namespace amplab::unscale_cuda {

using Spans = std::vector<TypedSpan>;

// Each span in place, as amplab::multi_tensor_unscale_ does.
void unscale_spans(const Spans& spans, const Handle& found_inf, const Handle& inv_scale);

// Writes the 2-norm of all spans and scales them down to max_norm, without a write where they are within it.
void clip_spans(const Spans& spans, const Handle& norm, float max_norm);

}  // namespace amplab::unscale_cuda
