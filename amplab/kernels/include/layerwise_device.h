// The loops of LAMB and NovoGrad on the device, three for every table of parameters:
//
//   measure   each block sums its pieces (in double); the piece of block b in tensor t writes its sums to slot b + t
//   add up    the slots of each tensor in order, independent of the order of the blocks
//   step      the rule, which thread 0 of a block computes from the sums of its tensor
//
// From one piece to the next, the block or the tensor or both increase, so no two pieces share a slot. The rest is as
// in step_device.h; the host side is in layerwise_steps.cu.
#pragma once

#include "layerwise_steps.h"
#include "step_device.h"

namespace amplab {

struct LayerSums {
  double weight, update;  // NovoGrad: of the gradient, and unused
};

// Memory on the device that outlives the launches of a call.
struct LayerScratch {
  LayerSums* slots;   // of the pieces of one launch
  LayerSums* totals;  // of every item
  float* norms;       // of every item, for NovoGrad: before and after the step
};

// The slots of a tensor, from its first block to its last.
template <int kPointers>
AMPLAB_FUNCTION void slots_of(const LaunchTable<kPointers>& table, int tensor, uint32_t blocks, uint32_t& first,
                              uint32_t& last) {
  const uint32_t units = table.ends[table.count - 1];
  first = block_of(table.begin(tensor), units, blocks) + tensor;
  last = block_of(table.ends[tensor] - 1, units, blocks) + tensor;
}

// Adds the element `i`.
template <class T, class Arguments, class At>
AMPLAB_RULE void measure_element(const LambSettings& settings, double step, T factor, const Arguments& arguments,
                                 void* const* memory, const At& at, LayerSums& sums) {
  using Places = StepPlaces<2>;
  T grad[1], param[1], first[1], second[1];
  load_stored(arguments.stored[Places::kGrad], memory[Places::kGrad], at(Places::kGrad), grad);
  load_stored(arguments.stored[Places::kParam], memory[Places::kParam], at(Places::kParam), param);
  load_stored(arguments.stored[Places::kState], memory[Places::kState], at(Places::kState), first);
  load_stored(arguments.stored[Places::kState + 1], memory[Places::kState + 1], at(Places::kState + 1), second);
  sums.weight += static_cast<double>(param[0]) * static_cast<double>(param[0]);
  T states[2] = {first[0], second[0]};
  AnyLamb<T, true>(settings, step, 0.0)(grad[0] * factor, param[0], states);
  sums.update += static_cast<double>(param[0]) * static_cast<double>(param[0]);
}

AMPLAB_RULE double larger(double a, double b) { return b > a || b != b ? b : a; }  // NaN is the largest

template <class T, class Arguments, class At>
AMPLAB_RULE void measure_element(const NovogradSettings& settings, double /*step*/, T factor,
                                 const Arguments& arguments, void* const* memory, const At& at, LayerSums& sums) {
  using Places = StepPlaces<1>;
  T grad[1];
  load_stored(arguments.stored[Places::kGrad], memory[Places::kGrad], at(Places::kGrad), grad);
  const double scaled = static_cast<double>(grad[0] * factor);
  sums.weight = settings.maximum_norm ? larger(sums.weight, scaled < 0.0 ? -scaled : scaled)
                                      : sums.weight + scaled * scaled;
}

AMPLAB_RULE void add_sums(const LambSettings& /*settings*/, LayerSums& sums, const LayerSums& more) {
  sums.weight += more.weight;
  sums.update += more.update;
}

AMPLAB_RULE void add_sums(const NovogradSettings& settings, LayerSums& sums, const LayerSums& more) {
  sums.weight = settings.maximum_norm ? larger(sums.weight, more.weight) : sums.weight + more.weight;
}

// The rule of a tensor, after its norms are computed.
template <class T>
AMPLAB_RULE AnyLamb<T, false> layer_rule(const LambSettings& settings, double step, const LayerScratch& scratch,
                                         int place) {
  const LayerSums& sums = scratch.totals[place];
  return AnyLamb<T, false>(settings, step, settings.rate(sums.weight, sums.update));
}

template <class T>
AMPLAB_RULE Novograd<T> layer_rule(const NovogradSettings& settings, double step, const LayerScratch& scratch,
                                   int place) {
  return Novograd<T>(settings, step, settings.next_norm(scratch.norms[place], scratch.totals[place].weight));
}

// The sums of all threads, in thread 0; always in the same order.
template <class Settings>
AMPLAB_FUNCTION LayerSums block_sums(const Settings& settings, const LayerSums& mine) {
  __shared__ LayerSums sums[kThreads];
  __syncthreads();
  sums[threadIdx.x] = mine;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) {
      add_sums(settings, sums[threadIdx.x], sums[threadIdx.x + half]);
    }
  }
  return sums[0];
}

template <class T, int kStates, class Arguments>
__global__ void __launch_bounds__(kThreads)
    measure_layers_kernel(const __grid_constant__ LaunchTable<StepPlaces<kStates>::kPointers> table,
                          const __grid_constant__ Arguments arguments, LayerScratch scratch) {
  using Places = StepPlaces<kStates>;
  if (is_skipped(arguments)) {
    return;
  }
  const T factor = factor_of<T>(arguments);
  for_each_piece(table, blockIdx.x, gridDim.x, [&](const Piece& piece) {
    void* memory[Places::kPointers];
#pragma unroll
    for (int k = 0; k < Places::kPointers; ++k) {
      memory[k] = table.pointers[k][piece.tensor];
    }
    const double step = step_of(memory[Places::kStep]);
    LayerSums sums{};
    for (int64_t i = threadIdx.x; i < piece.numel; i += kThreads) {
      const auto at = [&](int) { return piece.first + i; };
      measure_element(arguments.settings, step, factor, arguments, memory, at, sums);
    }
    const LayerSums all = block_sums(arguments.settings, sums);
    if (threadIdx.x == 0) {
      scratch.slots[blockIdx.x + piece.tensor] = all;
    }
  });
}

// One block for each tensor at a time.
template <int kPointers, class Arguments>
__global__ void __launch_bounds__(kThreads)
    add_up_layers_kernel(const __grid_constant__ LaunchTable<kPointers> table,
                         const __grid_constant__ Arguments arguments, LayerScratch scratch, uint32_t measured_by) {
  if (is_skipped(arguments)) {
    return;
  }
  for (int tensor = blockIdx.x; tensor < table.count; tensor += gridDim.x) {
    uint32_t first = 0, last = 0;
    slots_of(table, tensor, measured_by, first, last);
    LayerSums sums{};
    for (uint32_t slot = first + threadIdx.x; slot <= last; slot += kThreads) {
      add_sums(arguments.settings, sums, scratch.slots[slot]);
    }
    const LayerSums all = block_sums(arguments.settings, sums);
    if (threadIdx.x == 0) {
      scratch.totals[table.place(tensor)] = all;
    }
  }
}

template <class T, int kStates, class Arguments>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    step_layers_kernel(const __grid_constant__ LaunchTable<StepPlaces<kStates>::kPointers> table,
                       const __grid_constant__ Arguments arguments, LayerScratch scratch) {
  using Places = StepPlaces<kStates>;
  using Rule = decltype(layer_rule<T>(arguments.settings, 1.0, scratch, 0));
  alignas(16) __shared__ unsigned char room[sizeof(Rule)];
  if (is_skipped(arguments)) {
    return;
  }
  const T factor = factor_of<T>(arguments);
  for_each_piece(table, blockIdx.x, gridDim.x, [&](const Piece& piece) {
    void* memory[Places::kPointers];
    uintptr_t addresses = 0;
#pragma unroll
    for (int k = 0; k < Places::kPointers; ++k) {
      memory[k] = table.pointers[k][piece.tensor];
      addresses |= k == Places::kStep ? 0 : reinterpret_cast<uintptr_t>(memory[k]);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      const double step = step_of(memory[Places::kStep]);
      *reinterpret_cast<Rule*>(room) = layer_rule<T>(arguments.settings, step, scratch, table.place(piece.tensor));
    }
    __syncthreads();
    const Rule rule = *reinterpret_cast<const Rule*>(room);
    int64_t done = 0;
    if (addresses % 16 == 0) {
      done = piece.numel / kStepPack<T> * kStepPack<T>;
      for (int64_t i = threadIdx.x * kStepPack<T>; i < done; i += kThreads * kStepPack<T>) {
        step_some<kStepPack<T>>(rule, factor, arguments, memory, [&](int) { return piece.first + i; });
      }
    }
    for (int64_t i = done + threadIdx.x; i < piece.numel; i += kThreads) {
      step_some<1>(rule, factor, arguments, memory, [&](int) { return piece.first + i; });
    }
  });
}

// A parameter that is not dense: one block processes it, slow but correct.
template <class T, int kStates, class Arguments>
__global__ void __launch_bounds__(kThreads)
    strided_layer_kernel(const __grid_constant__ StridedStep<StepPlaces<kStates>::kPointers> item,
                         const __grid_constant__ Arguments arguments, LayerScratch scratch, int place) {
  if (is_skipped(arguments)) {
    return;
  }
  const T factor = factor_of<T>(arguments);
  const double step = step_of(item.memory[StepPlaces<kStates>::kStep]);
  LayerSums sums{};
  for (int64_t i = threadIdx.x; i < item.numel; i += kThreads) {
    const auto at = [&](int pointer) { return item.offset(pointer, i); };
    measure_element(arguments.settings, step, factor, arguments, item.memory, at, sums);
  }
  const LayerSums all = block_sums(arguments.settings, sums);
  if (threadIdx.x == 0) {
    scratch.totals[place] = all;
  }
  __syncthreads();
  const auto rule = layer_rule<T>(arguments.settings, step, scratch, place);
  for (int64_t i = threadIdx.x; i < item.numel; i += kThreads) {
    step_some<1>(rule, factor, arguments, item.memory, [&](int pointer) { return item.offset(pointer, i); });
  }
}

// Norms of one element each: copied to scratch memory at first, and back, including the gradient, at the end.
static __global__ void __launch_bounds__(kThreads)
    gather_norms_kernel(const __grid_constant__ LaunchTable<1> table, LayerScratch scratch) {
  for_each_piece(table, blockIdx.x, gridDim.x, [&](const Piece& piece) {
    if (threadIdx.x == 0) {
      scratch.norms[table.place(piece.tensor)] = *table.template memory<const float>(0, piece);
    }
  });
}

static __global__ void __launch_bounds__(kThreads)
    scatter_norms_kernel(const __grid_constant__ LaunchTable<1> table, LayerScratch scratch, NovogradSettings settings,
                         const float* found_inf) {
  if (found_inf != nullptr && *found_inf != 0.0f) {
    return;
  }
  for_each_piece(table, blockIdx.x, gridDim.x, [&](const Piece& piece) {
    if (threadIdx.x == 0) {
      const int place = table.place(piece.tensor);
      float* norm = table.template memory<float>(0, piece);
      *norm = settings.next_norm(*norm, scratch.totals[place].weight);
    }
  });
}

}  // namespace amplab
