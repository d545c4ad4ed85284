// One element of Adagrad, Adadelta and RMSprop; as steps.h.
#pragma once

#include "steps.h"

namespace amplab {

// 0 for a negative number; NaN stays.
AMPLAB_RULE float at_least_zero(float x) { return x < 0.0f ? 0.0f : x; }
AMPLAB_RULE double at_least_zero(double x) { return x < 0.0 ? 0.0 : x; }

// -- Adagrad --------------------------------------------------------------------------------------------------------
//
//   g <- g + weight_decay p                                unless decoupled
//   h <- h + g g
//   p <- p - lr' (g / (sqrt(h) + eps))                     + weight_decay p inside, if decoupled
//   lr' = lr / (1 + (step - 1) lr_decay)

struct AdagradSettings {
  double lr, eps, weight_decay, lr_decay;
  bool decoupled;

  template <class Arguments>
  static AdagradSettings take(Arguments& arguments) {
    return {arguments.number(), arguments.number(), arguments.number(), arguments.number(), arguments.flag()};
  }
};

template <class T>
struct Adagrad {
  using Settings = AdagradSettings;
  static constexpr int kStates = 1;
  static constexpr bool kSteps = true;
  T lr, eps, decay_before, decay_after;

  AMPLAB_RULE Adagrad(const AdagradSettings& settings, double step)
      : lr(static_cast<T>(settings.lr / (1.0 + (step - 1.0) * settings.lr_decay))),
        eps(static_cast<T>(settings.eps)),
        decay_before(settings.decoupled ? T(0) : static_cast<T>(settings.weight_decay)),
        decay_after(settings.decoupled ? static_cast<T>(settings.weight_decay) : T(0)) {}

  template <class V>
  AMPLAB_RULE void operator()(V grad, V& param, V* state) const {
    if (decay_before != T(0)) {
      grad = grad + param * V(decay_before);
    }
    state[0] = state[0] + grad * grad;
    V update = grad / (square_root(state[0]) + V(eps));
    if (decay_after != T(0)) {
      update = update + param * V(decay_after);
    }
    param = param - update * V(lr);
  }
};

// -- Adadelta -------------------------------------------------------------------------------------------------------
//
//   g <- g + weight_decay p
//   v <- rho v + (1 - rho) (g g)
//   d  = sqrt(u + eps) / sqrt(v + eps) g
//   u <- rho u + (1 - rho) (d d)
//   p <- p - lr d

struct AdadeltaSettings {
  double lr, rho, eps, weight_decay;

  template <class Arguments>
  static AdadeltaSettings take(Arguments& arguments) {
    return {arguments.number(), arguments.number(), arguments.number(), arguments.number()};
  }
};

template <class T>
struct Adadelta {
  using Settings = AdadeltaSettings;
  static constexpr int kStates = 2;
  static constexpr bool kSteps = true;
  T lr, rho, fresh, eps, decay;

  AMPLAB_RULE Adadelta(const AdadeltaSettings& settings, double /*step*/)
      : lr(static_cast<T>(settings.lr)),
        rho(static_cast<T>(settings.rho)),
        fresh(static_cast<T>(1.0 - settings.rho)),
        eps(static_cast<T>(settings.eps)),
        decay(static_cast<T>(settings.weight_decay)) {}

  template <class V>
  AMPLAB_RULE void operator()(V grad, V& param, V* state) const {
    if (decay != T(0)) {
      grad = grad + param * V(decay);
    }
    state[0] = state[0] * V(rho) + grad * grad * V(fresh);
    const V delta = square_root(state[1] + V(eps)) / square_root(state[0] + V(eps)) * grad;
    state[1] = state[1] * V(rho) + delta * delta * V(fresh);
    param = param - delta * V(lr);
  }
};

// -- RMSprop --------------------------------------------------------------------------------------------------------
//
//   decoupled: p <- p - weight_decay p                     else g <- g + weight_decay p
//   v <- alpha v + (1 - alpha) (g g)
//   a <- a + (1 - alpha) (g - a);  w = max(v - a a, 0)     w = v, if not centered
//   u  = g / (sqrt(w) + eps)                               g / sqrt(w + eps), if eps is under the root
//   b <- momentum b + u;  p <- p - lr b                    b <- momentum b + lr u;  p <- p - b, if it includes lr
//   p <- p - lr u                                          without momentum
//
// The states are v, a and b, as far as they are used.

struct RmspropSettings {
  double lr, alpha, eps, weight_decay, momentum;
  bool decoupled, eps_in_root, lr_in_momentum;

  template <class Arguments>
  static RmspropSettings take(Arguments& arguments) {
    return {arguments.number(), arguments.number(), arguments.number(), arguments.number(),
            arguments.number(), arguments.flag(),   arguments.flag(),   arguments.flag()};
  }
};

template <class T, bool centered, bool with_momentum>
struct AnyRmsprop {
  using Settings = RmspropSettings;
  static constexpr int kStates = 1 + centered + with_momentum;
  static constexpr bool kSteps = true;
  T lr, alpha, fresh, eps, shrink, decay, momentum;
  bool eps_in_root, lr_in_momentum;

  AMPLAB_RULE AnyRmsprop(const RmspropSettings& settings, double /*step*/)
      : lr(static_cast<T>(settings.lr)),
        alpha(static_cast<T>(settings.alpha)),
        fresh(static_cast<T>(1.0 - settings.alpha)),
        eps(static_cast<T>(settings.eps)),
        shrink(settings.decoupled ? static_cast<T>(settings.weight_decay) : T(0)),
        decay(settings.decoupled ? T(0) : static_cast<T>(settings.weight_decay)),
        momentum(static_cast<T>(settings.momentum)),
        eps_in_root(settings.eps_in_root),
        lr_in_momentum(settings.lr_in_momentum) {}

  template <class V>
  AMPLAB_RULE void operator()(V grad, V& param, V* state) const {
    if (shrink != T(0)) {
      param = param - param * V(shrink);
    }
    if (decay != T(0)) {
      grad = grad + param * V(decay);
    }
    state[0] = state[0] * V(alpha) + grad * grad * V(fresh);
    V variance = state[0];
    if constexpr (centered) {
      state[1] = state[1] + (grad - state[1]) * V(fresh);
      variance = at_least_zero(variance - state[1] * state[1]);
    }
    const V root = eps_in_root ? square_root(variance + V(eps)) : square_root(variance) + V(eps);
    V update = grad / root;
    if constexpr (with_momentum) {
      constexpr int kBuffer = kStates - 1;
      if (lr_in_momentum) {
        update = update * V(lr);
      }
      update = state[kBuffer] * V(momentum) + update;
      state[kBuffer] = update;
      param = lr_in_momentum ? param - update : param - update * V(lr);
    } else {
      param = param - update * V(lr);
    }
  }
};

template <class T>
struct Rmsprop : AnyRmsprop<T, false, false> {
  using AnyRmsprop<T, false, false>::AnyRmsprop;
};
template <class T>
struct CenteredRmsprop : AnyRmsprop<T, true, false> {
  using AnyRmsprop<T, true, false>::AnyRmsprop;
};
template <class T>
struct MomentumRmsprop : AnyRmsprop<T, false, true> {
  using AnyRmsprop<T, false, true>::AnyRmsprop;
};
template <class T>
struct CenteredMomentumRmsprop : AnyRmsprop<T, true, true> {
  using AnyRmsprop<T, true, true>::AnyRmsprop;
};

}  // namespace amplab
