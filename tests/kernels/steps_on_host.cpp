// What step_launch.h does with the kernels of step_device.h, with the host in the place of the device; for
// test_steps_on_host.py. Every tensor is given as it lies: pointers in the order of the table, dtypes, and strides for
// the one that has them.
#include <cmath>

#include "cuda_on_host.h"
#include "adaptive_steps.h"
#include "step_device.h"

using namespace amplab;

struct Call {
  int32_t count;
  uint32_t most_blocks;
  const void** pointers;  // (count, pointers of the rule)
  const int64_t* numels;
  const float* factor;
  const float* found_inf;
  float sign;
  const int32_t* stored;    // one for each pointer
  const int64_t* strided;   // null, or dim, sizes and for each pointer its strides
  const double* numbers;
};

struct Numbers {
  const double* next;
  double number() { return *next++; }
  bool flag() { return *next++ != 0.0; }
};

template <template <class> class Rule, class T>
void run(const Call& call) {
  constexpr int kStates = Rule<T>::kStates;
  constexpr int kPointers = StepPlaces<kStates>::kPointers;
  using Settings = typename Rule<T>::Settings;
  using Arguments = StepArguments<Settings, kStates>;
  Numbers numbers{call.numbers};
  Arguments arguments{Settings::take(numbers), call.factor, call.found_inf, call.sign, {}};
  for (int k = 0; k < kPointers; ++k) {
    arguments.stored[k] = static_cast<Stored>(call.stored[k]);
  }
  if (call.strided != nullptr) {
    StridedStep<kPointers> item{};
    item.numel = call.numels[0];
    item.dim = static_cast<int>(call.strided[0]);
    for (int d = 0; d < item.dim; ++d) {
      item.sizes[d] = call.strided[1 + d];
      for (int k = 0; k < kPointers; ++k) {
        item.strides[k][d] = call.strided[1 + (1 + k) * item.dim + d];
      }
    }
    std::memcpy(item.memory, call.pointers, sizeof item.memory);
    on_host::launch(call.most_blocks, kThreads, [&] { strided_step_kernel<Rule, T>(item, arguments); });
    return;
  }
  TableFiller<kPointers> filler(call.most_blocks, [&](const LaunchTable<kPointers>& table, uint32_t blocks) {
    on_host::launch(blocks, kThreads, [&] { step_kernel<Rule, T>(table, arguments); });
  });
  TableFiller<1> counts(call.most_blocks, [&](const LaunchTable<1>& table, uint32_t blocks) {
    on_host::launch(blocks, kThreads, [&] { count_step_kernel(table, call.found_inf); });
  });
  for (int i = 0; i < call.count; ++i) {
    std::array<const void*, kPointers> pointers;
    std::memcpy(pointers.data(), call.pointers + i * kPointers, sizeof pointers);
    filler.add(pointers, call.numels[i], i);
    if (pointers[kPointers - 1] != nullptr) {
      counts.add({pointers[kPointers - 1]}, 1, i);
    }
  }
  filler.flush();
  counts.flush();
}

extern "C" void run_adam(const Call* call, int doubles) { doubles ? run<Adam, double>(*call) : run<Adam, float>(*call); }

extern "C" void run_momentum_sgd(const Call* call, int doubles) {
  doubles ? run<MomentumSgd, double>(*call) : run<MomentumSgd, float>(*call);
}

extern "C" void run_plain_sgd(const Call* call, int doubles) {
  doubles ? run<PlainSgd, double>(*call) : run<PlainSgd, float>(*call);
}

extern "C" void run_adagrad(const Call* call, int doubles) {
  doubles ? run<Adagrad, double>(*call) : run<Adagrad, float>(*call);
}

extern "C" void run_adadelta(const Call* call, int doubles) {
  doubles ? run<Adadelta, double>(*call) : run<Adadelta, float>(*call);
}

extern "C" void run_rmsprop(const Call* call, int doubles) {
  doubles ? run<Rmsprop, double>(*call) : run<Rmsprop, float>(*call);
}

extern "C" void run_centered_momentum_rmsprop(const Call* call, int doubles) {
  doubles ? run<CenteredMomentumRmsprop, double>(*call) : run<CenteredMomentumRmsprop, float>(*call);
}
