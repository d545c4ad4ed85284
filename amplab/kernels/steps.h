// One element of each optimizer's step: the same code on the host, where `V` is a vector of floats, and on the device,
// where it is one float. No torch header is included. How a rule becomes an operator is in step_driver.h.
//
// Every operation is rounded separately (-ffp-contract=off, --fmad=false), so every device gives the bits of the
// reference. What depends only on the step count is computed once per tensor, in double.
#pragma once

#include <cmath>

#include "unscale.h"

#if defined(__CUDACC__)
#define AMPLAB_RULE __device__ __forceinline__
#elif defined(__GNUC__)
#define AMPLAB_RULE inline __attribute__((always_inline))
#else
#define AMPLAB_RULE inline
#endif

namespace amplab {

#if defined(__CUDACC__)
AMPLAB_RULE float square_root(float x) { return __fsqrt_rn(x); }
AMPLAB_RULE double square_root(double x) { return __dsqrt_rn(x); }
#else
AMPLAB_RULE float square_root(float x) { return std::sqrt(x); }
AMPLAB_RULE double square_root(double x) { return std::sqrt(x); }
#endif

// -- SGD ------------------------------------------------------------------------------------------------------------
//
//   g <- g + weight_decay p                            unless it comes after the momentum
//   b <- first ? g : momentum b + (1 - dampening) g
//   d <- nesterov ? g + momentum b : b                 g, without momentum
//   p <- p - lr d                                      d + weight_decay p, if the decay comes after

struct SgdSettings {
  double lr, momentum, dampening, weight_decay;
  bool nesterov, wd_after_momentum, first;

  template <class Arguments>
  static SgdSettings take(Arguments& arguments) {
    return {arguments.number(), arguments.number(), arguments.number(), arguments.number(),
            arguments.flag(),   arguments.flag(),   arguments.flag()};
  }
};

// Without momentum, and so without state.
template <class T>
struct PlainSgd {
  using Settings = SgdSettings;
  static constexpr int kStates = 0;
  static constexpr bool kSteps = false;
  T lr, weight_decay;

  AMPLAB_RULE PlainSgd(const SgdSettings& settings, double /*step*/)
      : lr(static_cast<T>(settings.lr)), weight_decay(static_cast<T>(settings.weight_decay)) {}

  template <class V>
  AMPLAB_RULE void operator()(V grad, V& param, V* /*state*/) const {
    if (weight_decay != T(0)) {
      grad = grad + param * V(weight_decay);
    }
    param = param - grad * V(lr);
  }
};

template <class T>
struct MomentumSgd {
  using Settings = SgdSettings;
  static constexpr int kStates = 1;
  static constexpr bool kSteps = false;
  T lr, momentum, fresh, decay_before, decay_after;
  bool nesterov, first;

  AMPLAB_RULE MomentumSgd(const SgdSettings& settings, double /*step*/)
      : lr(static_cast<T>(settings.lr)),
        momentum(static_cast<T>(settings.momentum)),
        fresh(static_cast<T>(1.0 - settings.dampening)),
        decay_before(settings.wd_after_momentum ? T(0) : static_cast<T>(settings.weight_decay)),
        decay_after(settings.wd_after_momentum ? static_cast<T>(settings.weight_decay) : T(0)),
        nesterov(settings.nesterov),
        first(settings.first) {}

  template <class V>
  AMPLAB_RULE void operator()(V grad, V& param, V* state) const {
    if (decay_before != T(0)) {
      grad = grad + param * V(decay_before);
    }
    state[0] = first ? grad : state[0] * V(momentum) + grad * V(fresh);
    grad = nesterov ? grad + state[0] * V(momentum) : state[0];
    if (decay_after != T(0)) {
      grad = grad + param * V(decay_after);
    }
    param = param - grad * V(lr);
  }
};

// -- Adam and AdamW -------------------------------------------------------------------------------------------------
//
//   decoupled: p <- p (1 - lr weight_decay)            else g <- g + weight_decay p
//   m <- beta1 m + (1 - beta1) g
//   v <- beta2 v + ((1 - beta2) g) g
//   p <- p - (lr / c1) m / (sqrt(v) / sqrt(c2) + eps)  c = 1 - beta^step, or 1 without bias correction
//                           sqrt(v + eps) / sqrt(c2)   if eps is under the root

struct AdamSettings {
  double lr, beta1, beta2, eps, weight_decay;
  bool decoupled, bias_correction, eps_inside_sqrt;

  template <class Arguments>
  static AdamSettings take(Arguments& arguments) {
    return {arguments.number(), arguments.number(), arguments.number(), arguments.number(),
            arguments.number(), arguments.flag(),   arguments.flag(),   arguments.flag()};
  }
};

template <class T>
struct Adam {
  using Settings = AdamSettings;
  static constexpr int kStates = 2;
  static constexpr bool kSteps = true;
  T beta1, fresh1, beta2, fresh2, step_size, root_factor, eps, shrink, decay;
  bool eps_inside_sqrt;

  AMPLAB_RULE Adam(const AdamSettings& settings, double step)
      : beta1(static_cast<T>(settings.beta1)),
        fresh1(static_cast<T>(1.0 - settings.beta1)),
        beta2(static_cast<T>(settings.beta2)),
        fresh2(static_cast<T>(1.0 - settings.beta2)),
        step_size(static_cast<T>(settings.lr)),
        root_factor(T(1)),
        eps(static_cast<T>(settings.eps)),
        shrink(settings.decoupled ? static_cast<T>(1.0 - settings.lr * settings.weight_decay) : T(1)),
        decay(settings.decoupled ? T(0) : static_cast<T>(settings.weight_decay)),
        eps_inside_sqrt(settings.eps_inside_sqrt) {
    if (settings.bias_correction) {
      step_size = static_cast<T>(settings.lr / (1.0 - pow(settings.beta1, step)));
      root_factor = static_cast<T>(1.0 / sqrt(1.0 - pow(settings.beta2, step)));
    }
  }

  template <class V>
  AMPLAB_RULE void operator()(V grad, V& param, V* state) const {
    if (decay != T(0)) {
      grad = grad + param * V(decay);
    }
    state[0] = state[0] * V(beta1) + grad * V(fresh1);
    state[1] = state[1] * V(beta2) + grad * V(fresh2) * grad;
    const V denominator = eps_inside_sqrt ? square_root(state[1] + V(eps)) * V(root_factor)
                                          : square_root(state[1]) * V(root_factor) + V(eps);
    param = param * V(shrink) - state[0] * V(step_size) / denominator;
  }
};

}  // namespace amplab
