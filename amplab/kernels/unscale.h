// One element of the unscale operators, and the search for a tensor in a list: the same code on the host and on
// the device, without a torch header, so that each compiler can compile it alone.
//
//   product = x * inv_scale            float, or double if one of them is double
//   replace:     output <- round(product)
//   accumulate:  output <- round(output + product)
//   nothing:     only the product is examined
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define AMPLAB_FUNCTION __device__ __forceinline__
#else
#define AMPLAB_FUNCTION inline
#endif

namespace amplab {

enum class Write { replace, accumulate, nothing };

// Contiguous memory to read and to write; the same memory for the operator in place.
struct Span {
  const void* input;
  void* output;
  int64_t numel;
};

#if defined(__CUDACC__)

using Half = __half;
using BFloat16 = __nv_bfloat16;

AMPLAB_FUNCTION float widen(Half x) { return __half2float(x); }
AMPLAB_FUNCTION float widen(BFloat16 x) { return __bfloat162float(x); }
AMPLAB_FUNCTION void narrow(float x, Half& y) { y = __float2half_rn(x); }
AMPLAB_FUNCTION void narrow(float x, BFloat16& y) { y = __float2bfloat16_rn(x); }

// Intrinsics, because nvcc would fuse product and sum and round once, but the host rounds twice.
AMPLAB_FUNCTION float multiply(float a, float b) { return __fmul_rn(a, b); }
AMPLAB_FUNCTION double multiply(double a, double b) { return __dmul_rn(a, b); }
AMPLAB_FUNCTION float add(float a, float b) { return __fadd_rn(a, b); }
AMPLAB_FUNCTION double add(double a, double b) { return __dadd_rn(a, b); }

#else

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

template <class To, class From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

#if defined(__aarch64__)

inline float widen(Half x) { return bit_cast<__fp16>(x.bits); }
inline void narrow(float x, Half& y) { y.bits = bit_cast<uint16_t>(static_cast<__fp16>(x)); }

#else

// 2^112 moves the exponent from a bias of 15 to one of 127, subnormals included.
inline float widen(Half x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fffu) << 13;
  const uint32_t finite = bit_cast<uint32_t>(bit_cast<float>(magnitude) * 0x1p112f);
  return bit_cast<float>(sign | (magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : finite));
}

// Round to nearest even: in the normal range by integers, below it by the addition of 0.5, whose unit in the last
// place is that of float16's subnormals.
inline void narrow(float x, Half& y) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t rounded;
  if (magnitude > 0x7f800000u) {
    rounded = 0x7e00u | ((magnitude >> 13) & 0x1ffu);  // NaN
  } else if (magnitude >= 0x477ff000u) {
    rounded = 0x7c00u;  // 65520 and above: inf
  } else if (magnitude < 0x38800000u) {
    rounded = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    rounded = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  y.bits = static_cast<uint16_t>(rounded | (bits >> 16 & 0x8000u));
}

#endif

inline float widen(BFloat16 x) { return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

inline void narrow(float x, BFloat16& y) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  y.bits = static_cast<uint16_t>(is_nan ? 0x7fc0u : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

template <class T>
inline T multiply(T a, T b) {
  return a * b;
}
template <class T>
inline T add(T a, T b) {
  return a + b;
}

#endif

AMPLAB_FUNCTION float widen(float x) { return x; }
AMPLAB_FUNCTION double widen(double x) { return x; }
AMPLAB_FUNCTION void narrow(float x, float& y) { y = x; }
AMPLAB_FUNCTION void narrow(float x, double& y) { y = x; }
AMPLAB_FUNCTION void narrow(double x, float& y) { y = static_cast<float>(x); }
AMPLAB_FUNCTION void narrow(double x, double& y) { y = x; }
// As torch rounds a double to 16 bits: through float.
AMPLAB_FUNCTION void narrow(double x, Half& y) { narrow(static_cast<float>(x), y); }
AMPLAB_FUNCTION void narrow(double x, BFloat16& y) { narrow(static_cast<float>(x), y); }

// The difference is 0, or NaN if x is inf or NaN.
template <class T>
AMPLAB_FUNCTION bool is_finite(T x) {
  return x - x == T(0);
}

// The arithmetic's type: float, or double if either side is double.
template <class In, class Out>
struct Arithmetic {
  using type = float;
};
template <class Out>
struct Arithmetic<double, Out> {
  using type = double;
};
template <class In>
struct Arithmetic<In, double> {
  using type = double;
};
template <>
struct Arithmetic<double, double> {
  using type = double;
};

// Writes one element. Returns whether it introduced a non-finite value: a product that is inf or NaN, or an overflow of
// an output that was finite.
template <Write write, class In, class Out, class Math>
AMPLAB_FUNCTION bool unscale_element(In x, Out& output, Math inv_scale) {
  const Math product = multiply(static_cast<Math>(widen(x)), inv_scale);
  if (write == Write::nothing) {
    return !is_finite(product);
  }
  if (write == Write::replace) {
    narrow(product, output);
    return !is_finite(widen(output));
  }
  const Math before = static_cast<Math>(widen(output));
  narrow(add(before, product), output);
  const bool overflow = is_finite(before) & (!is_finite(widen(output)));
  return (!is_finite(product)) | overflow;
}

// The index of the first span whose end is > `position`; `ends` is ascending, `position` < ends[count - 1].
template <class Ends, class Position>
AMPLAB_FUNCTION int find_span(const Ends& ends, int count, Position position) {
  int low = 0;
  int high = count - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (position < ends[middle]) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

}  // namespace amplab
