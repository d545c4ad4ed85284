// One step of the loss scale: the same code on the host and on the device. The rule is in update_scale.py.
#pragma once

#include "unscale.h"

namespace amplab::scale {

struct Constants {
  double growth_factor;
  double backoff_factor;
  int64_t growth_interval;
  int64_t hysteresis;
  double floor;
  double ceiling;
  bool divides;
  bool keeps_finite;
  bool refills_at_growth;
};

// NaN stays NaN, as in torch's clamp.
template <class T>
AMPLAB_FUNCTION T backed_off(T scale, const Constants& rule) {
  const double exact = static_cast<double>(scale);
  const T result = static_cast<T>(rule.divides ? exact / rule.backoff_factor : multiply(exact, rule.backoff_factor));
  const T floor = static_cast<T>(rule.floor);
  return result < floor ? floor : result;
}

template <class T>
AMPLAB_FUNCTION T grown(T scale, const Constants& rule) {
  const T result = static_cast<T>(multiply(static_cast<double>(scale), rule.growth_factor));
  const T ceiling = static_cast<T>(rule.ceiling);
  const T bounded = result > ceiling ? ceiling : result;
  return rule.keeps_finite && !is_finite(bounded) ? scale : bounded;
}

// If `hysteresis_tracker` is null, every overflow backs off.
template <class T>
AMPLAB_FUNCTION void update(T& scale, int32_t& growth_tracker, int32_t* hysteresis_tracker, float found_inf,
                            const Constants& rule) {
  bool refills = false;
  if (found_inf != 0.0f) {
    growth_tracker = 0;
    const bool waits = hysteresis_tracker != nullptr && --*hysteresis_tracker > 0;
    scale = waits ? scale : backed_off(scale, rule);
  } else {
    const bool grows = static_cast<int64_t>(growth_tracker) + 1 >= rule.growth_interval;
    growth_tracker = grows ? 0 : growth_tracker + 1;
    scale = grows ? grown(scale, rule) : scale;
    refills = grows || !rule.refills_at_growth;
  }
  if (refills && hysteresis_tracker != nullptr) {
    *hysteresis_tracker = static_cast<int32_t>(rule.hysteresis);
  }
}

}  // namespace amplab::scale
