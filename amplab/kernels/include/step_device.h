// The loop of every multi-tensor step on the device; the rules are in steps.h, the table in launch_table.h, the host's
// side in step_launch.h. As in step_driver.h, a rule is compiled only for floats and doubles: the dtypes of a launch
// are an argument, the same for all of its threads, and elements are converted when they are loaded.
#pragma once

#include "launch_table.h"
#include "steps.h"

namespace amplab {

// As in tensor_lists.h, which includes torch.
enum class Stored : uint8_t { half, bfloat16, single, twice, absent };

// The order of the tensors in a line of the table: the gradient, the parameter, its states, its copy, its step count.
template <int kStates>
struct StepPlaces {
  static constexpr int kGrad = 0, kParam = 1, kState = 2, kCopy = 2 + kStates, kStep = 3 + kStates;
  static constexpr int kPointers = 4 + kStates;
};

template <class Settings, int kStates>
struct StepArguments {
  Settings settings;
  const float* factor;     // null: 1
  const float* found_inf;  // null: 0
  float sign;
  Stored stored[StepPlaces<kStates>::kPointers];
};

template <class T, int N>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) ElementPack {
  T at[N];
};

template <class S, class T, int N>
AMPLAB_RULE void load_elements(const void* memory, int64_t i, T (&values)[N]) {
  const auto pack = *reinterpret_cast<const ElementPack<S, N>*>(static_cast<const S*>(memory) + i);
#pragma unroll
  for (int k = 0; k < N; ++k) {
    values[k] = static_cast<T>(widen(pack.at[k]));
  }
}

template <class S, class T, int N>
AMPLAB_RULE void store_elements(void* memory, int64_t i, const T (&values)[N]) {
  ElementPack<S, N> pack;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    narrow(values[k], pack.at[k]);
  }
  *reinterpret_cast<ElementPack<S, N>*>(static_cast<S*>(memory) + i) = pack;
}

template <class T, int N>
AMPLAB_RULE void load_stored(Stored stored, const void* memory, int64_t i, T (&values)[N]) {
  switch (stored) {
    case Stored::half: return load_elements<Half>(memory, i, values);
    case Stored::bfloat16: return load_elements<BFloat16>(memory, i, values);
    case Stored::single: return load_elements<float>(memory, i, values);
    case Stored::twice: return load_elements<double>(memory, i, values);
    case Stored::absent: return;
  }
}

template <class T, int N>
AMPLAB_RULE void store_stored(Stored stored, void* memory, int64_t i, const T (&values)[N]) {
  switch (stored) {
    case Stored::half: return store_elements<Half>(memory, i, values);
    case Stored::bfloat16: return store_elements<BFloat16>(memory, i, values);
    case Stored::single: return store_elements<float>(memory, i, values);
    case Stored::twice: return store_elements<double>(memory, i, values);
    case Stored::absent: return;
  }
}

// N elements, whose index for pointer k is `at(k)`.
template <int N, class T, class Rule, class Arguments, class At>
AMPLAB_RULE void step_some(const Rule& rule, T factor, const Arguments& arguments, void* const* memory, const At& at) {
  using Places = StepPlaces<Rule::kStates>;
  T grad[N], param[N], states[Rule::kStates + 1][N];
  load_stored(arguments.stored[Places::kGrad], memory[Places::kGrad], at(Places::kGrad), grad);
  load_stored(arguments.stored[Places::kParam], memory[Places::kParam], at(Places::kParam), param);
#pragma unroll
  for (int s = 0; s < Rule::kStates; ++s) {
    load_stored(arguments.stored[Places::kState + s], memory[Places::kState + s], at(Places::kState + s), states[s]);
  }
#pragma unroll
  for (int k = 0; k < N; ++k) {
    T state[Rule::kStates + 1];
#pragma unroll
    for (int s = 0; s < Rule::kStates; ++s) {
      state[s] = states[s][k];
    }
    rule(grad[k] * factor, param[k], state);
#pragma unroll
    for (int s = 0; s < Rule::kStates; ++s) {
      states[s][k] = state[s];
    }
  }
  store_stored(arguments.stored[Places::kParam], memory[Places::kParam], at(Places::kParam), param);
#pragma unroll
  for (int s = 0; s < Rule::kStates; ++s) {
    store_stored(arguments.stored[Places::kState + s], memory[Places::kState + s], at(Places::kState + s), states[s]);
  }
  store_stored(arguments.stored[Places::kCopy], memory[Places::kCopy], at(Places::kCopy), param);
}

template <class Arguments>
AMPLAB_RULE bool is_skipped(const Arguments& arguments) {
  return arguments.found_inf != nullptr && *arguments.found_inf != 0.0f;
}

template <class T, class Arguments>
AMPLAB_RULE T factor_of(const Arguments& arguments) {
  return static_cast<T>((arguments.factor == nullptr ? 1.0f : *arguments.factor) * arguments.sign);
}

AMPLAB_RULE double step_of(const void* count) {
  return count == nullptr ? 1.0 : static_cast<double>(*static_cast<const float*>(count)) + 1.0;
}

// Elements of a pack: 16 bytes of the arithmetic type.
template <class T>
constexpr int kStepPack = 16 / sizeof(T);

template <template <class> class Rule, class T, class Arguments>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    step_kernel(const __grid_constant__ LaunchTable<StepPlaces<Rule<T>::kStates>::kPointers> table,
                const __grid_constant__ Arguments arguments) {
  constexpr int kPointers = StepPlaces<Rule<T>::kStates>::kPointers;
  alignas(16) __shared__ unsigned char room[sizeof(Rule<T>)];  // the powers of beta are computed by one thread
  if (is_skipped(arguments)) {
    return;
  }
  const T factor = factor_of<T>(arguments);
  for_each_piece(table, blockIdx.x, gridDim.x, [&](const Piece& piece) {
    __syncthreads();
    if (threadIdx.x == 0) {
      const void* count = table.pointers[StepPlaces<Rule<T>::kStates>::kStep][piece.tensor];
      *reinterpret_cast<Rule<T>*>(room) = Rule<T>(arguments.settings, step_of(count));
    }
    __syncthreads();
    const Rule<T> rule = *reinterpret_cast<const Rule<T>*>(room);
    void* memory[kPointers];
    uintptr_t addresses = 0;
#pragma unroll
    for (int k = 0; k + 1 < kPointers; ++k) {
      memory[k] = table.pointers[k][piece.tensor];
      addresses |= reinterpret_cast<uintptr_t>(memory[k]);
    }
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

// A parameter whose tensors do not all have the same memory order.
template <int kPointers>
struct StridedStep {
  static constexpr int kMost = 16;
  void* memory[kPointers];
  int64_t strides[kPointers][kMost];
  int64_t sizes[kMost];
  int64_t numel;
  int dim;

  AMPLAB_FUNCTION int64_t offset(int pointer, int64_t index) const {
    int64_t offset = 0;
    for (int d = dim - 1; d >= 0; --d) {
      offset += index % sizes[d] * strides[pointer][d];
      index /= sizes[d];
    }
    return offset;
  }
};

template <template <class> class Rule, class T, class Arguments>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    strided_step_kernel(const __grid_constant__ StridedStep<StepPlaces<Rule<T>::kStates>::kPointers> item,
                        const __grid_constant__ Arguments arguments) {
  if (is_skipped(arguments)) {
    return;
  }
  const Rule<T> rule(arguments.settings, step_of(item.memory[StepPlaces<Rule<T>::kStates>::kStep]));
  const T factor = factor_of<T>(arguments);
  const int64_t all = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < item.numel; i += all) {
    step_some<1>(rule, factor, arguments, item.memory, [&](int pointer) { return item.offset(pointer, i); });
  }
}

// Must come after the launches that read the counts.
static __global__ void __launch_bounds__(kThreads)
    count_step_kernel(const __grid_constant__ LaunchTable<1> table, const float* found_inf) {
  if (found_inf != nullptr && *found_inf != 0.0f) {
    return;
  }
  for_each_piece(table, blockIdx.x, gridDim.x, [&](const Piece& piece) {
    if (threadIdx.x == 0) {
      *table.template memory<float>(0, piece) += 1.0f;
    }
  });
}

}  // namespace amplab
