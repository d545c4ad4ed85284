// The widest vector of floats of the CPU, with the operators of a float and the same bits, so that every rule of
// steps.h runs on it without change. Without one of the two instruction sets below, a vector is one float.
#pragma once

#include "steps.h"

#if defined(__GNUC__) && defined(__AVX512F__) && defined(__AVX512BW__)
#define AMPLAB_LANES 16
#elif defined(__GNUC__) && defined(__AVX2__) && defined(__F16C__)
#define AMPLAB_LANES 8
#else
#define AMPLAB_LANES 1
#endif

#if AMPLAB_LANES > 1
#include <immintrin.h>
#endif

namespace amplab {

constexpr int64_t kStepLanes = AMPLAB_LANES;

#if AMPLAB_LANES == 1

using Lanes = float;

#else

#if AMPLAB_LANES == 16
using FloatLanes = __m512;
AMPLAB_RULE FloatLanes broadcast(float x) { return _mm512_set1_ps(x); }
AMPLAB_RULE FloatLanes lanes_from(const float* x) { return _mm512_loadu_ps(x); }
AMPLAB_RULE FloatLanes lanes_from(const Half* x) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
}
AMPLAB_RULE FloatLanes lanes_from(const BFloat16* x) {
  const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}
AMPLAB_RULE void lanes_to(float* y, FloatLanes x) { _mm512_storeu_ps(y, x); }
AMPLAB_RULE void lanes_to(Half* y, FloatLanes x) {
  const __m256i rounded = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(y), rounded);
}
AMPLAB_RULE void lanes_to(BFloat16* y, FloatLanes x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i rounded = _mm512_srli_epi32(_mm512_mask_mov_epi32(up, is_nan, _mm512_set1_epi32(0x7fc00000)), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(y), _mm512_cvtepi32_epi16(rounded));
}
AMPLAB_RULE FloatLanes root_of(FloatLanes x) { return _mm512_sqrt_ps(x); }
AMPLAB_RULE FloatLanes not_below(FloatLanes limit, FloatLanes x) { return _mm512_max_ps(limit, x); }  // NaN stays
#else
using FloatLanes = __m256;
AMPLAB_RULE FloatLanes broadcast(float x) { return _mm256_set1_ps(x); }
AMPLAB_RULE FloatLanes lanes_from(const float* x) { return _mm256_loadu_ps(x); }
AMPLAB_RULE FloatLanes lanes_from(const Half* x) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
}
AMPLAB_RULE FloatLanes lanes_from(const BFloat16* x) {
  const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}
AMPLAB_RULE void lanes_to(float* y, FloatLanes x) { _mm256_storeu_ps(y, x); }
AMPLAB_RULE void lanes_to(Half* y, FloatLanes x) {
  const __m128i rounded = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(y), rounded);
}
AMPLAB_RULE void lanes_to(BFloat16* y, FloatLanes x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i rounded = _mm256_srli_epi32(_mm256_blendv_epi8(up, _mm256_set1_epi32(0x7fc00000), is_nan), 16);
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(y), packed);
}
AMPLAB_RULE FloatLanes root_of(FloatLanes x) { return _mm256_sqrt_ps(x); }
AMPLAB_RULE FloatLanes not_below(FloatLanes limit, FloatLanes x) { return _mm256_max_ps(limit, x); }  // NaN stays
#endif

struct Lanes {
  FloatLanes at;

  Lanes() = default;
  AMPLAB_RULE Lanes(FloatLanes lanes) : at(lanes) {}
  AMPLAB_RULE explicit Lanes(float x) : at(broadcast(x)) {}

  friend AMPLAB_RULE Lanes operator+(Lanes a, Lanes b) { return a.at + b.at; }
  friend AMPLAB_RULE Lanes operator-(Lanes a, Lanes b) { return a.at - b.at; }
  friend AMPLAB_RULE Lanes operator*(Lanes a, Lanes b) { return a.at * b.at; }
  friend AMPLAB_RULE Lanes operator/(Lanes a, Lanes b) { return a.at / b.at; }
  friend AMPLAB_RULE Lanes square_root(Lanes x) { return root_of(x.at); }
  friend AMPLAB_RULE Lanes at_least_zero(Lanes x) { return not_below(broadcast(0.0f), x.at); }
};

#endif

// The sum of the squares of floats, in double, a vector at a time and the last few one by one.
class SquareSum {
 public:
  AMPLAB_RULE void add(double x) { alone_ += x * x; }

#if AMPLAB_LANES == 16
  AMPLAB_RULE void add(Lanes x) {
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x.at));
    const __m512d high = _mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x.at), 1)));
    low_ = low_ + low * low;
    high_ = high_ + high * high;
  }
#elif AMPLAB_LANES == 8
  AMPLAB_RULE void add(Lanes x) {
    const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x.at));
    const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(x.at, 1));
    low_ = low_ + low * low;
    high_ = high_ + high * high;
  }
#endif

  double total() const {
    double sum = alone_;
#if AMPLAB_LANES > 1
    double each[AMPLAB_LANES / 2];
    const auto both = low_ + high_;
    std::memcpy(each, &both, sizeof each);
    for (const double one : each) {
      sum += one;
    }
#endif
    return sum;
  }

 private:
  double alone_ = 0.0;
#if AMPLAB_LANES == 16
  __m512d low_ = _mm512_setzero_pd(), high_ = _mm512_setzero_pd();
#elif AMPLAB_LANES == 8
  __m256d low_ = _mm256_setzero_pd(), high_ = _mm256_setzero_pd();
#endif
};

// `numel` elements of any dtype into floats or doubles, and back: rounded once, to nearest even.

template <class In, class T>
void widen_all(const void* input, T* y, int64_t numel) {
  const In* x = static_cast<const In*>(input);
  int64_t i = 0;
#if AMPLAB_LANES > 1
  if constexpr (sizeof(T) == sizeof(float) && sizeof(In) <= sizeof(float)) {
    for (; i + kStepLanes <= numel; i += kStepLanes) {
      lanes_to(y + i, lanes_from(x + i));
    }
  }
#endif
  for (; i < numel; ++i) {
    y[i] = static_cast<T>(widen(x[i]));
  }
}

template <class T, class Out>
void narrow_all(const T* x, void* output, int64_t numel) {
  Out* y = static_cast<Out*>(output);
  int64_t i = 0;
#if AMPLAB_LANES > 1
  if constexpr (sizeof(T) == sizeof(float) && sizeof(Out) <= sizeof(float)) {
    for (; i + kStepLanes <= numel; i += kStepLanes) {
      lanes_to(y + i, lanes_from(x + i));
    }
  }
#endif
  for (; i < numel; ++i) {
    narrow(x[i], y[i]);
  }
}

}  // namespace amplab
