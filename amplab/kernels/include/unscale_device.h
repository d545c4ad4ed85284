// The CUDA kernels of the unscale operators, without a torch header: unscale.cu launches them, and a test runs them on
// the host, thread by thread.
#pragma once

#include <cmath>

#include "launch_table.h"
#include "packs.h"

namespace amplab::unscale_cuda {

// The scale of a launch and its outputs; null for outputs that are not requested.
struct Findings {
  const float* inv_scale;         // null: 1
  float* found_inf;
  unsigned long long* first_bad;  // -1, the largest value, if there is none
  double* piece_squares;          // of the piece of tensor t in block b at [t + b], which is unique for every piece
  double* block_squares;          // of each block
  double* squares;                // of all launches so far
  float* norm;
  float* norms;
  float* factor;  // at most 1; brings the norm down to max_norm, as torch.nn.utils.clip_grad_norm_ does
  float max_norm;

  AMPLAB_FUNCTION float scale() const { return inv_scale == nullptr ? 1.0f : *inv_scale; }
  // Whether a scale of 1 makes the pass unnecessary.
  AMPLAB_FUNCTION bool only_scales() const { return found_inf == nullptr && piece_squares == nullptr; }
};

// -- elements -------------------------------------------------------------------------------------------------------

// The output or, if nothing is written, the product.
template <Write write, class In, class Out, class Math>
AMPLAB_FUNCTION Math value_of(In x, Out output, Math inv_scale) {
  return write == Write::nothing ? multiply(static_cast<Math>(widen(x)), inv_scale) : static_cast<Math>(widen(output));
}

// Adds 0 to `doubt`, or NaN if the element is not finite: a sum takes one register, separate flags take many.
template <Write write, class In, class Out, class Math>
AMPLAB_FUNCTION void unscale_one(In x, Out& output, Math inv_scale, Math& doubt) {
  const bool found = unscale_element<write>(x, output, inv_scale);
  if (write == Write::accumulate) {
    doubt = found ? Math(NAN) : doubt;
  } else {
    const Math value = value_of<write>(x, output, inv_scale);
    doubt = add(doubt, value - value);
  }
}

AMPLAB_FUNCTION void add_square(double value, double& squares) { squares = add(squares, multiply(value, value)); }

// Each thread has kInFlight accesses in flight.
template <Write write, int kInFlight, bool measures, class In, class Out, class Math>
AMPLAB_FUNCTION bool unscale_packs(const In* x, Out* y, uint32_t packs, Math inv_scale, double& squares) {
  constexpr int N = kPack<In, Out>;
  constexpr int kReads = Pack<In, N>::kWords + (write == Write::accumulate ? Pack<Out, N>::kWords : 0);
  constexpr int kUnroll = kReads < kInFlight ? kInFlight / kReads : 1;
  Math doubt = 0;
#pragma unroll 1
  for (uint32_t first = 0; first < packs; first += kUnroll * kThreads) {  // the same number of times for every thread
    Pack<In, N> sources[kUnroll];
    Pack<Out, N> targets[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const uint32_t at = first + k * kThreads + threadIdx.x;
      load(x, at, at < packs, sources[k]);
      if constexpr (write == Write::accumulate) {
        load(y, at, at < packs, targets[k]);
      }
    }
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const uint32_t at = first + k * kThreads + threadIdx.x;
      const bool active = at < packs;
      In inputs[N];
      Out outputs[N] = {};
      exchange<In, Out>(sources[k]);
      sources[k].get(inputs);
      if constexpr (write == Write::accumulate) {
        exchange<Out, In>(targets[k]);
        targets[k].get(outputs);
      }
#pragma unroll
      for (int i = 0; i < N; ++i) {
        unscale_one<write>(inputs[i], outputs[i], inv_scale, doubt);
      }
      if (measures && active) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          add_square(value_of<write>(inputs[i], outputs[i], inv_scale), squares);
        }
      }
      if constexpr (write != Write::nothing) {
        targets[k].set(outputs);
        exchange<Out, In>(targets[k]);
        store(y, at, active, targets[k]);
      }
    }
  }
  return !is_finite(doubt);
}

template <Write write, class In, class Out, class Math>
AMPLAB_FUNCTION bool unscale_at(const In* x, Out* y, Math inv_scale, bool measures, double& squares) {
  Out output{};
  if constexpr (write == Write::accumulate) {
    output = *y;
  }
  Math doubt = 0;
  unscale_one<write>(*x, output, inv_scale, doubt);
  if (measures) {
    add_square(value_of<write>(*x, output, inv_scale), squares);
  }
  if constexpr (write != Write::nothing) {
    *y = output;
  }
  return !is_finite(doubt);
}

// Elements before the first multiple of 16 bytes.
template <class T>
AMPLAB_FUNCTION int64_t misaligned(const T* memory) {
  return static_cast<int64_t>((16 - reinterpret_cast<uintptr_t>(memory) % 16) % 16 / sizeof(T));
}

// The elements before the first and after the last aligned 16 bytes, one by one; all of them if the two sides are never
// aligned at the same element.
template <Write write, int kInFlight, class In, class Out, class Math>
AMPLAB_FUNCTION bool unscale_piece(const In* x, Out* y, int64_t numel, Math inv_scale, bool measures, double& squares) {
  constexpr int kPair = 2 * kPack<In, Out>;
  const int64_t head = sizeof(In) <= sizeof(Out) ? misaligned(x) : misaligned(y);
  const bool aligned = head < numel && misaligned(x + head) == 0 && misaligned(y + head) == 0;
  const int64_t packed = aligned ? (numel - head) / kPair * kPair : 0;
  bool found = false;
  if (packed > 0) {
    const uint32_t packs = static_cast<uint32_t>(packed / kPack<In, Out>);
    found = measures ? unscale_packs<write, kInFlight / 2, true>(x + head, y + head, packs, inv_scale, squares)
                     : unscale_packs<write, kInFlight, false>(x + head, y + head, packs, inv_scale, squares);
  }
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < numel - packed; i += kThreads) {
    const int64_t at = i < head ? i : i + packed;
    found |= unscale_at<write>(x + at, y + at, inv_scale, measures, squares);
  }
  return found;
}

// -- results --------------------------------------------------------------------------------------------------------

// Sums over the threads of a warp and of a block; always in the same order.
AMPLAB_FUNCTION double warp_sum(double x) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    x = add(x, __shfl_xor_sync(kAllLanes, x, distance));
  }
  return x;
}

AMPLAB_FUNCTION double block_sum(double x) {
  __shared__ double of_warps[kThreads / kWarp];
  x = warp_sum(x);
  __syncthreads();  // threads may still read the last sum
  if (threadIdx.x % kWarp == 0) {
    of_warps[threadIdx.x / kWarp] = x;
  }
  __syncthreads();
  double sum = 0.0;
  for (int warp = 0; warp < kThreads / kWarp; ++warp) {
    sum = add(sum, of_warps[warp]);
  }
  return sum;
}

template <class Table>
AMPLAB_FUNCTION void report(const Findings& findings, const Table& table, const Piece& piece, bool found,
                            double squares, double& block_squares) {
  if (__any_sync(kAllLanes, found) && threadIdx.x % kWarp == 0 && findings.found_inf != nullptr) {
    *findings.found_inf = 1.0f;  // every thread writes the same value
    if (findings.first_bad != nullptr) {
      atomicMin(findings.first_bad, static_cast<unsigned long long>(table.place(piece.tensor)));
    }
  }
  if (findings.piece_squares != nullptr) {
    squares = block_sum(squares);
    block_squares = add(block_squares, squares);
    if (threadIdx.x == 0) {
      findings.piece_squares[piece.tensor + blockIdx.x] = squares;
      findings.block_squares[blockIdx.x] = block_squares;
    }
  }
}

// -- kernels --------------------------------------------------------------------------------------------------------

template <Write write, class In, class Out, int kPointers>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    unscale_kernel(const __grid_constant__ LaunchTable<kPointers> table,
                   const __grid_constant__ Findings findings) {
  using Math = typename Arithmetic<In, Out>::type;
  // As many as fit 64 registers: 16 bits to 16 in other memory, and to 64 bits, need more registers than the rest.
  constexpr bool kTight = kPointers == 2 && (sizeof(In) + sizeof(Out) == 4 || sizeof(In) + sizeof(Out) == 10);
  constexpr int kInFlight = kTight ? 2 : 4;
  const Math inv_scale = static_cast<Math>(findings.scale());
  if (findings.only_scales() && inv_scale == Math(1)) {
    return;
  }
  double block_squares = 0.0;
  for_each_piece(table, blockIdx.x, gridDim.x, [&](const Piece& piece) {
    const In* x = table.template memory<const In>(0, piece);
    Out* y = table.template memory<Out>(kPointers - 1, piece);
    const bool measures = findings.piece_squares != nullptr;
    double squares = 0.0;
    const bool found = unscale_piece<write, kInFlight>(x, y, piece.numel, inv_scale, measures, squares);
    report(findings, table, piece, found, squares, block_squares);
  });
}

// The dimensions of a pair that is not dense with the same memory order.
struct Layout {
  static constexpr int kMost = 16;
  int input_dtype;
  int output_dtype;
  int dim;
  int64_t sizes[kMost];
  int64_t input_strides[kMost];
  int64_t output_strides[kMost];

  AMPLAB_FUNCTION void locate(int64_t element, int64_t& in_at, int64_t& out_at) const {
    for (int d = dim - 1; d >= 0; --d) {
      const int64_t index = element % sizes[d];
      element /= sizes[d];
      in_at += index * input_strides[d];
      out_at += index * output_strides[d];
    }
  }
};

// Calls body(In()) for the type of a dtype.
template <class Body>
AMPLAB_FUNCTION void with_type(int dtype, const Body& body) {
  switch (dtype) {
    case 0: return body(Half());
    case 1: return body(BFloat16());
    case 2: return body(float());
    default: return body(double());
  }
}

// One tensor, whose pieces are in the table, by iterating over its dimensions. Slow, but correct.
template <Write write>
__global__ void __launch_bounds__(kThreads)
    strided_kernel(const __grid_constant__ LaunchTable<2> table, const __grid_constant__ Layout layout,
                   const __grid_constant__ Findings findings) {
  double block_squares = 0.0;
  for_each_piece(table, blockIdx.x, gridDim.x, [&](const Piece& piece) {
    bool found = false;
    double squares = 0.0;
    for (int64_t i = piece.first + threadIdx.x; i < piece.first + piece.numel; i += kThreads) {
      int64_t in_at = 0;
      int64_t out_at = 0;
      layout.locate(i, in_at, out_at);
      with_type(layout.input_dtype, [&](auto in) {
        with_type(layout.output_dtype, [&](auto out) {
          using In = decltype(in);
          using Out = decltype(out);
          const auto inv_scale = static_cast<typename Arithmetic<In, Out>::type>(findings.scale());
          const In* x = static_cast<const In*>(table.pointers[0][0]) + in_at;
          Out* y = static_cast<Out*>(table.pointers[1][0]) + out_at;
          found |= unscale_at<write>(x, y, inv_scale, findings.piece_squares != nullptr, squares);
        });
      });
    }
    report(findings, table, piece, found, squares, block_squares);
  });
}

// After each launch that computes norms: block 0 adds up the results of the launches so far, each warp of the others
// those of one tensor. It is a separate launch, because without a counter initialized to zero, which would also be a
// launch, no block knows which one ends last.
template <int kPointers>
__global__ void __launch_bounds__(kThreads)
    finish_kernel(const __grid_constant__ LaunchTable<kPointers> table, uint32_t blocks,
                  const __grid_constant__ Findings findings) {
  double sum = 0.0;
  if (blockIdx.x == 0) {
    for (uint32_t block = threadIdx.x; block < blocks; block += kThreads) {
      sum = add(sum, findings.block_squares[block]);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
      sum = add(sum, *findings.squares);
      *findings.squares = sum;
      const float norm = static_cast<float>(sqrt(sum));
      if (findings.norm != nullptr) {
        *findings.norm = norm;
      }
      if (findings.factor != nullptr) {
        const float factor = findings.max_norm / (norm + 1e-6f);
        *findings.factor = factor >= 1.0f ? 1.0f : factor;  // NaN is also applied
      }
    }
    return;
  }
  const int tensor = static_cast<int>((blockIdx.x - 1) * (kThreads / kWarp) + threadIdx.x / kWarp);
  if (findings.norms == nullptr || tensor >= table.count) {
    return;
  }
  const uint32_t units = table.ends[table.count - 1];
  const uint32_t last = block_of(table.ends[tensor] - 1, units, blocks);
  for (uint32_t block = block_of(table.begin(tensor), units, blocks) + threadIdx.x % kWarp; block <= last;
       block += kWarp) {
    sum = add(sum, findings.piece_squares[tensor + block]);
  }
  sum = warp_sum(sum);
  if (threadIdx.x % kWarp == 0) {
    findings.norms[table.place(tensor)] = static_cast<float>(sqrt(sum));
  }
}

}  // namespace amplab::unscale_cuda
