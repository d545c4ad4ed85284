// The host side of a multi-tensor step on the device: launches of step_device.h for the checked lists of step_lists.h.
// One launch for each combination of dtypes, up to 576 parameters of Adam, and a small one that counts the steps. The
// factor, found_inf and the counts are read on the device: nothing waits for the host, and the launches can be captured
// in a graph. Only for .cu files; a rule is added as on the CPU (step_driver.h):
//
//   m.impl("multi_tensor_my_", &step_on_device<My>);
#pragma once

#include "cuda_launch.h"
#include "step_device.h"
#include "step_lists.h"

namespace amplab {

static_assert(static_cast<int>(Stored::half) == kHalf && static_cast<int>(Stored::twice) == kDouble &&
                  static_cast<int>(Stored::absent) == kDtypes,
              "Stored is Dtype");

// The launches for a table of parameters, and for one that is not dense. Rules that need norms of a whole tensor first
// have others (layerwise_steps.cu).
template <template <class> class Rule>
struct StepKernels {
  static constexpr uint32_t kMostUnits = 4;  // of a block: as in unscale.cu, the blocks that run share a stretch of memory

  template <class T, class Table, class Arguments>
  void step(const Table& table, uint32_t blocks, cudaStream_t stream, const Arguments& arguments) const {
    step_kernel<Rule, T><<<blocks, kThreads, 0, stream>>>(table, arguments);
  }

  template <class T, class Item, class Arguments>
  void step_strided(const Item& item, size_t /*index*/, uint32_t blocks, cudaStream_t stream,
                    const Arguments& arguments) const {
    strided_step_kernel<Rule, T><<<blocks, kThreads, 0, stream>>>(item, arguments);
  }
};

template <template <class> class Rule, class Kernels = StepKernels<Rule>>
class StepLaunches {
 public:
  static constexpr int kStates = Rule<float>::kStates;
  using Places = StepPlaces<kStates>;
  using Settings = typename Rule<float>::Settings;
  using Arguments = StepArguments<Settings, kStates>;
  using Pointers = std::array<const void*, Places::kPointers>;
  static_assert(sizeof(Arguments) <= kArgumentBytes, "too many numbers for the parameters of a launch");

  StepLaunches(const StepLists& lists, const Settings& settings, const LaunchPlace& place, Kernels kernels = {})
      : lists_(lists), settings_(settings), place_(place), kernels_(kernels) {}

  void run() {
    std::vector<bool> done(lists_.items().size(), false);
    for (size_t first = 0; first < done.size(); ++first) {
      if (done[first]) {
        continue;
      }
      const Arguments arguments = arguments_of(lists_.items()[first]);
      lists_.items()[first].param.dtype == kDouble ? launch_alike<double>(first, arguments, done)
                                                   : launch_alike<float>(first, arguments, done);
    }
    count_steps();
  }

 private:
  // The operands of an item in the order of the table; none for the step count.
  static std::array<const Operand*, Places::kStep> operands(const StepItem& item) {
    std::array<const Operand*, Places::kStep> operands{&item.grad, &item.param};
    for (int state = 0; state < kStates; ++state) {
      operands[Places::kState + state] = &item.states[state];
    }
    operands[Places::kCopy] = &item.copy;
    return operands;
  }

  static Pointers pointers(const StepItem& item) {
    Pointers pointers{};
    for (int place = 0; place < Places::kStep; ++place) {
      pointers[place] = operands(item)[place]->data;
    }
    pointers[Places::kStep] = item.step;
    return pointers;
  }

  Arguments arguments_of(const StepItem& item) const {
    Arguments arguments{settings_, lists_.factor(), lists_.found_inf(), lists_.sign(), {}};
    for (int place = 0; place < Places::kStep; ++place) {
      const Operand& operand = *operands(item)[place];
      arguments.stored[place] = operand.data == nullptr ? Stored::absent : static_cast<Stored>(operand.dtype);
    }
    return arguments;
  }

  static bool has_dtypes(const StepItem& item, const Arguments& arguments, const StepItem& first) {
    for (int place = 0; place < Places::kStep; ++place) {
      if (operands(item)[place]->dtype != operands(first)[place]->dtype) {
        return false;
      }
    }
    return true;
  }

  static bool is_strided(const StepItem& item) {
    for (const Operand* operand : operands(item)) {
      if (operand->strides != nullptr) {
        return true;
      }
    }
    return false;
  }

  // All items of the first one's dtypes.
  template <class T>
  void launch_alike(size_t first, const Arguments& arguments, std::vector<bool>& done) {
    Launches<Places::kPointers> launches(
        place_, [&](const LaunchTable<Places::kPointers>& table, uint32_t blocks) {
          kernels_.template step<T>(table, blocks, place_.stream, arguments);
        }, Kernels::kMostUnits);
    for (size_t index = first; index < done.size(); ++index) {
      const StepItem& item = lists_.items()[index];
      if (done[index] || !has_dtypes(item, arguments, lists_.items()[first])) {
        continue;
      }
      done[index] = true;
      if (is_strided(item)) {
        launch_strided<T>(item, index, arguments);
      } else {
        launches.add(pointers(item), item.numel, static_cast<int64_t>(index));
      }
    }
    launches.flush();
  }

  template <class T>
  void launch_strided(const StepItem& item, size_t index, const Arguments& arguments) {
    using Strided = StridedStep<Places::kPointers>;
    if (item.dim > Strided::kMost) {
      throw std::runtime_error("a parameter has gaps in more than 16 dimensions: pass a contiguous clone.");
    }
    Strided strided{};
    strided.numel = item.numel;
    strided.dim = static_cast<int>(item.dim);
    std::copy(item.sizes, item.sizes + item.dim, strided.sizes);
    for (int place = 0; place < Places::kPointers; ++place) {
      strided.memory[place] = const_cast<void*>(pointers(item)[place]);
    }
    for (int place = 0; place < Places::kStep; ++place) {
      int64_t dense = 1;
      for (int64_t d = item.dim - 1; d >= 0; --d) {
        const int64_t* strides = operands(item)[place]->strides;
        strided.strides[place][d] = strides == nullptr ? dense : strides[d];
        dense *= item.sizes[d];
      }
    }
    const int64_t blocks = std::min<int64_t>((item.numel + kThreads - 1) / kThreads, place_.resident_blocks);
    kernels_.template step_strided<T>(strided, index, static_cast<uint32_t>(blocks), place_.stream, arguments);
    check_cuda(cudaGetLastError());
  }

  void count_steps() {
    Launches<1> launches(place_, [&](const LaunchTable<1>& table, uint32_t blocks) {
      count_step_kernel<<<blocks, kThreads, 0, place_.stream>>>(table, lists_.found_inf());
    });
    for (size_t index = 0; index < lists_.step_counts().size(); ++index) {
      launches.add({lists_.step_counts()[index]}, 1, static_cast<int64_t>(index));
    }
    launches.flush();
  }

  const StepLists& lists_;
  Settings settings_;
  const LaunchPlace& place_;
  Kernels kernels_;
};

template <template <class> class Rule>
void launch_step(const StepLists& lists) {
  StepNumbers numbers = lists.numbers();
  const auto settings = Rule<float>::Settings::take(numbers);
  if (!lists.empty()) {
    const LaunchPlace place(lists.device_index());
    StepLaunches<Rule>(lists, settings, place).run();
  }
}

// The operator of a rule, called by the dispatcher.
template <template <class> class Rule>
void step_on_device(StableIValue* stack, uint64_t /*inputs*/, uint64_t /*outputs*/) {
  launch_step<Rule>(StepLists(stack, Rule<float>::kStates, Rule<float>::kSteps));
}

}  // namespace amplab
