// The inner loops of the CPU kernels over contiguous memory, with vector instructions.
//
// The operations are those of unscale_element (unscale.h), so the bits are the same. Norms are computed while the
// output is still in the first-level cache: squares are summed in double, in which the square of a float is exact.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#if defined(__AVX2__) && defined(__F16C__)
#include <immintrin.h>
#endif

#include "unscale.h"

namespace amplab {

// Prefetches memory that will be read soon, one cache line after the other.
inline void prefetch(const void* memory, size_t bytes) {
#if defined(__GNUC__)
  constexpr size_t kLine = 64;
  for (size_t at = 0; at < bytes; at += kLine) {
    __builtin_prefetch(static_cast<const char*>(memory) + at);
  }
#else
  static_cast<void>(memory);
  static_cast<void>(bytes);
#endif
}

#if defined(__AVX2__) && defined(__F16C__)

inline constexpr int64_t kLanes = 8;

// Eight elements at a time; the operations of unscale_element, so the same bits.
inline __m256 load(const float* x) { return _mm256_loadu_ps(x); }
inline __m256 load(const Half* x) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))); }
inline __m256 load(const BFloat16* x) {
  const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}

inline void store(float* y, __m256 value) { _mm256_storeu_ps(y, value); }
inline void store(Half* y, __m256 value) {
  const __m128i rounded = _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(y), rounded);
}
inline void store(BFloat16* y, __m256 value) {
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
  const __m256i rounded = _mm256_srli_epi32(_mm256_blendv_epi8(up, _mm256_set1_epi32(0x7fc00000), is_nan), 16);
  const __m128i low = _mm256_castsi256_si128(rounded);
  const __m128i high = _mm256_extracti128_si256(rounded, 1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(y), _mm_packus_epi32(low, high));
}

// The smallest magnitude that rounds to inf: halfway from the largest number to the next power of 2.
inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
template <class Out>
inline constexpr float kOverflow = kInfinity;
template <>
inline constexpr float kOverflow<Half> = 65520.0f;
template <>
inline constexpr float kOverflow<BFloat16> = 0x1.ffp127f;

// All ones in the lanes whose magnitude is NaN or not below `limit`.
inline __m256 reaches(__m256 x, float limit) {
  const __m256 magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
  return _mm256_cmp_ps(magnitude, _mm256_set1_ps(limit), _CMP_NLT_UQ);
}

template <Write write, class In, class Out>
inline __m256 unscale_lanes(const In* x, Out* y, __m256 inv_scale) {
  const __m256 product = _mm256_mul_ps(load(x), inv_scale);
  if constexpr (write == Write::replace) {
    store(y, product);
    return reaches(product, kOverflow<Out>);
  } else {
    const __m256 before = load(y);
    const __m256 sum = _mm256_add_ps(before, product);
    store(y, sum);
    const __m256 overflow = _mm256_andnot_ps(reaches(before, kInfinity), reaches(sum, kOverflow<Out>));
    return _mm256_or_ps(reaches(product, kInfinity), overflow);
  }
}

// Also prefetches the memory at `ahead`, if any, line by line. An invalid address has no effect.
template <Write write, class In, class Out>
bool unscale_floats(const In* x, Out* y, int64_t numel, float inv_scale, const char* ahead) {
  constexpr int64_t kGroup = 4 * kLanes;
  const __m256 inverse = _mm256_set1_ps(inv_scale);
  __m256 bad = _mm256_setzero_ps();
  int64_t i = 0;
  for (; i + kGroup <= numel; i += kGroup) {
    if (ahead != nullptr) {
      prefetch(ahead + i * sizeof(In), kGroup * sizeof(In));
    }
#pragma GCC unroll 4
    for (int64_t at = i; at < i + kGroup; at += kLanes) {
      bad = _mm256_or_ps(bad, unscale_lanes<write>(x + at, y + at, inverse));
    }
  }
  for (; i + kLanes <= numel; i += kLanes) {
    bad = _mm256_or_ps(bad, unscale_lanes<write>(x + i, y + i, inverse));
  }
  if (i < numel) {  // the rest, padded with zeros, which are finite
    In x_rest[kLanes] = {};
    Out y_rest[kLanes] = {};
    std::memcpy(x_rest, x + i, (numel - i) * sizeof(In));
    std::memcpy(y_rest, y + i, (numel - i) * sizeof(Out));
    bad = _mm256_or_ps(bad, unscale_lanes<write>(x_rest, y_rest, inverse));
    std::memcpy(y + i, y_rest, (numel - i) * sizeof(Out));
  }
  return _mm256_movemask_ps(bad) != 0;
}

// As unscale_floats<replace> for bfloat16 to bfloat16, which is bound by arithmetic and not by memory. Groups with
// values that the fast path gets wrong take the slow path.
inline bool unscale_bfloat16s(const BFloat16* x, BFloat16* y, int64_t numel, float inv_scale, const char* ahead) {
  __m256 bad = _mm256_setzero_ps();
  int64_t i = 0;
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
  // The processor's rounding, which treats subnormal numbers as zero.
  constexpr int64_t kGroup = 32;
  constexpr int kSpecial = 0x01 | 0x08 | 0x10 | 0x20 | 0x80;  // quiet NaN, +inf, -inf, subnormal, signaling NaN
  const __m512 inverse = _mm512_set1_ps(inv_scale);
  __mmask32 overflow = 0;
  const auto product = [&](int64_t at) {
    const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + at)));
    return _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)), inverse);
  };
  for (; i + kGroup <= numel; i += kGroup) {
    if (ahead != nullptr) {
      prefetch(ahead + i * sizeof(BFloat16), kGroup * sizeof(BFloat16));
    }
    const __m512 low = product(i);
    const __m512 high = product(i + kGroup / 2);
    const bool special = (_mm512_fpclass_ps_mask(low, kSpecial) | _mm512_fpclass_ps_mask(high, kSpecial)) != 0;
    if (__builtin_expect(special, 0)) {
      for (int64_t at = i; at < i + kGroup; at += kLanes) {
        bad = _mm256_or_ps(bad, unscale_lanes<Write::replace>(x + at, y + at, _mm512_castps512_ps256(inverse)));
      }
      continue;
    }
    const __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh(high, low);
    const __m512i magnitude = _mm512_and_si512(rounded, _mm512_set1_epi16(0x7fff));
    overflow |= _mm512_cmpge_epu16_mask(magnitude, _mm512_set1_epi16(0x7f80));
    _mm512_storeu_si512(y + i, rounded);
  }
  const bool found = overflow != 0;
#else
  // Every second number stays in the upper 16 of 32 bits, so that nothing is widened or packed. For a NaN the addition
  // that rounds would carry into the sign.
  constexpr int64_t kGroup = 16;
  const __m256 inverse = _mm256_set1_ps(inv_scale);
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  const auto round = [](__m256 value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  };
  for (; i + kGroup <= numel; i += kGroup) {
    if (ahead != nullptr) {
      prefetch(ahead + i * sizeof(BFloat16), kGroup * sizeof(BFloat16));
    }
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
    const __m256 even = _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(bits, 16)), inverse);
    const __m256 odd = _mm256_mul_ps(_mm256_castsi256_ps(_mm256_and_si256(bits, upper)), inverse);
    const __m256 special = _mm256_or_ps(reaches(even, kOverflow<BFloat16>), reaches(odd, kOverflow<BFloat16>));
    if (__builtin_expect(_mm256_movemask_ps(special) != 0, 0)) {
      for (int64_t at = i; at < i + kGroup; at += kLanes) {
        bad = _mm256_or_ps(bad, unscale_lanes<Write::replace>(x + at, y + at, inverse));
      }
      continue;
    }
    const __m256i low = _mm256_srli_epi32(round(even), 16);
    const __m256i high = _mm256_and_si256(round(odd), upper);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(y + i), _mm256_or_si256(low, high));
  }
  const bool found = false;
#endif
  const bool found_in_rest = unscale_floats<Write::replace>(x + i, y + i, numel - i, inv_scale, ahead);
  return found | found_in_rest | (_mm256_movemask_ps(bad) != 0);
}

// As unscale_floats<replace>, with stores that bypass the caches and need 32-byte alignment.
template <class In>
bool stream_floats(const In* x, float* y, int64_t numel, float inv_scale) {
  const __m256 inverse = _mm256_set1_ps(inv_scale);
  const int64_t misaligned = static_cast<int64_t>(reinterpret_cast<uintptr_t>(y) / sizeof(float)) % kLanes;
  int64_t i = std::min(numel, (kLanes - misaligned) % kLanes);
  bool found = unscale_floats<Write::replace>(x, y, i, inv_scale, nullptr);
  __m256 bad = _mm256_setzero_ps();
  for (; i + kLanes <= numel; i += kLanes) {
    const __m256 product = _mm256_mul_ps(load(x + i), inverse);
    _mm256_stream_ps(y + i, product);
    bad = _mm256_or_ps(bad, reaches(product, kInfinity));
  }
  _mm_sfence();
  found |= unscale_floats<Write::replace>(x + i, y + i, numel - i, inv_scale, nullptr);
  return found | (_mm256_movemask_ps(bad) != 0);
}

// Sums of squares, one per lane. A square is exact in double, so fusing it with the sum changes nothing.
struct Squares {
  __m256d low = _mm256_setzero_pd();
  __m256d high = _mm256_setzero_pd();

  void add(__m256 x) { add(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)); }
  void add(__m128 first, __m128 second) {
    low = add_square(_mm256_cvtps_pd(first), low);
    high = add_square(_mm256_cvtps_pd(second), high);
  }
  static __m256d add_square(__m256d x, __m256d sum) {
#if defined(__FMA__)
    return _mm256_fmadd_pd(x, x, sum);
#else
    return _mm256_add_pd(_mm256_mul_pd(x, x), sum);
#endif
  }
  void add_up(__m256 x) {
    low = _mm256_add_pd(low, _mm256_cvtps_pd(_mm256_castps256_ps128(x)));
    high = _mm256_add_pd(high, _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)));
  }
  double sum() const {
    alignas(32) double lanes[4];
    _mm256_store_pd(lanes, _mm256_add_pd(low, high));
    return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
  }
};

inline void add_lanes(Squares& into, const float* x) { into.add(_mm_loadu_ps(x), _mm_loadu_ps(x + 4)); }
template <class T>
void add_lanes(Squares& into, const T* x) {
  into.add(load(x));
}

// Calls take(address, which of two) for all lanes, the rest padded with zeros.
template <class T, class Take>
inline void for_each_lanes(const T* x, int64_t numel, const Take& take) {
  int64_t i = 0;
  for (; i + 2 * kLanes <= numel; i += 2 * kLanes) {
    take(x + i, 0);
    take(x + i + kLanes, 1);
  }
  for (; i < numel; i += kLanes) {
    T rest[kLanes] = {};
    std::memcpy(rest, x + i, std::min(kLanes, numel - i) * sizeof(T));
    take(rest, 0);
  }
}

// The sum of squares of the output.
template <class T>
double squares_of(const T* x, int64_t numel) {
  Squares sums[2];
  for_each_lanes(x, numel, [&](const T* at, int which) { add_lanes(sums[which], at); });
  return sums[0].sum() + sums[1].sum();
}

// Returns whether a product is not finite; where `squares` is true, adds the sum of their squares to `sum`.
template <bool squares, class In>
bool measure_exactly(const In* x, int64_t numel, float inv_scale, double* sum) {
  const __m256 inverse = _mm256_set1_ps(inv_scale);
  __m256 bad = _mm256_setzero_ps();
  Squares sums[2];
  for_each_lanes(x, numel, [&](const In* at, int which) {
    const __m256 product = _mm256_mul_ps(load(at), inverse);
    bad = _mm256_or_ps(bad, reaches(product, kInfinity));
    if constexpr (squares) {
      sums[which].add(product);
    }
  });
  if constexpr (squares) {
    *sum += sums[0].sum() + sums[1].sum();
  }
  return _mm256_movemask_ps(bad) != 0;
}

// The same with a third of the work: the squares of 256 numbers are added in floats, 8 in each lane of 4 sums. If the
// sum is not finite, or so small that squares may have underflowed, the numbers are summed again in double.
template <bool squares, class In>
bool measure_floats(const In* x, int64_t numel, float inv_scale, double* sum) {
  constexpr int64_t kSums = 4;
  constexpr int64_t kGroup = 8 * kSums * kLanes;
  constexpr double kSmallest = 0x1p-80;
  const __m256 inverse = _mm256_set1_ps(inv_scale);
  bool bad = false;
  int64_t i = 0;
  for (; squares && i + kGroup <= numel; i += kGroup) {
    __m256 sums[kSums] = {};
#pragma GCC unroll 8
    for (int64_t at = 0; at < kGroup; at += kSums * kLanes) {
#pragma GCC unroll 4
      for (int64_t each = 0; each < kSums; ++each) {
        const __m256 product = _mm256_mul_ps(load(x + i + at + each * kLanes), inverse);
        sums[each] = _mm256_add_ps(sums[each], _mm256_mul_ps(product, product));
      }
    }
    Squares total;
    total.add_up(_mm256_add_ps(_mm256_add_ps(sums[0], sums[1]), _mm256_add_ps(sums[2], sums[3])));
    const double here = total.sum();
    if (here > kSmallest && here < std::numeric_limits<double>::infinity()) {
      *sum += here;
    } else {
      bad |= measure_exactly<squares>(x + i, kGroup, inv_scale, sum);
    }
  }
  return measure_exactly<squares>(x + i, numel - i, inv_scale, sum) | bad;
}

#else

template <bool squares, class In>
bool measure_floats(const In* x, int64_t numel, float inv_scale, double* sum) {
  bool bad = false;
  double sums[8] = {};  // independent, so that the compiler can vectorize them
  for (int64_t i = 0; i < numel; ++i) {
    const float product = widen(x[i]) * inv_scale;
    bad |= !is_finite(product);
    sums[i % 8] += static_cast<double>(product) * product;
  }
  for (const double each : sums) {
    *sum += each;
  }
  return bad;
}

template <class T>
double squares_of(const T* x, int64_t numel) {
  double sum = 0.0;
  measure_floats<true>(x, numel, 1.0f, &sum);
  return sum;
}

template <Write write, class In, class Out>
bool unscale_floats(const In* x, Out* y, int64_t numel, float inv_scale, const char* /*ahead*/) {
  bool bad = false;
  for (int64_t i = 0; i < numel; ++i) {
    bad |= unscale_element<write>(x[i], y[i], inv_scale);
  }
  return bad;
}

inline bool unscale_bfloat16s(const BFloat16* x, BFloat16* y, int64_t numel, float inv_scale, const char* ahead) {
  return unscale_floats<Write::replace>(x, y, numel, inv_scale, ahead);
}

template <class In>
bool stream_floats(const In* x, float* y, int64_t numel, float inv_scale) {
  return unscale_floats<Write::replace>(x, y, numel, inv_scale, nullptr);
}

#endif

// For float64, which is rare enough to process one element at a time.
template <Write write, class In, class Out>
bool unscale_doubles(const In* x, Out* y, int64_t numel, double inv_scale) {
  bool bad = false;
  for (int64_t i = 0; i < numel; ++i) {
    bad |= unscale_element<write>(x[i], y[i], inv_scale);
  }
  return bad;
}

inline double squares_of(const double* x, int64_t numel) {
  double sum = 0.0;
  for (int64_t i = 0; i < numel; ++i) {
    sum += x[i] * x[i];
  }
  return sum;
}

inline bool measure_doubles(const double* x, int64_t numel, double inv_scale, double* sum) {
  bool bad = false;
  for (int64_t i = 0; i < numel; ++i) {
    const double product = x[i] * inv_scale;
    bad |= !is_finite(product);
    *sum += product * product;
  }
  return bad;
}

}  // namespace amplab
