// The CPU kernels of amplab::multi_tensor_unscale_{,copy,add} and multi_tensor_norm; schemas and reference are in
// unscale.py, the loops in unscale_loops.h.
#include "tensor_lists.h"
#include "unscale_spans.h"

namespace amplab {
namespace {

// Element by element along the last dimension; the positions are in elements from the first one.
bool unscale_strided(const StridedPair& pair, const Loops& loops, const Task& task, int64_t dim, int64_t in_at,
                     int64_t out_at, double* sum) {
  if (dim == pair.dim) {
    const char* input = static_cast<const char*>(pair.input) + in_at * kItemSize[pair.input_dtype];
    char* output = static_cast<char*>(pair.output) + out_at * kItemSize[pair.output_dtype];
    return work_on({input, output, 1}, loops, task.inv_scale, 0, 1, sum);
  }
  bool found = false;
  for (int64_t i = 0; i < pair.sizes[dim]; ++i) {
    found |= unscale_strided(pair, loops, task, dim + 1, in_at, out_at, sum);
    in_at += pair.input_strides[dim];
    out_at += pair.output_strides[dim];
  }
  return found;
}

template <Write write, bool in_place>
void unscale(StableIValue* stack, uint64_t /*inputs*/, uint64_t /*outputs*/) {
  const PairedLists lists = take_arguments(stack, in_place, write);
  const Task task{write, *lists.inv_scale(), in_place, lists.norm() != nullptr || lists.norms() != nullptr};
  Findings findings(lists.size(), task);
  unscale_spans(lists.spans(), task, findings);
  for (const StridedPair& pair : lists.strided()) {
    double sum = 0.0;
    const Loops loops = loops_for(pair.input_dtype, pair.output_dtype, task, false);
    if (unscale_strided(pair, loops, task, 0, 0, 0, &sum)) {
      findings.add_bad(pair.index);
    }
    if (task.squares) {
      findings.add_squares(pair.index, sum);
    }
  }
  findings.write(lists.found_inf(), lists.norm(), lists.norms(), lists.first_bad());
}

STABLE_TORCH_LIBRARY_IMPL(amplab, CPU, m) {
  m.impl("multi_tensor_unscale_", &unscale<Write::replace, true>);
  m.impl("multi_tensor_unscale_copy", &unscale<Write::replace, false>);
  m.impl("multi_tensor_unscale_add", &unscale<Write::accumulate, false>);
  m.impl("multi_tensor_norm", &unscale<Write::nothing, true>);
}

}  // namespace
}  // namespace amplab
