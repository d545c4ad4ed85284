// The CPU kernels of LAMB and NovoGrad; schemas and references are in layerwise_steps.py, the arithmetic is in
// layerwise_steps.h. Two passes over chunks of the lists: the first measures and changes nothing, the second steps with
// the loop of step_driver.h. The sums of the chunks are added in order, independent of the threads.
#include <cmath>

#include "layerwise_steps.h"
#include "step_driver.h"

namespace amplab {
namespace {

constexpr int64_t kLayerChunk = 16384;

struct LayerChunk {
  size_t item;
  int64_t begin, end;
  double weight, update;  // the sums of squares
};

std::vector<LayerChunk> cut(const std::vector<StepItem>& items) {
  std::vector<LayerChunk> chunks;
  for (size_t item = 0; item < items.size(); ++item) {
    for (int64_t begin = 0; begin < items[item].numel; begin += kLayerChunk) {
      chunks.push_back({item, begin, std::min(begin + kLayerChunk, items[item].numel), 0.0, 0.0});
    }
  }
  return chunks;
}

template <class Body>
void for_each_chunk(std::vector<LayerChunk>& chunks, const Body& body) {
  const auto over = [&](int64_t first, int64_t last) {
    for (int64_t index = first; index < last; ++index) {
      body(chunks[index]);
    }
  };
  const auto call = [](int64_t first, int64_t last, void* context) {
    (*static_cast<decltype(over)*>(context))(first, last);
  };
  void* context = const_cast<void*>(static_cast<const void*>(&over));
  check(torch_parallel_for(0, static_cast<int64_t>(chunks.size()), 1, call, context), "parallel_for");
}

void count_steps(const StepLists& lists) {
  for (float* count : lists.step_counts()) {
    *count += 1.0f;
  }
}

double step_of(const StepItem& item) { return static_cast<double>(*item.step) + 1.0; }

// -- LAMB -----------------------------------------------------------------------------------------------------------

// V elements from `i` on: the squares of the weight and of its update.
template <class V, class T>
AMPLAB_RULE void measure_at(const AnyLamb<T, true>& rule, T factor, const T* grad, const T* param,
                            T* const* states, int64_t i, SquareSum& weights, SquareSum& updates) {
#if AMPLAB_LANES > 1
  if constexpr (sizeof(V) > sizeof(T)) {
    V weight = lanes_from(param + i);
    V state[2] = {lanes_from(states[0] + i), lanes_from(states[1] + i)};
    weights.add(weight);
    rule(V(lanes_from(grad + i)) * V(factor), weight, state);
    updates.add(weight);
    return;
  } else
#endif
  {
    V weight = param[i];
    V state[2] = {states[0][i], states[1][i]};
    weights.add(static_cast<double>(weight));
    rule(grad[i] * factor, weight, state);
    updates.add(static_cast<double>(weight));
  }
}

template <class T>
void measure_lamb(const StepItem& item, const LambSettings& settings, T factor, LayerChunk& chunk) {
  const AnyLamb<T, true> rule(settings, step_of(item), 0.0);
  T blocks[4][kStepBlock];
  SquareSum weights, updates;
  for (int64_t at = chunk.begin; at < chunk.end; at += kStepBlock) {
    const int64_t numel = std::min(kStepBlock, chunk.end - at);
    const T* grad = fetch(item, item.grad, at, numel, blocks[0]);
    const T* param = fetch(item, item.param, at, numel, blocks[1]);
    T* const states[2] = {fetch(item, item.states[0], at, numel, blocks[2]),
                          fetch(item, item.states[1], at, numel, blocks[3])};
    int64_t i = 0;
    if constexpr (sizeof(T) == sizeof(float)) {
      for (; i + kStepLanes <= numel; i += kStepLanes) {
        measure_at<Lanes>(rule, factor, grad, param, states, i, weights, updates);
      }
    }
    for (; i < numel; ++i) {
      measure_at<T>(rule, factor, grad, param, states, i, weights, updates);
    }
  }
  chunk.weight = weights.total();
  chunk.update = updates.total();
}

std::vector<double> lamb_rates(const std::vector<StepItem>& items, const std::vector<LayerChunk>& chunks,
                               const LambSettings& settings) {
  std::vector<double> weights(items.size()), updates(items.size()), rates;
  for (const LayerChunk& chunk : chunks) {
    weights[chunk.item] += chunk.weight;
    updates[chunk.item] += chunk.update;
  }
  for (size_t item = 0; item < items.size(); ++item) {
    rates.push_back(settings.rate(weights[item], updates[item]));
  }
  return rates;
}

void lamb(StableIValue* stack, uint64_t /*inputs*/, uint64_t /*outputs*/) {
  const StepLists lists(stack, 2, true);
  StepNumbers numbers = lists.numbers();
  const LambSettings settings = LambSettings::take(numbers);
  if (lists.found_inf() != nullptr && *lists.found_inf() != 0.0f) {
    return;
  }
  const std::vector<StepItem>& items = lists.items();
  const float factor = (lists.factor() == nullptr ? 1.0f : *lists.factor()) * lists.sign();
  std::vector<LayerChunk> chunks = cut(items);
  if (settings.adapt) {
    for_each_chunk(chunks, [&](LayerChunk& chunk) {
      const StepItem& item = items[chunk.item];
      item.param.dtype == kDouble ? measure_lamb<double>(item, settings, static_cast<double>(factor), chunk)
                                  : measure_lamb<float>(item, settings, factor, chunk);
    });
  }
  const std::vector<double> rates = lamb_rates(items, chunks, settings);
  for_each_chunk(chunks, [&](LayerChunk& chunk) {
    const StepItem& item = items[chunk.item];
    const double rate = rates[chunk.item];
    if (item.param.dtype == kDouble) {
      const AnyLamb<double, false> rule(settings, step_of(item), rate);
      step_range<double>(item, chunk.begin, chunk.end, rule, static_cast<double>(factor));
    } else {
      step_range<float>(item, chunk.begin, chunk.end, AnyLamb<float, false>(settings, step_of(item), rate), factor);
    }
  });
  count_steps(lists);
}

// -- NovoGrad -------------------------------------------------------------------------------------------------------

template <class T>
double largest(const T* x, T factor, int64_t numel, double most) {
  for (int64_t i = 0; i < numel; ++i) {
    const double each = std::abs(static_cast<double>(x[i] * factor));
    most = each > most || each != each ? each : most;  // NaN is the largest
  }
  return most;
}

template <class T>
double squares(const T* x, T factor, int64_t numel) {
  SquareSum sum;
  int64_t i = 0;
#if AMPLAB_LANES > 1
  if constexpr (sizeof(T) == sizeof(float)) {
    for (; i + kStepLanes <= numel; i += kStepLanes) {
      sum.add(Lanes(lanes_from(x + i)) * Lanes(factor));
    }
  }
#endif
  for (; i < numel; ++i) {
    sum.add(static_cast<double>(x[i] * factor));
  }
  return sum.total();
}

template <class T>
void measure_gradient(const StepItem& item, bool maximum, T factor, LayerChunk& chunk) {
  T block[kStepBlock];
  for (int64_t at = chunk.begin; at < chunk.end; at += kStepBlock) {
    const int64_t numel = std::min(kStepBlock, chunk.end - at);
    const T* grad = fetch(item, item.grad, at, numel, block);
    chunk.weight = maximum ? largest(grad, factor, numel, chunk.weight) : chunk.weight + squares(grad, factor, numel);
  }
}

// The index of each item among all parameters; parameters without elements are no items.
std::vector<size_t> places_of(const std::vector<StepItem>& items, const std::vector<float*>& counts) {
  std::vector<size_t> places;
  for (size_t place = 0; place < counts.size() && places.size() < items.size(); ++place) {
    if (items[places.size()].step == counts[place]) {
      places.push_back(place);
    }
  }
  return places;
}

std::vector<float*> take_norms(StableIValue value, std::vector<Handle>& norms, size_t params) {
  norms = take_list(value);
  if (norms.size() != params) {
    throw std::runtime_error(std::to_string(params) + " params, " + std::to_string(norms.size()) +
                             " norms: expected lists of equal length.");
  }
  std::vector<float*> numbers;
  for (size_t index = 0; index < norms.size(); ++index) {
    const bool one = norms[index].numel() == 1 && norms[index].dtype() == kFloat;
    require(one, "norm", index, ": expected one float32 element.");
    numbers.push_back(static_cast<float*>(norms[index].mutable_data()));
  }
  return numbers;
}

// The running norm of every parameter, including this gradient.
std::vector<float> next_norms(const std::vector<float*>& before, const std::vector<size_t>& places,
                              const std::vector<LayerChunk>& chunks, const NovogradSettings& settings) {
  std::vector<double> measured(before.size());
  for (const LayerChunk& chunk : chunks) {
    double& whole = measured[places[chunk.item]];
    whole = settings.maximum_norm ? largest(&chunk.weight, 1.0, 1, whole) : whole + chunk.weight;
  }
  std::vector<float> norms;
  for (size_t place = 0; place < before.size(); ++place) {
    norms.push_back(settings.next_norm(*before[place], measured[place]));
  }
  return norms;
}

void novograd(StableIValue* stack, uint64_t /*inputs*/, uint64_t /*outputs*/) {
  constexpr size_t kNormsAt = 17;  // after the numbers
  std::vector<Handle> norm_tensors;
  const StepLists lists(stack, 1, true);
  const std::vector<float*> norms = take_norms(stack[kNormsAt], norm_tensors, lists.step_counts().size());
  StepNumbers numbers = lists.numbers();
  const NovogradSettings settings = NovogradSettings::take(numbers);
  if (lists.found_inf() != nullptr && *lists.found_inf() != 0.0f) {
    return;
  }
  const std::vector<StepItem>& items = lists.items();
  const std::vector<size_t> places = places_of(items, lists.step_counts());
  const float factor = (lists.factor() == nullptr ? 1.0f : *lists.factor()) * lists.sign();
  std::vector<LayerChunk> chunks = cut(items);
  for_each_chunk(chunks, [&](LayerChunk& chunk) {
    const StepItem& item = items[chunk.item];
    item.param.dtype == kDouble ? measure_gradient(item, settings.maximum_norm, static_cast<double>(factor), chunk)
                                : measure_gradient(item, settings.maximum_norm, factor, chunk);
  });
  const std::vector<float> now = next_norms(norms, places, chunks, settings);
  for_each_chunk(chunks, [&](LayerChunk& chunk) {
    const StepItem& item = items[chunk.item];
    const float norm = now[places[chunk.item]];
    if (item.param.dtype == kDouble) {
      const Novograd<double> rule(settings, step_of(item), norm);
      step_range<double>(item, chunk.begin, chunk.end, rule, static_cast<double>(factor));
    } else {
      step_range<float>(item, chunk.begin, chunk.end, Novograd<float>(settings, step_of(item), norm), factor);
    }
  });
  for (size_t place = 0; place < norms.size(); ++place) {
    *norms[place] = now[place];
  }
  count_steps(lists);
}

STABLE_TORCH_LIBRARY_IMPL(amplab, CPU, m) {
  m.impl("multi_tensor_lamb_", &lamb);
  m.impl("multi_tensor_novograd_", &novograd);
}

}  // namespace
}  // namespace amplab
