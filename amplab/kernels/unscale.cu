// The CUDA kernels of amplab::multi_tensor_unscale_{,copy,add}; schemas and reference are in unscale.py.
//
// One launch takes a table of up to 1360 pairs of tensors in its parameters (CUDA 12.1 on: 32,764 bytes of them).
// A persistent grid walks the chunks of all of them; a chunk finds its tensor by binary search. Memory is read and
// written 16 bytes at a time where both pointers allow it. inv_scale is read and found_inf written on the device:
// nothing waits for the host, and the launches can be captured in a graph.
#include <cuda_runtime.h>

#include <algorithm>
#include <array>

#include "tensor_lists.h"
#include "unscale.h"

namespace amplab {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 4;
constexpr int kChunk = 16384;      // elements; a multiple of every pack, so a chunk is aligned as its tensor is
constexpr int kSpansPerTable = 1360;

struct SpanTable {
  const void* inputs[kSpansPerTable];
  void* outputs[kSpansPerTable];
  uint32_t ends[kSpansPerTable];   // the chunk after a tensor's last one
  uint32_t tails[kSpansPerTable];  // elements in a tensor's last chunk
  int count;
};
static_assert(sizeof(SpanTable) + 2 * sizeof(void*) <= 32764, "kernel parameters");

template <class T, int N>
struct alignas(16) Pack {
  T at[N];
};

template <class In, class Out>
constexpr int kPack = 16 / (sizeof(In) < sizeof(Out) ? sizeof(In) : sizeof(Out));

// Packs in flight per thread; a pack that holds doubles is wide enough for two.
template <class Math>
constexpr int kInFlight = sizeof(Math) == sizeof(double) ? 2 : 4;

template <Write write, class In, class Out, class Math>
__device__ bool unscale_packs(const In* x, Out* y, int packs, Math inv_scale) {
  using InPack = Pack<In, kPack<In, Out>>;
  using OutPack = Pack<Out, kPack<In, Out>>;
  constexpr int kUnroll = kInFlight<Math>;
  const InPack* sources = reinterpret_cast<const InPack*>(x);
  OutPack* targets = reinterpret_cast<OutPack*>(y);
  bool found = false;
  for (int first = threadIdx.x; first < packs; first += kUnroll * kThreads) {
    InPack source[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      if (first + k * kThreads < packs) {
        source[k] = sources[first + k * kThreads];
      }
    }
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      if (first + k * kThreads < packs) {
        OutPack target;
        if constexpr (write == Write::accumulate) {
          target = targets[first + k * kThreads];
        }
#pragma unroll
        for (int i = 0; i < kPack<In, Out>; ++i) {
          found |= unscale_element<write>(source[k].at[i], target.at[i], inv_scale);
        }
        targets[first + k * kThreads] = target;
      }
    }
  }
  return found;
}

template <Write write, class In, class Out>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    unscale_kernel(const __grid_constant__ SpanTable table, float* found_inf, const float* inv_scale) {
  using Math = typename Arithmetic<In, Out>::type;
  const Math inverse = static_cast<Math>(*inv_scale);
  const uint32_t chunks = table.ends[table.count - 1];
  bool found = false;
  for (uint32_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    const int index = find_span(table.ends, table.count, chunk);
    const uint32_t start = index == 0 ? 0 : table.ends[index - 1];
    const int numel = chunk + 1 == table.ends[index] ? table.tails[index] : kChunk;
    const In* x = static_cast<const In*>(table.inputs[index]) + int64_t(chunk - start) * kChunk;
    Out* y = static_cast<Out*>(table.outputs[index]) + int64_t(chunk - start) * kChunk;
    int done = 0;
    if ((reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(y)) % 16 == 0) {
      const int packs = numel / kPack<In, Out>;
      found |= unscale_packs<write>(x, y, packs, inverse);
      done = packs * kPack<In, Out>;
    }
    for (int i = done + threadIdx.x; i < numel; i += kThreads) {
      found |= unscale_element<write>(x[i], y[i], inverse);
    }
  }
  if (found) {
    *found_inf = 1.0f;  // every thread that writes writes the same
  }
}

using Launch = void (*)(const SpanTable&, float*, const float*, int, cudaStream_t);

template <Write write, class In, class Out>
void launch(const SpanTable& table, float* found_inf, const float* inv_scale, int multiprocessors, cudaStream_t stream) {
  const uint32_t most = static_cast<uint32_t>(multiprocessors * kBlocksPerMultiprocessor);
  const uint32_t blocks = std::min(table.ends[table.count - 1], most);
  unscale_kernel<write, In, Out><<<blocks, kThreads, 0, stream>>>(table, found_inf, inv_scale);
}

template <Write write, class In>
constexpr std::array<Launch, kDtypes> kInto = {launch<write, In, Half>, launch<write, In, BFloat16>,
                                               launch<write, In, float>, launch<write, In, double>};

template <Write write>
constexpr std::array<std::array<Launch, kDtypes>, kDtypes> kLaunches = {kInto<write, Half>, kInto<write, BFloat16>,
                                                                        kInto<write, float>, kInto<write, double>};

void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
  }
}

// Collects spans of one pair of dtypes and launches whenever a table is full.
class Launcher {
 public:
  Launcher(Launch launch, float* found_inf, const float* inv_scale, int multiprocessors, cudaStream_t stream)
      : launch_(launch), found_inf_(found_inf), inv_scale_(inv_scale), multiprocessors_(multiprocessors), stream_(stream) {
    table_.count = 0;
  }

  void add(const Span& span) {
    if (table_.count == kSpansPerTable) {
      flush();
    }
    const int64_t chunks = (span.numel + kChunk - 1) / kChunk;
    table_.inputs[table_.count] = span.input;
    table_.outputs[table_.count] = span.output;
    table_.ends[table_.count] = static_cast<uint32_t>((table_.count == 0 ? 0 : table_.ends[table_.count - 1]) + chunks);
    table_.tails[table_.count] = static_cast<uint32_t>(span.numel - (chunks - 1) * kChunk);
    ++table_.count;
  }

  void flush() {
    if (table_.count > 0) {
      launch_(table_, found_inf_, inv_scale_, multiprocessors_, stream_);
      check_cuda(cudaGetLastError());
      table_.count = 0;
    }
  }

 private:
  Launch launch_;
  float* found_inf_;
  const float* inv_scale_;
  int multiprocessors_;
  cudaStream_t stream_;
  SpanTable table_;
};

class DeviceGuard {
 public:
  explicit DeviceGuard(int32_t index) { check(aoti_torch_create_cuda_guard(index, &guard_), "Choosing the device"); }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  ~DeviceGuard() { aoti_torch_delete_cuda_guard(guard_); }

 private:
  CUDAGuardHandle guard_;
};

// A pair that is not gapless: the rows of its last dimension as spans of one element or, where both lie closely, of
// a whole row. Slow, and right.
void add_strided(Launcher& launcher, const StridedPair& pair, int64_t dim, int64_t in_at, int64_t out_at) {
  const bool is_row = dim == pair.dim - 1 && pair.input_strides[dim] == 1 && pair.output_strides[dim] == 1;
  if (dim == pair.dim || is_row) {
    launcher.add({static_cast<const char*>(pair.input) + in_at * kItemSize[pair.input_dtype],
                  static_cast<char*>(pair.output) + out_at * kItemSize[pair.output_dtype],
                  is_row ? pair.sizes[dim] : 1});
    return;
  }
  for (int64_t i = 0; i < pair.sizes[dim]; ++i) {
    add_strided(launcher, pair, dim + 1, in_at, out_at);
    in_at += pair.input_strides[dim];
    out_at += pair.output_strides[dim];
  }
}

template <Write write, bool in_place>
void unscale(StableIValue* stack, uint64_t /*inputs*/, uint64_t /*outputs*/) {
  const PairedLists lists = take_arguments(stack, in_place);
  const DeviceGuard guard(lists.device_index());
  void* stream = nullptr;
  check(aoti_torch_get_current_cuda_stream(lists.device_index(), &stream), "Finding the stream");
  int multiprocessors = 0;
  check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, lists.device_index()));
  for (int input_dtype = 0; input_dtype < kDtypes; ++input_dtype) {
    for (int output_dtype = 0; output_dtype < kDtypes; ++output_dtype) {
      Launcher launcher(kLaunches<write>[input_dtype][output_dtype], lists.found_inf(), lists.inv_scale(),
                        multiprocessors, static_cast<cudaStream_t>(stream));
      for (const TypedSpan& typed : lists.spans()) {
        if (typed.input_dtype == input_dtype && typed.output_dtype == output_dtype) {
          launcher.add(typed.span);
        }
      }
      for (const StridedPair& pair : lists.strided()) {
        if (pair.input_dtype == input_dtype && pair.output_dtype == output_dtype) {
          add_strided(launcher, pair, 0, 0, 0);
        }
      }
      launcher.flush();
    }
  }
}

STABLE_TORCH_LIBRARY_IMPL(amplab, CUDA, m) {
  m.impl("multi_tensor_unscale_", &unscale<Write::replace, true>);
  m.impl("multi_tensor_unscale_copy", &unscale<Write::replace, false>);
  m.impl("multi_tensor_unscale_add", &unscale<Write::accumulate, false>);
}

}  // namespace
}  // namespace amplab
