// One element of LAMB and NovoGrad, once the norms of its tensor are known; as steps.h. The norms themselves are sums
// over tensors, which each device computes in its own way.
#pragma once

#include "steps.h"

namespace amplab {

// The constants of both rules, and what depends on the step count.
struct LayerSettings {
  double lr, beta1, beta2, beta3, eps, weight_decay;

  template <class Arguments>
  static LayerSettings take(Arguments& arguments) {
    return {arguments.number(), arguments.number(), arguments.number(),
            arguments.number(), arguments.number(), arguments.number()};
  }

  AMPLAB_RULE double correction(double step) const { return 1.0 - pow(beta1, step); }
  AMPLAB_RULE double root_correction(double step) const { return sqrt(1.0 - pow(beta2, step)); }
};

// -- LAMB -----------------------------------------------------------------------------------------------------------
//
//   g <- g + weight_decay p                                unless decoupled
//   m <- beta1 m + beta3 g
//   v <- beta2 v + ((1 - beta2) g) g
//   u  = m / c1 / (sqrt(v) / sqrt(c2) + eps)               + weight_decay p, if decoupled
//   p <- p - rate u                                        rate = lr min(|p|, max_weight_norm) / |u|

struct LambSettings {
  LayerSettings layer;
  double max_weight_norm;
  bool decoupled, bias_correction, adapt;

  template <class Arguments>
  static LambSettings take(Arguments& arguments) {
    return {LayerSettings::take(arguments), arguments.number(), arguments.flag(), arguments.flag(), arguments.flag()};
  }

  // The learning rate of a tensor, from the sums of the squares of its weight and of its update.
  AMPLAB_RULE double rate(double weight_squares, double update_squares) const {
    if (!adapt || weight_squares == 0.0 || update_squares == 0.0) {
      return layer.lr;
    }
    const double length = sqrt(weight_squares);
    return (length > max_weight_norm ? max_weight_norm : length) / sqrt(update_squares) * layer.lr;
  }
};

// With `measures`, the weight is replaced by the update, whose norm is still to be computed.
template <class T, bool measures>
struct AnyLamb {
  using Settings = LambSettings;
  static constexpr int kStates = 2;
  T beta1, fresh1, beta2, fresh2, factor, root_factor, eps, decay_before, decay_after, rate;

  AMPLAB_RULE AnyLamb(const LambSettings& settings, double step, double rate_of_tensor)
      : beta1(static_cast<T>(settings.layer.beta1)),
        fresh1(static_cast<T>(settings.layer.beta3)),
        beta2(static_cast<T>(settings.layer.beta2)),
        fresh2(static_cast<T>(1.0 - settings.layer.beta2)),
        factor(T(1)),
        root_factor(T(1)),
        eps(static_cast<T>(settings.layer.eps)),
        decay_before(settings.decoupled ? T(0) : static_cast<T>(settings.layer.weight_decay)),
        decay_after(settings.decoupled ? static_cast<T>(settings.layer.weight_decay) : T(0)),
        rate(static_cast<T>(rate_of_tensor)) {
    if (settings.bias_correction) {
      factor = static_cast<T>(1.0 / settings.layer.correction(step));
      root_factor = static_cast<T>(1.0 / settings.layer.root_correction(step));
    }
  }

  template <class V>
  AMPLAB_RULE void operator()(V grad, V& param, V* state) const {
    if (decay_before != T(0)) {
      grad = grad + param * V(decay_before);
    }
    state[0] = state[0] * V(beta1) + grad * V(fresh1);
    state[1] = state[1] * V(beta2) + grad * V(fresh2) * grad;
    V update = state[0] * V(factor) / (square_root(state[1]) * V(root_factor) + V(eps));
    if (decay_after != T(0)) {
      update = update + param * V(decay_after);
    }
    param = measures ? update : param - update * V(rate);
  }
};

// -- NovoGrad -------------------------------------------------------------------------------------------------------
//
//   m <- beta1 m + beta3 g;                       p <- p - lr (m / (c1 d) + weight_decay p)
//   m <- beta1 m + beta3 (g / d + weight_decay p);   p <- p - lr / c1 m          if the decay is in the moment
//
//   d = n / sqrt(c2) + eps

struct NovogradSettings {
  LayerSettings layer;
  bool decay_in_moment, maximum_norm, bias_correction;

  template <class Arguments>
  static NovogradSettings take(Arguments& arguments) {
    return {LayerSettings::take(arguments), arguments.flag(), arguments.flag(), arguments.flag()};
  }

  // The running norm, rounded as it is stored; `measured` is the sum of the gradient's squares, or its maximum.
  AMPLAB_RULE float next_norm(float before, double measured) const {
    const double fresh = 1.0 - layer.beta2;
    const double now = maximum_norm ? measured : sqrt(measured);
    const double past = before < 0.0f ? now : static_cast<double>(before);
    const double mixed = maximum_norm ? past * layer.beta2 + now * fresh
                                      : sqrt(past * past * layer.beta2 + now * now * fresh);
    return static_cast<float>(mixed);
  }
};

template <class T>
struct Novograd {
  using Settings = NovogradSettings;
  static constexpr int kStates = 1;
  T beta1, fresh, decay, denominator, step_size;
  bool decay_in_moment;

  AMPLAB_RULE Novograd(const NovogradSettings& settings, double step, float norm)
      : beta1(static_cast<T>(settings.layer.beta1)),
        fresh(static_cast<T>(settings.layer.beta3)),
        decay(static_cast<T>(settings.layer.weight_decay)),
        decay_in_moment(settings.decay_in_moment) {
    const double first = settings.bias_correction ? settings.layer.correction(step) : 1.0;
    const double second = settings.bias_correction ? settings.layer.root_correction(step) : 1.0;
    const double divisor = static_cast<double>(norm) / second + settings.layer.eps;
    denominator = static_cast<T>(decay_in_moment ? divisor : divisor * first);
    step_size = static_cast<T>(decay_in_moment ? settings.layer.lr / first : settings.layer.lr);
  }

  template <class V>
  AMPLAB_RULE void operator()(V grad, V& param, V* state) const {
    if (decay_in_moment) {
      state[0] = state[0] * V(beta1) + (grad / V(denominator) + param * V(decay)) * V(fresh);
      param = param - state[0] * V(step_size);
    } else {
      state[0] = state[0] * V(beta1) + grad * V(fresh);
      param = param - (state[0] / V(denominator) + param * V(decay)) * V(step_size);
    }
  }
};

}  // namespace amplab
