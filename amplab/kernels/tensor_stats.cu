// The CUDA kernel of amplab::tensor_stats; schema and reference are in tensor_stats.py.
//
// One launch takes a table of up to 1600 tensors in its parameters (CUDA 12.1 on: 32,764 bytes of them). A persistent
// grid walks the chunks of all of them; a chunk finds its tensor by binary search. Memory is read 16 bytes at a time.
// The bins are counted in shared memory, where each lane of a warp has its own copy of every bin in its own bank, so
// that no two conflict. The counts of a block are added to the tensor's row when its chunks of that tensor are done.
// Nothing waits for the host, and the launches can be captured in a graph.
#include <cuda_runtime.h>

#include <algorithm>
#include <array>

#include "read_lists.h"
#include "tensor_stats.h"

namespace amplab::statistics {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 4;
constexpr int kChunk = 16384;      // elements; a multiple of every pack, so a chunk has the alignment of its tensor
constexpr int kSpansPerTable = 1600;
constexpr int kShared = 40960;     // bytes for the copies of the bins
constexpr long long kInfinityBits = 0x7ff0000000000000ll;

// The tensors of one launch; row numbers are those of the whole table.
struct SpanTable {
  const void* inputs[kSpansPerTable];
  uint32_t ends[kSpansPerTable];   // the chunk after a tensor's last one
  uint32_t tails[kSpansPerTable];  // elements in a tensor's last chunk
  uint32_t rows[kSpansPerTable];
  int count;
};
static_assert(sizeof(SpanTable) + 4 * sizeof(void*) <= 32764, "kernel parameters");

__device__ __forceinline__ uint32_t magnitude_of(float x) { return __float_as_uint(x) & 0x7fffffffu; }
__device__ __forceinline__ uint32_t magnitude_of(Half x) { return magnitude_of(widen(x)); }
__device__ __forceinline__ uint32_t magnitude_of(BFloat16 x) { return magnitude_of(widen(x)); }
__device__ __forceinline__ uint64_t magnitude_of(double x) {
  return static_cast<uint64_t>(__double_as_longlong(x)) & ~(uint64_t{1} << 63);
}

// A magnitude as the bits of a double, which have the order of the numbers.
__device__ __forceinline__ long long as_double(uint32_t bits) {
  return __double_as_longlong(static_cast<double>(__uint_as_float(bits)));
}
__device__ __forceinline__ long long as_double(uint64_t bits) { return static_cast<long long>(bits); }

template <class T>
struct alignas(16) Pack {
  static constexpr int kSize = 16 / sizeof(T);
  T at[kSize];
};

// The counts of one thread: its own columns before the bins, and the bins in the copy of its lane.
template <class In>
class Tally {
 public:
  using Bits = decltype(magnitude_of(In()));

  __device__ Tally(uint32_t* counts, int copies, int64_t low, int64_t bins)
      : counts_(counts + threadIdx.x % copies), copies_(copies), low_(low), bins_(bins) {}

  __device__ void add(In x) {
    const Bits magnitude = magnitude_of(x);
    if (magnitude != 0 && magnitude < Layout<Bits>::kInfinity) {
      largest_ = magnitude > largest_ ? magnitude : largest_;
      smallest_ = magnitude < smallest_ ? magnitude : smallest_;
    }
    count_element(magnitude, low_, bins_, *this);
  }
  __device__ void head(Column column) { ++heads_[column - kZeros]; }
  __device__ void bin(int64_t bin) { atomicAdd(counts_ + bin * copies_, 1u); }

  // Adds the warp's counts to the row, and clears them.
  __device__ void flush(long long* row) {
    long long largest = as_double(largest_);
    long long smallest = as_double(smallest_);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
      smallest = min(smallest, __shfl_xor_sync(0xffffffffu, smallest, offset));
    }
    if (threadIdx.x % 32 == 0 && largest > 0) {
      atomicMax(row + kAbsmax, largest);
      atomicMin(row + kSmallest, smallest);
    }
    largest_ = 0;
    smallest_ = Layout<Bits>::kInfinity;
#pragma unroll
    for (int column = kZeros; column < kHead; ++column) {
      uint32_t count = heads_[column - kZeros];
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) {
        count += __shfl_xor_sync(0xffffffffu, count, offset);
      }
      if (threadIdx.x % 32 == 0 && count != 0) {
        atomicAdd(reinterpret_cast<unsigned long long*>(row + column), static_cast<unsigned long long>(count));
      }
      heads_[column - kZeros] = 0;
    }
  }

 private:
  uint32_t* counts_;
  int copies_;
  int64_t low_;
  int64_t bins_;
  Bits largest_ = 0;
  Bits smallest_ = Layout<Bits>::kInfinity;
  uint32_t heads_[kHead - kZeros] = {};
};

template <class In>
__device__ void tally_chunk(const In* x, int numel, Tally<In>& tally) {
  int done = 0;
  if (reinterpret_cast<uintptr_t>(x) % 16 == 0) {
    const int packs = numel / Pack<In>::kSize;
    for (int k = threadIdx.x; k < packs; k += kThreads) {
      const Pack<In> pack = reinterpret_cast<const Pack<In>*>(x)[k];
#pragma unroll
      for (int i = 0; i < Pack<In>::kSize; ++i) {
        tally.add(pack.at[i]);
      }
    }
    done = packs * Pack<In>::kSize;
  }
  for (int i = done + threadIdx.x; i < numel; i += kThreads) {
    tally.add(x[i]);
  }
}

// Adds the copies of every bin to the row, and clears them.
__device__ void flush_bins(uint32_t* counts, int copies, int64_t bins, long long* row) {
  __syncthreads();
  for (int64_t bin = threadIdx.x; bin < bins; bin += kThreads) {
    unsigned long long count = 0;
    for (int i = 0; i < copies; ++i) {
      const int64_t at = bin * copies + (i + bin) % copies;  // each thread starts in another bank
      count += counts[at];
      counts[at] = 0;
    }
    if (count != 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(row + kHead + bin), count);
    }
  }
  __syncthreads();
}

template <class In>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    stats_kernel(const __grid_constant__ SpanTable table, long long* rows, int64_t low, int64_t bins, int copies) {
  extern __shared__ uint32_t counts[];
  for (int64_t i = threadIdx.x; i < bins * copies; i += kThreads) {
    counts[i] = 0;
  }
  __syncthreads();
  const uint64_t chunks = table.ends[table.count - 1];
  const uint32_t last = static_cast<uint32_t>(chunks * (blockIdx.x + 1) / gridDim.x);
  Tally<In> tally(counts, copies, low, bins);
  for (uint32_t chunk = static_cast<uint32_t>(chunks * blockIdx.x / gridDim.x); chunk < last;) {
    const int index = find_span(table.ends, table.count, chunk);
    const uint32_t start = index == 0 ? 0 : table.ends[index - 1];
    const uint32_t stop = min(last, table.ends[index]);
    for (; chunk < stop; ++chunk) {
      const int numel = chunk + 1 == table.ends[index] ? table.tails[index] : kChunk;
      tally_chunk(static_cast<const In*>(table.inputs[index]) + int64_t(chunk - start) * kChunk, numel, tally);
    }
    long long* row = rows + table.rows[index] * (kHead + bins);
    tally.flush(row);
    flush_bins(counts, copies, bins, row);
  }
}

// Initializes every row as for a tensor without elements.
__global__ void clear_kernel(long long* rows, int64_t columns, int64_t numel) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < numel; i += int64_t{gridDim.x} * kThreads) {
    rows[i] = i % columns == kSmallest ? kInfinityBits : 0;
  }
}

struct Target {
  long long* rows;
  int64_t low;
  int64_t bins;
  int multiprocessors;
  cudaStream_t stream;
};

void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
  }
}

// The number of copies of the bins that fit: as many as lanes, or a smaller power of two.
int copies_of(int64_t bins) {
  int copies = 32;
  while (copies > 1 && copies * bins * static_cast<int64_t>(sizeof(uint32_t)) > kShared) {
    copies /= 2;
  }
  return copies;
}

template <class In>
void launch(const SpanTable& table, const Target& target) {
  const uint32_t most = static_cast<uint32_t>(target.multiprocessors * kBlocksPerMultiprocessor);
  const uint32_t blocks = std::min(table.ends[table.count - 1], most);
  const int copies = copies_of(target.bins);
  const size_t shared = copies * target.bins * sizeof(uint32_t);
  stats_kernel<In><<<blocks, kThreads, shared, target.stream>>>(table, target.rows, target.low, target.bins, copies);
}

using Launch = void (*)(const SpanTable&, const Target&);
constexpr std::array<Launch, kDtypes> kLaunches = {launch<Half>, launch<BFloat16>, launch<float>, launch<double>};

// Collects spans of one dtype and launches whenever a table is full.
class Launcher {
 public:
  Launcher(Launch launch, const Target& target) : launch_(launch), target_(target) { table_.count = 0; }

  void add(const void* data, int64_t numel, size_t row) {
    if (numel == 0) {
      return;
    }
    if (table_.count == kSpansPerTable) {
      flush();
    }
    const int64_t chunks = (numel + kChunk - 1) / kChunk;
    const int at = table_.count++;
    table_.inputs[at] = data;
    table_.ends[at] = static_cast<uint32_t>((at == 0 ? 0 : table_.ends[at - 1]) + chunks);
    table_.tails[at] = static_cast<uint32_t>(numel - (chunks - 1) * kChunk);
    table_.rows[at] = static_cast<uint32_t>(row);
  }

  // The elements of a tensor with gaps: by its last dimension if that is dense, else one by one. Slow, but correct.
  void add_strided(const Source& source, size_t row, int64_t dim, int64_t at) {
    const bool is_row = dim == source.dim - 1 && source.strides[dim] == 1;
    if (dim == source.dim || is_row) {
      add(static_cast<const char*>(source.data) + at * kItemSize[source.dtype], is_row ? source.sizes[dim] : 1, row);
      return;
    }
    for (int64_t i = 0; i < source.sizes[dim]; ++i) {
      add_strided(source, row, dim + 1, at + i * source.strides[dim]);
    }
  }

  void flush() {
    if (table_.count > 0) {
      launch_(table_, target_);
      check_cuda(cudaGetLastError());
      table_.count = 0;
    }
  }

 private:
  Launch launch_;
  Target target_;
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

void fill_table(const std::vector<Source>& sources, const Target& target) {
  const int64_t columns = kHead + target.bins;
  const int64_t numel = static_cast<int64_t>(sources.size()) * columns;
  const int64_t blocks = std::min<int64_t>((numel + kThreads - 1) / kThreads, target.multiprocessors * 8);
  clear_kernel<<<static_cast<uint32_t>(blocks), kThreads, 0, target.stream>>>(target.rows, columns, numel);
  check_cuda(cudaGetLastError());
  for (int dtype = 0; dtype < kDtypes; ++dtype) {
    Launcher launcher(kLaunches[dtype], target);
    for (size_t row = 0; row < sources.size(); ++row) {
      const Source& source = sources[row];
      if (source.dtype != dtype || source.numel == 0) {
        continue;
      }
      if (source.gapless) {
        launcher.add(source.data, source.numel, row);
      } else {
        launcher.add_strided(source, row, 0, 0);
      }
    }
    launcher.flush();
  }
}

void tensor_stats(StableIValue* stack, uint64_t /*inputs*/, uint64_t /*outputs*/) {
  const Arguments arguments = take_stats_arguments(stack);
  const ReadList& list = arguments.list;
  const DeviceGuard guard(list.device_index());
  Target target{nullptr, arguments.low, arguments.bins, 0, nullptr};
  void* stream = nullptr;
  check(aoti_torch_get_current_cuda_stream(list.device_index(), &stream), "Finding the stream");
  target.stream = static_cast<cudaStream_t>(stream);
  check_cuda(cudaDeviceGetAttribute(&target.multiprocessors, cudaDevAttrMultiProcessorCount, list.device_index()));
  Table table(static_cast<int64_t>(list.sources().size()), kHead + arguments.bins, list.device_type(),
              list.device_index());
  target.rows = reinterpret_cast<long long*>(table.data());
  fill_table(list.sources(), target);
  stack[0] = table.release();
}

STABLE_TORCH_LIBRARY_IMPL(amplab, CUDA, m) { m.impl("tensor_stats", &tensor_stats); }

}  // namespace
}  // namespace amplab::statistics
