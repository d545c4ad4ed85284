// The loop of every multi-tensor step on the CPU: lists of tensors of any dtype and layout in, a rule applied to each
// element. To add a rule:
//
//   1. steps.h      `MySettings` with a static `take` that reads the operator's numbers, and `template <class T>
//                   struct My`: `Settings`, `kStates`, `kSteps`, a constructor (settings, step) that computes what is
//                   the same for all elements of a tensor, and `operator()(V grad, V& param, V* state) const` in
//                   + - * / and square_root. `step` counts this one: 1 for the first.
//   2. steps.py     the schema, in the order that step_lists.h expects; the reference, with the same operations.
//   3. *.cpp, *.cu  m.impl("multi_tensor_my_", &step<My>).
//
// The grad that a rule sees is a float (a double for double parameters), times grad_factor, negated to maximize. 16-bit
// elements are converted in a block on the stack and rounded once when written back, so a rule is compiled only for
// floats; the model's copy is written from the same block.
#pragma once

#include "lanes.h"
#include "step_lists.h"

namespace amplab {

constexpr int64_t kStepGrain = 16384;  // the least elements per thread: below it a thread costs more than it saves
constexpr int64_t kStepBlock = 512;    // converted together; a few blocks fit the first-level cache

template <class T>
constexpr Dtype kStepDtype = sizeof(T) == sizeof(double) ? kDouble : kFloat;

// The offset of a logical element, in elements: slow, for layouts that have no faster path.
inline int64_t strided_offset(const StepItem& item, const int64_t* strides, int64_t index) {
  int64_t offset = 0;
  for (int64_t d = item.dim - 1; d >= 0; --d) {
    offset += index % item.sizes[d] * strides[d];
    index /= item.sizes[d];
  }
  return offset;
}

template <class T>
void widen_elements(Dtype dtype, const char* x, T* y, int64_t numel) {
  switch (dtype) {
    case kHalf: return widen_all<Half>(x, y, numel);
    case kBFloat16: return widen_all<BFloat16>(x, y, numel);
    case kFloat: return widen_all<float>(x, y, numel);
    default: return widen_all<double>(x, y, numel);
  }
}

template <class T>
void narrow_elements(Dtype dtype, const T* x, char* y, int64_t numel) {
  switch (dtype) {
    case kHalf: return narrow_all<T, Half>(x, y, numel);
    case kBFloat16: return narrow_all<T, BFloat16>(x, y, numel);
    case kFloat: return narrow_all<T, float>(x, y, numel);
    default: return narrow_all<T, double>(x, y, numel);
  }
}

template <class T>
bool is_taken_in_place(const Operand& operand) {
  return operand.strides == nullptr && operand.dtype == kStepDtype<T>;
}

// The elements [at, at + numel) as T: in place if they are T, else in `block`.
template <class T>
T* fetch(const StepItem& item, const Operand& operand, int64_t at, int64_t numel, T* block) {
  const int64_t size = kItemSize[operand.dtype];
  if (is_taken_in_place<T>(operand)) {
    return reinterpret_cast<T*>(operand.data) + at;
  }
  if (operand.strides == nullptr) {
    widen_elements(operand.dtype, operand.data + at * size, block, numel);
    return block;
  }
  for (int64_t i = 0; i < numel; ++i) {
    const int64_t offset = strided_offset(item, operand.strides, at + i);
    widen_elements(operand.dtype, operand.data + offset * size, block + i, 1);
  }
  return block;
}

template <class T>
void put_back(const StepItem& item, const Operand& operand, int64_t at, int64_t numel, const T* values) {
  const int64_t size = kItemSize[operand.dtype];
  if (operand.strides == nullptr) {
    char* target = operand.data + at * size;
    if (target != reinterpret_cast<const char*>(values)) {
      narrow_elements(operand.dtype, values, target, numel);
    }
    return;
  }
  for (int64_t i = 0; i < numel; ++i) {
    const int64_t offset = strided_offset(item, operand.strides, at + i);
    narrow_elements(operand.dtype, values + i, operand.data + offset * size, 1);
  }
}

// V elements from `i` on.
template <class V, class T, class Rule>
AMPLAB_RULE void step_at(const Rule& rule, T factor, const T* grad, T* param, T* const* states, int64_t i) {
  V state[kMostStates];
#if AMPLAB_LANES > 1
  if constexpr (sizeof(V) > sizeof(T)) {
#pragma GCC unroll 4
    for (int k = 0; k < Rule::kStates; ++k) {
      state[k] = lanes_from(states[k] + i);
    }
    V weight = lanes_from(param + i);
    rule(V(lanes_from(grad + i)) * V(factor), weight, state);
    lanes_to(param + i, weight.at);
#pragma GCC unroll 4
    for (int k = 0; k < Rule::kStates; ++k) {
      lanes_to(states[k] + i, state[k].at);
    }
    return;
  } else
#endif
  {
    for (int k = 0; k < Rule::kStates; ++k) {
      state[k] = states[k][i];
    }
    V weight = param[i];
    rule(grad[i] * factor, weight, state);
    param[i] = weight;
    for (int k = 0; k < Rule::kStates; ++k) {
      states[k][i] = state[k];
    }
  }
}

template <class T, class Rule>
void step_elements(const Rule& given_rule, T factor, const T* grad, T* param, T* const* given, int64_t numel) {
  const Rule rule = given_rule;  // a local copy that no store can change, so that it stays in registers
  T* const states[kMostStates] = {given[0], given[1], given[2]};
  int64_t i = 0;
  if constexpr (sizeof(T) == sizeof(float)) {
#pragma GCC unroll 2
    for (; i + kStepLanes <= numel; i += kStepLanes) {
      step_at<Lanes>(rule, factor, grad, param, states, i);
    }
  }
  for (; i < numel; ++i) {
    step_at<T>(rule, factor, grad, param, states, i);
  }
}

// The elements [begin, end) of one parameter.
template <class T, class Rule>
void step_range(const StepItem& item, int64_t begin, int64_t end, const Rule& rule, T factor) {
  static_assert(Rule::kStates <= kMostStates, "raise kMostStates");
  bool direct = is_taken_in_place<T>(item.grad) && is_taken_in_place<T>(item.param) && item.copy.data == nullptr;
  for (int k = 0; k < Rule::kStates; ++k) {
    direct = direct && is_taken_in_place<T>(item.states[k]);
  }
  const int64_t block = direct ? end - begin : kStepBlock;
  T blocks[2 + kMostStates][kStepBlock];
  T* states[kMostStates] = {};
  for (int64_t at = begin; at < end; at += block) {
    const int64_t numel = std::min(block, end - at);
    const T* grad = fetch(item, item.grad, at, numel, blocks[0]);
    T* param = fetch(item, item.param, at, numel, blocks[1]);
    for (int k = 0; k < Rule::kStates; ++k) {
      states[k] = fetch(item, item.states[k], at, numel, blocks[2 + k]);
    }
    step_elements(rule, factor, grad, param, states, numel);
    put_back(item, item.param, at, numel, param);
    for (int k = 0; k < Rule::kStates; ++k) {
      put_back(item, item.states[k], at, numel, states[k]);
    }
    if (item.copy.data != nullptr) {
      put_back(item, item.copy, at, numel, param);
    }
  }
}

template <template <class> class Rule>
void step_item(const StepItem& item, int64_t begin, int64_t end, const typename Rule<float>::Settings& settings,
               float factor) {
  const double step = item.step == nullptr ? 1.0 : static_cast<double>(*item.step) + 1.0;
  if (item.param.dtype == kDouble) {
    step_range<double>(item, begin, end, Rule<double>(settings, step), static_cast<double>(factor));
  } else {
    step_range<float>(item, begin, end, Rule<float>(settings, step), factor);
  }
}

template <class Body>
void share_elements(int64_t end, const Body& body) {
  const auto call = [](int64_t first, int64_t last, void* context) {
    (*static_cast<const Body*>(context))(first, last);
  };
  check(torch_parallel_for(0, end, kStepGrain, call, const_cast<Body*>(&body)), "parallel_for");
}

// All lists as one range of elements that is divided evenly among the threads, whatever the sizes of the tensors.
template <template <class> class Rule>
void step_all(const StepLists& lists, const typename Rule<float>::Settings& settings) {
  const std::vector<StepItem>& items = lists.items();
  const float factor = (lists.factor() == nullptr ? 1.0f : *lists.factor()) * lists.sign();
  std::vector<int64_t> ends;
  ends.reserve(items.size());
  int64_t total = 0;
  for (const StepItem& item : items) {
    ends.push_back(total += item.numel);
  }
  share_elements(total, [&](int64_t begin, int64_t end) {
    for (int index = find_span(ends, static_cast<int>(items.size()), begin); begin < end; ++index) {
      const int64_t start = ends[index] - items[index].numel;
      const int64_t stop = std::min(end, ends[index]);
      step_item<Rule>(items[index], begin - start, stop - start, settings, factor);
      begin = stop;
    }
  });
  for (float* count : lists.step_counts()) {
    *count += 1.0f;
  }
}

template <template <class> class Rule>
void step_unless_found(const StepLists& lists) {
  StepNumbers numbers = lists.numbers();
  const auto settings = Rule<float>::Settings::take(numbers);
  const float* found_inf = lists.found_inf();
  if (found_inf == nullptr || *found_inf == 0.0f) {
    step_all<Rule>(lists, settings);
  }
}

// The operator of a rule, called by the dispatcher.
template <template <class> class Rule>
void step(StableIValue* stack, uint64_t /*inputs*/, uint64_t /*outputs*/) {
  step_unless_found<Rule>(StepLists(stack, Rule<float>::kStates, Rule<float>::kSteps));
}

}  // namespace amplab
