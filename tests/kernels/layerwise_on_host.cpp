// What layerwise_steps.cu does with the kernels of layerwise_device.h, with the host in the place of the device; for
// test_layerwise_steps_on_host.py. Scratch memory is NaN where nothing has been written to it yet.
#include <algorithm>
#include <cmath>
#include <limits>

#include "cuda_on_host.h"
#include "layerwise_device.h"

using namespace amplab;

constexpr double kNothing = std::numeric_limits<double>::quiet_NaN();

struct Numbers {
  const double* next;
  double number() { return *next++; }
  bool flag() { return *next++ != 0.0; }
};

template <int kStates, class Settings>
StepArguments<Settings, kStates> arguments_of(const double* numbers, const uint8_t* stored, const float* factor,
                                              const float* found_inf) {
  Numbers reader{numbers};
  StepArguments<Settings, kStates> arguments{Settings::take(reader), factor, found_inf, 1.0f, {}};
  for (int k = 0; k < StepPlaces<kStates>::kPointers; ++k) {
    arguments.stored[k] = static_cast<Stored>(stored[k]);
  }
  return arguments;
}

template <int kStates, class Settings>
void run(const double* numbers, const uint8_t* stored, const void* const* memory, const int64_t* numels, int tensors,
         float* norms, const float* factor, const float* found_inf, uint32_t most_blocks) {
  constexpr int kPointers = StepPlaces<kStates>::kPointers;
  const auto arguments = arguments_of<kStates, Settings>(numbers, stored, factor, found_inf);
  std::vector<LayerSums> slots(most_blocks + tensors, {kNothing, kNothing}), totals(tensors);
  std::vector<float> gathered(tensors);
  const LayerScratch scratch{slots.data(), totals.data(), gathered.data()};
  TableFiller<kPointers> filler(most_blocks, [&](const LaunchTable<kPointers>& table, uint32_t blocks) {
    on_host::launch(blocks, kThreads, [&] { measure_layers_kernel<float, kStates>(table, arguments, scratch); });
    const uint32_t some = std::min<uint32_t>(table.count, blocks);
    on_host::launch(some, kThreads, [&] { add_up_layers_kernel(table, arguments, scratch, blocks); });
    on_host::launch(blocks, kThreads, [&] { step_layers_kernel<float, kStates>(table, arguments, scratch); });
  });
  TableFiller<1> before(most_blocks, [&](const LaunchTable<1>& table, uint32_t blocks) {
    on_host::launch(blocks, kThreads, [&] { gather_norms_kernel(table, scratch); });
  });
  TableFiller<1> counts(most_blocks, [&](const LaunchTable<1>& table, uint32_t blocks) {
    on_host::launch(blocks, kThreads, [&] { count_step_kernel(table, found_inf); });
  });
  for (int t = 0; t < tensors; ++t) {
    std::array<const void*, kPointers> pointers;
    std::copy(memory + t * kPointers, memory + (t + 1) * kPointers, pointers.begin());
    filler.add(pointers, numels[t], t);
    counts.add({pointers[kPointers - 1]}, 1, t);
    if (kStates == 1) {
      before.add({norms + t}, 1, t);
    }
  }
  before.flush();
  filler.flush();
  counts.flush();
  if constexpr (kStates == 1) {
    TableFiller<1> after(most_blocks, [&](const LaunchTable<1>& table, uint32_t blocks) {
      const auto scatter = [&] { scatter_norms_kernel(table, scratch, arguments.settings, found_inf); };
      on_host::launch(blocks, kThreads, scatter);
    });
    for (int t = 0; t < tensors; ++t) {
      after.add({norms + t}, 1, t);
    }
    after.flush();
  }
}

template <int kStates, class Settings>
void run_strided(const double* numbers, const uint8_t* stored, const void* const* memory, const int64_t* layout,
                 float* norm) {
  constexpr int kPointers = StepPlaces<kStates>::kPointers;
  const auto arguments = arguments_of<kStates, Settings>(numbers, stored, nullptr, nullptr);
  StridedStep<kPointers> item{};
  item.dim = static_cast<int>(layout[0]);
  item.numel = 1;
  for (int d = 0; d < item.dim; ++d) {
    item.numel *= item.sizes[d] = layout[1 + d];
    for (int k = 0; k < 2 + kStates; ++k) {
      item.strides[k][d] = layout[1 + (1 + k) * item.dim + d];
    }
  }
  std::copy(memory, memory + kPointers, const_cast<const void**>(item.memory));
  LayerSums total{};
  const LayerScratch scratch{nullptr, &total, norm};
  on_host::launch(1, kThreads, [&] { strided_layer_kernel<float, kStates>(item, arguments, scratch, 0); });
}

extern "C" void lamb(const double* numbers, const uint8_t* stored, const void* const* memory, const int64_t* numels,
                     int tensors, float* norms, const float* factor, const float* found_inf, int blocks) {
  run<2, LambSettings>(numbers, stored, memory, numels, tensors, norms, factor, found_inf, blocks);
}

extern "C" void novograd(const double* numbers, const uint8_t* stored, const void* const* memory, const int64_t* numels,
                         int tensors, float* norms, const float* factor, const float* found_inf, int blocks) {
  run<1, NovogradSettings>(numbers, stored, memory, numels, tensors, norms, factor, found_inf, blocks);
}

extern "C" void lamb_strided(const double* numbers, const uint8_t* stored, const void* const* memory,
                             const int64_t* layout, float* norm) {
  run_strided<2, LambSettings>(numbers, stored, memory, layout, norm);
}

extern "C" void novograd_strided(const double* numbers, const uint8_t* stored, const void* const* memory,
                                 const int64_t* layout, float* norm) {
  run_strided<1, NovogradSettings>(numbers, stored, memory, layout, norm);
}
