// One element of amplab::tensor_stats, and the table row in which it is counted: the same code on the host and on the
// device, without a torch header. The columns are those of tensor_stats.py.
#pragma once

#include "unscale.h"

namespace amplab::statistics {

enum Column : int {
  kAbsmax,    // float64
  kSmallest,  // float64
  kZeros,
  kSubnormals,
  kFlushed,
  kOverflows,
  kInfs,
  kNans,
  kHead,  // the first bin
};

// The bits of a magnitude as an integer, which have the order of the numbers.
template <class Bits>
struct Layout;

template <>
struct Layout<uint32_t> {  // float
  static constexpr int kMantissa = 23;
  static constexpr int kBias = 127;
  static constexpr uint32_t kInfinity = 0x7f800000u;
};

template <>
struct Layout<uint64_t> {  // double
  static constexpr int kMantissa = 52;
  static constexpr int kBias = 1023;
  static constexpr uint64_t kInfinity = 0x7ff0000000000000u;
};

template <class Bits>
constexpr Bits power_of_two(int exponent) {
  return static_cast<Bits>(exponent + Layout<Bits>::kBias) << Layout<Bits>::kMantissa;
}

template <class Bits>
constexpr Bits kSmallestNormalHalf = power_of_two<Bits>(-14);
template <class Bits>
constexpr Bits kLargestFlushed = power_of_two<Bits>(-25);  // rounds to zero, which is even
template <class Bits>
constexpr Bits kSmallestOverflow = power_of_two<Bits>(16) - (Bits{1} << (Layout<Bits>::kMantissa - 11));  // 65520

// floor(log2) of a finite, non-zero magnitude.
template <class Bits>
AMPLAB_FUNCTION int exponent_of(Bits magnitude) {
  const int field = static_cast<int>(magnitude >> Layout<Bits>::kMantissa);
  if (field > 0) {
    return field - Layout<Bits>::kBias;
  }
  int exponent = -Layout<Bits>::kBias - Layout<Bits>::kMantissa;  // subnormal: from the position of its highest bit
  for (Bits rest = magnitude; rest != 0; rest >>= 1) {
    ++exponent;
  }
  return exponent;
}

// The bin of an exponent; the outer bins also count what is beyond them.
AMPLAB_FUNCTION int64_t bin_of(int exponent, int64_t low, int64_t bins) {
  const int64_t place = exponent < low ? 0 : static_cast<int64_t>(exponent) - low;
  return place < bins ? place : bins - 1;
}

// Counts one element with `counter.head(column)` and `counter.bin(bin)`.
template <class Bits, class Counter>
AMPLAB_FUNCTION void count_element(Bits magnitude, int64_t low, int64_t bins, Counter& counter) {
  if (magnitude == 0) {
    counter.head(kZeros);
  } else if (magnitude == Layout<Bits>::kInfinity) {
    counter.head(kInfs);
  } else if (magnitude > Layout<Bits>::kInfinity) {
    counter.head(kNans);
  } else {
    if (magnitude < kSmallestNormalHalf<Bits>) {
      counter.head(kSubnormals);
    }
    if (magnitude <= kLargestFlushed<Bits>) {
      counter.head(kFlushed);
    }
    if (magnitude >= kSmallestOverflow<Bits>) {
      counter.head(kOverflows);
    }
    counter.bin(bin_of(exponent_of(magnitude), low, bins));
  }
}

}  // namespace amplab::statistics
