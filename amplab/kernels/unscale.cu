// The CUDA side of amplab::multi_tensor_unscale_{,copy,add} and of multi_tensor_norm; schemas and reference are in
// unscale.py, the kernels in unscale_device.h.
//
// One launch for each pair of dtypes, up to 2016 tensors in place or 1344 pairs (launch_table.h); a second, of a few
// blocks, if a norm is requested. inv_scale is read and all results are written on the device: nothing waits for the
// host, and the launches can be captured in a graph.
#include "unscale_cuda.h"

#include "cuda_launch.h"
#include "unscale_device.h"

namespace amplab::unscale_cuda {
namespace {

template <int kPointers>
using Kernel = void (*)(LaunchTable<kPointers>, Findings);

template <Write write, class In>
constexpr std::array<Kernel<2>, kDtypes> kInto = {
    unscale_kernel<write, In, Half, 2>, unscale_kernel<write, In, BFloat16, 2>, unscale_kernel<write, In, float, 2>,
    unscale_kernel<write, In, double, 2>};

template <Write write>
constexpr std::array<std::array<Kernel<2>, kDtypes>, kDtypes> kPairs = {kInto<write, Half>, kInto<write, BFloat16>,
                                                                        kInto<write, float>, kInto<write, double>};

template <Write write>
constexpr std::array<Kernel<1>, kDtypes> kInPlace = {
    unscale_kernel<write, Half, Half, 1>, unscale_kernel<write, BFloat16, BFloat16, 1>,
    unscale_kernel<write, float, float, 1>, unscale_kernel<write, double, double, 1>};

template <Write write, int kPointers>
Kernel<kPointers> kernel_for(int input_dtype, int output_dtype) {
  if constexpr (kPointers == 1) {
    return kInPlace<write>[input_dtype];
  } else {
    return kPairs<write>[input_dtype][output_dtype];
  }
}

// Memory that later work on the stream may overwrite after the handle is destroyed, not before.
Handle empty_doubles(int64_t count, int32_t device) {
  const int64_t stride = 1;
  AtenTensorHandle doubles = nullptr;
  check(aoti_torch_empty_strided(1, &count, &stride, aoti_torch_dtype_float64(), aoti_torch_device_type_cuda(), device,
                                 &doubles),
        "Allocating device memory");
  return Handle(torch::stable::detail::from(doubles));
}

// All launches of one call.
class Pass {
 public:
  Pass(int32_t device, const Findings& findings, size_t tensors = 0)
      : place_(device), device_(device), findings_(findings), squares_(make_squares(tensors)) {}

  template <Write write, int kPointers>
  void launch(const Spans& spans) {
    bool present[kDtypes][kDtypes] = {};
    for (const TypedSpan& each : spans) {
      present[each.input_dtype][each.output_dtype] = true;
    }
    for (int input_dtype = 0; input_dtype < kDtypes; ++input_dtype) {
      for (int output_dtype = 0; output_dtype < kDtypes; ++output_dtype) {
        if (present[input_dtype][output_dtype]) {
          launch<write, kPointers>(spans, input_dtype, output_dtype);
        }
      }
    }
  }

  template <Write write>
  void launch(const StridedPair& pair) {
    const Layout layout = layout_of(pair);
    int64_t numel = 1;
    for (int d = 0; d < layout.dim; ++d) {
      numel *= layout.sizes[d];
    }
    Launches<2> launches(place_, [&](const LaunchTable<2>& table, uint32_t blocks) {
      run(table, blocks, [&](const Findings& findings) {
        strided_kernel<write><<<blocks, kThreads, 0, place_.stream>>>(table, layout, findings);
      });
    });
    launches.add({pair.input, pair.output}, numel, pair.index);
    launches.flush();
  }

 private:
  bool measures() const {
    return findings_.norm != nullptr || findings_.norms != nullptr || findings_.factor != nullptr;
  }

  std::optional<Handle> make_squares(size_t tensors) {
    if (!measures()) {
      return std::nullopt;
    }
    Handle squares = empty_doubles(1, device_);
    findings_.squares = static_cast<double*>(squares.mutable_data());
    check_cuda(cudaMemsetAsync(findings_.squares, 0, sizeof(double), place_.stream));
    if (findings_.norm != nullptr) {  // the value for empty tensors or none
      check_cuda(cudaMemsetAsync(findings_.norm, 0, sizeof(float), place_.stream));
    }
    if (findings_.norms != nullptr) {
      check_cuda(cudaMemsetAsync(findings_.norms, 0, tensors * sizeof(float), place_.stream));
    }
    return squares;
  }

  template <Write write, int kPointers>
  void launch(const Spans& spans, int input_dtype, int output_dtype) {
    const Kernel<kPointers> kernel = kernel_for<write, kPointers>(input_dtype, output_dtype);
    Launches<kPointers> launches(place_, [&](const LaunchTable<kPointers>& table, uint32_t blocks) {
      run(table, blocks, [&](const Findings& findings) {
        kernel<<<blocks, kThreads, 0, place_.stream>>>(table, findings);
      });
    }, most_units(input_dtype, output_dtype));
    for (const TypedSpan& each : spans) {
      if (each.input_dtype == input_dtype && each.output_dtype == output_dtype) {
        if constexpr (kPointers == 1) {
          launches.add({each.span.output}, each.span.numel, each.index);
        } else {
          launches.add({each.span.input, each.span.output}, each.span.numel, each.index);
        }
      }
    }
    launches.flush();
  }

  // What the threads of a block have in flight: then the blocks that run read and write neighboring memory, which is
  // up to 8 % faster than a long share for each block. The sums of norms are kept for each block: few are better.
  uint32_t most_units(int input_dtype, int output_dtype) const {
    constexpr uint32_t kSize[kDtypes] = {2, 2, 4, 8};
    constexpr uint32_t kBytes = 4 * 16 * kThreads;
    return measures() ? UINT32_MAX : kBytes / std::min(kSize[input_dtype], kSize[output_dtype]) / kUnit;
  }

  // One launch, and one more if norms are requested.
  template <int kPointers, class Kernel>
  void run(const LaunchTable<kPointers>& table, uint32_t blocks, const Kernel& kernel) {
    if (!measures()) {
      kernel(findings_);
      return;
    }
    Findings findings = findings_;
    const uint32_t pieces = table.count + blocks;
    const Handle squares = empty_doubles(pieces + blocks, device_);
    findings.piece_squares = static_cast<double*>(squares.mutable_data());
    findings.block_squares = findings.piece_squares + pieces;
    kernel(findings);
    constexpr uint32_t kWarps = kThreads / kWarp;
    const uint32_t for_norms = findings.norms == nullptr ? 0 : (table.count + kWarps - 1) / kWarps;
    finish_kernel<<<1 + for_norms, kThreads, 0, place_.stream>>>(table, blocks, findings);
  }

  // Drops dimensions of size 1, and merges dimensions that are contiguous in both.
  static Layout layout_of(const StridedPair& pair) {
    Layout layout{pair.input_dtype, pair.output_dtype, 0, {}, {}, {}};
    for (int64_t d = 0; d < pair.dim; ++d) {
      const int64_t size = pair.sizes[d];
      const int last = layout.dim - 1;
      if (size == 1) {
        continue;
      }
      if (last >= 0 && layout.input_strides[last] == size * pair.input_strides[d] &&
          layout.output_strides[last] == size * pair.output_strides[d]) {
        layout.sizes[last] *= size;
        layout.input_strides[last] = pair.input_strides[d];
        layout.output_strides[last] = pair.output_strides[d];
        continue;
      }
      if (layout.dim == Layout::kMost) {
        throw std::runtime_error("tensor " + std::to_string(pair.index) +
                                 " has gaps in more than 16 dimensions: pass a contiguous clone.");
      }
      layout.sizes[layout.dim] = size;
      layout.input_strides[layout.dim] = pair.input_strides[d];
      layout.output_strides[layout.dim++] = pair.output_strides[d];
    }
    return layout;
  }

  LaunchPlace place_;
  int32_t device_;
  Findings findings_;
  std::optional<Handle> squares_;
};

Findings findings_for(const Request& request, const float* inv_scale) {
  Findings findings{};
  findings.inv_scale = inv_scale;
  findings.found_inf = request.found_inf;
  findings.first_bad = reinterpret_cast<unsigned long long*>(request.first_bad);
  findings.norm = request.norm;
  findings.norms = request.norms;
  return findings;
}

template <Write write, bool in_place>
void unscale(StableIValue* stack, uint64_t /*inputs*/, uint64_t /*outputs*/) {
  const PairedLists lists = take_arguments(stack, in_place, write);
  const Request request{lists.device_index(), lists.size(),  lists.found_inf(),
                        lists.norm(),         lists.norms(), lists.first_bad()};
  Pass pass(request.device, findings_for(request, lists.inv_scale()), request.tensors);
  pass.launch<write, in_place ? 1 : 2>(lists.spans());
  for (const StridedPair& pair : lists.strided()) {
    pass.launch<write>(pair);
  }
}

}  // namespace

void unscale_spans(const Spans& spans, const Request& request, const float* inv_scale) {
  Pass(request.device, findings_for(request, inv_scale), request.tensors).launch<Write::replace, 1>(spans);
}

void clip_spans(const Spans& spans, int32_t device, float* norm, float max_norm) {
  const Handle room = empty_doubles(1, device);
  Findings measuring{};
  measuring.norm = norm;
  measuring.factor = static_cast<float*>(room.mutable_data());
  measuring.max_norm = max_norm;
  Pass(device, measuring).launch<Write::nothing, 1>(spans);
  Findings scaling{};
  scaling.inv_scale = measuring.factor;
  Pass(device, scaling).launch<Write::replace, 1>(spans);
}

STABLE_TORCH_LIBRARY_IMPL(amplab, CUDA, m) {
  m.impl("multi_tensor_unscale_", &unscale<Write::replace, true>);
  m.impl("multi_tensor_unscale_copy", &unscale<Write::replace, false>);
  m.impl("multi_tensor_unscale_add", &unscale<Write::accumulate, false>);
  m.impl("multi_tensor_norm", &unscale<Write::nothing, true>);
}

}  // namespace amplab::unscale_cuda
