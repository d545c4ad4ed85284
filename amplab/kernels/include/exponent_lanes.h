// Exponents of many floats at once, for AVX2 and AVX-512: a histogram without a table in memory.
//
// The exponents of 64 (32) elements are packed into the bytes of one register. A table look-up turns each byte into one
// set bit of 8, its exponent; carry-save adders count the bits of all bytes in parallel (Harley and Seal), and the
// counters are read once per block. Counts are not stored and loaded again, which makes a table in memory slow.
#pragma once

#if defined(__AVX2__) && defined(__F16C__)
#define AMPLAB_EXPONENT_LANES 1

#include <immintrin.h>

#define AMPLAB_INLINED_BODY __attribute__((always_inline))
#define AMPLAB_INLINED AMPLAB_INLINED_BODY inline

#include "unscale.h"

namespace amplab::statistics {

#if defined(__AVX512BW__) && defined(__AVX512F__)

using Lanes = __m512i;
constexpr int kLanes = 16;

inline Lanes load_bits(const float* x) { return _mm512_loadu_si512(x); }
inline Lanes load_bits(const Half* x) {
  return _mm512_castps_si512(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))));
}
inline Lanes load_bits(const BFloat16* x) {
  return _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))), 16);
}
inline Lanes load_bytes(const uint8_t* x) { return _mm512_load_si512(x); }
inline void store_bytes(uint8_t* x, Lanes bytes) { _mm512_store_si512(x, bytes); }

inline Lanes zero_lanes() { return _mm512_setzero_si512(); }
inline Lanes all_lanes(uint32_t value) { return _mm512_set1_epi32(static_cast<int>(value)); }
inline Lanes all_bytes(int value) { return _mm512_set1_epi8(static_cast<char>(value)); }
inline Lanes twice(Lanes a) { return _mm512_add_epi32(a, a); }
inline Lanes minus(Lanes a, Lanes b) { return _mm512_sub_epi32(a, b); }
inline Lanes larger(Lanes a, Lanes b) { return _mm512_max_epu32(a, b); }
inline Lanes smaller(Lanes a, Lanes b) { return _mm512_min_epu32(a, b); }
inline uint32_t largest(Lanes a) { return _mm512_reduce_max_epu32(a); }
inline uint32_t smallest(Lanes a) { return _mm512_reduce_min_epu32(a); }
inline Lanes zero_from(Lanes a, Lanes limit) { return _mm512_maskz_mov_epi32(_mm512_cmplt_epu32_mask(a, limit), a); }
inline int count_from(Lanes a, Lanes limit) {
  return __builtin_popcount(_mm512_cmpge_epu32_mask(a, limit));
}

// The highest bytes of four registers' lanes.
inline Lanes pack_tops(Lanes a, Lanes b, Lanes c, Lanes d) {
  const Lanes low = _mm512_ternarylogic_epi32(_mm512_srli_epi32(a, 24), _mm512_srli_epi32(b, 16), all_lanes(0xff00), 0xF8);
  const Lanes high = _mm512_ternarylogic_epi32(_mm512_srli_epi32(c, 8), d, all_lanes(0xff000000u), 0xD8);
  return _mm512_ternarylogic_epi32(low, high, all_lanes(0xffff0000u), 0xF8);
}

inline Lanes eight_bits(uint64_t low, uint64_t high) {
  return _mm512_broadcast_i32x4(_mm_set_epi64x(static_cast<int64_t>(high), static_cast<int64_t>(low)));
}
inline Lanes look_up(Lanes table, Lanes index) { return _mm512_shuffle_epi8(table, index); }
inline Lanes bytes_above(Lanes bytes, Lanes base) {
  return _mm512_adds_epu8(_mm512_sub_epi8(bytes, base), all_bytes(0x70));
}
inline uint64_t bits_of_nonzero_below(Lanes bytes, int limit) {
  return _mm512_cmplt_epu8_mask(_mm512_sub_epi8(bytes, all_bytes(1)), all_bytes(limit - 1));
}
inline Lanes either(Lanes a, Lanes b) { return _mm512_xor_si512(a, b); }
inline Lanes both(Lanes a, Lanes b) { return _mm512_and_si512(a, b); }
inline Lanes sum_of_three(Lanes a, Lanes b, Lanes c) { return _mm512_ternarylogic_epi32(a, b, c, 0x96); }
inline Lanes carry_of_three(Lanes a, Lanes b, Lanes c) { return _mm512_ternarylogic_epi32(a, b, c, 0xE8); }
inline int count_bits(Lanes bytes, int bit) {
  return static_cast<int>(__builtin_popcountll(_mm512_test_epi8_mask(bytes, all_bytes(1 << bit))));
}

#else

using Lanes = __m256i;
constexpr int kLanes = 8;

inline Lanes load_bits(const float* x) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)); }
inline Lanes load_bits(const Half* x) {
  return _mm256_castps_si256(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))));
}
inline Lanes load_bits(const BFloat16* x) {
  return _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))), 16);
}
inline Lanes load_bytes(const uint8_t* x) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(x)); }
inline void store_bytes(uint8_t* x, Lanes bytes) { _mm256_store_si256(reinterpret_cast<__m256i*>(x), bytes); }

inline Lanes zero_lanes() { return _mm256_setzero_si256(); }
inline Lanes all_lanes(uint32_t value) { return _mm256_set1_epi32(static_cast<int>(value)); }
inline Lanes all_bytes(int value) { return _mm256_set1_epi8(static_cast<char>(value)); }
inline Lanes twice(Lanes a) { return _mm256_add_epi32(a, a); }
inline Lanes minus(Lanes a, Lanes b) { return _mm256_sub_epi32(a, b); }
inline Lanes larger(Lanes a, Lanes b) { return _mm256_max_epu32(a, b); }
inline Lanes smaller(Lanes a, Lanes b) { return _mm256_min_epu32(a, b); }
inline uint32_t largest(Lanes a) {
  alignas(32) uint32_t each[kLanes];
  _mm256_store_si256(reinterpret_cast<__m256i*>(each), a);
  uint32_t result = each[0];
  for (const uint32_t value : each) {
    result = value > result ? value : result;
  }
  return result;
}
inline uint32_t smallest(Lanes a) { return ~largest(_mm256_xor_si256(a, all_lanes(0xffffffffu))); }
inline Lanes at_least(Lanes a, Lanes limit) { return _mm256_cmpeq_epi32(_mm256_max_epu32(a, limit), a); }
inline Lanes zero_from(Lanes a, Lanes limit) { return _mm256_andnot_si256(at_least(a, limit), a); }
inline int count_from(Lanes a, Lanes limit) {
  return __builtin_popcount(_mm256_movemask_ps(_mm256_castsi256_ps(at_least(a, limit))));
}

// The highest bytes of four registers' lanes.
inline Lanes pack_tops(Lanes a, Lanes b, Lanes c, Lanes d) {
  const Lanes low = _mm256_or_si256(_mm256_srli_epi32(a, 24), _mm256_and_si256(_mm256_srli_epi32(b, 16), all_lanes(0xff00)));
  const Lanes high = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi32(c, 8), all_lanes(0xff0000)),
                                     _mm256_and_si256(d, all_lanes(0xff000000u)));
  return _mm256_or_si256(low, high);
}

inline Lanes eight_bits(uint64_t low, uint64_t high) {
  return _mm256_broadcastsi128_si256(_mm_set_epi64x(static_cast<int64_t>(high), static_cast<int64_t>(low)));
}
inline Lanes look_up(Lanes table, Lanes index) { return _mm256_shuffle_epi8(table, index); }
inline Lanes bytes_above(Lanes bytes, Lanes base) {
  return _mm256_adds_epu8(_mm256_sub_epi8(bytes, base), all_bytes(0x70));
}
inline uint64_t bits_of_nonzero_below(Lanes bytes, int limit) {
  const Lanes less_one = _mm256_sub_epi8(bytes, all_bytes(1));
  const Lanes above = _mm256_cmpeq_epi8(_mm256_max_epu8(less_one, all_bytes(limit - 1)), less_one);
  return static_cast<uint32_t>(~_mm256_movemask_epi8(above));
}
inline Lanes either(Lanes a, Lanes b) { return _mm256_xor_si256(a, b); }
inline Lanes both(Lanes a, Lanes b) { return _mm256_and_si256(a, b); }
inline Lanes sum_of_three(Lanes a, Lanes b, Lanes c) { return either(either(a, b), c); }
inline Lanes carry_of_three(Lanes a, Lanes b, Lanes c) {
  return _mm256_or_si256(both(a, b), both(either(a, b), c));
}
inline int count_bits(Lanes bytes, int bit) {
  return __builtin_popcount(_mm256_movemask_epi8(_mm256_slli_epi16(bytes, 7 - bit)));
}

#endif

// a + b + c of every bit: the sum stays in `a`, the carry is returned.
inline Lanes add_carry(Lanes& a, Lanes b, Lanes c) {
  const Lanes carry = carry_of_three(a, b, c);
  a = sum_of_three(a, b, c);
  return carry;
}

// Counters of 8 exponents: bit k of a byte in plane p is worth 2^p of exponent k. They hold 2^planes - 1 registers.
template <int planes>
class BitCounters {
 public:
  BitCounters() {
    for (Lanes& plane : planes_) {
      plane = zero_lanes();
    }
  }

  // Eight registers whose bytes have one bit set at most.
  void add(const Lanes (&bits)[8]) {
    Lanes& ones = planes_[0];
    Lanes& twos = planes_[1];
    const Lanes fours_a = add_carry(twos, add_carry(ones, bits[0], bits[1]), add_carry(ones, bits[2], bits[3]));
    const Lanes fours_b = add_carry(twos, add_carry(ones, bits[4], bits[5]), add_carry(ones, bits[6], bits[7]));
    Lanes carry = add_carry(planes_[2], fours_a, fours_b);
#pragma GCC unroll 16
    for (int plane = 3; plane < planes; ++plane) {
      const Lanes sum = either(planes_[plane], carry);
      carry = both(planes_[plane], carry);
      planes_[plane] = sum;
    }
  }

  void read(int64_t (&counts)[8]) const {
    for (int bit = 0; bit < 8; ++bit) {
      int64_t count = 0;
      for (int plane = 0; plane < planes; ++plane) {
        count += static_cast<int64_t>(count_bits(planes_[plane], bit)) << plane;
      }
      counts[bit] = count;
    }
  }

 private:
  Lanes planes_[planes];
};

constexpr int64_t kStride = 8 * sizeof(Lanes);  // bytes that are counted together
constexpr int kWindow = 16;                     // exponents that are counted together

template <int planes>
void count_window(const uint8_t* bytes, int64_t numel, int base, int64_t (&counts)[kWindow]) {
  const Lanes low_table = eight_bits(0x8040201008040201u, 0);
  const Lanes high_table = eight_bits(0, 0x8040201008040201u);
  const Lanes bases = all_bytes(base);
  BitCounters<planes> low;
  BitCounters<planes> high;
  for (int64_t i = 0; i < numel; i += kStride) {
    Lanes low_bits[8];
    Lanes high_bits[8];
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) {
      const Lanes index = bytes_above(load_bytes(bytes + i + k * sizeof(Lanes)), bases);
      low_bits[k] = look_up(low_table, index);
      high_bits[k] = look_up(high_table, index);
    }
    low.add(low_bits);
    high.add(high_bits);
  }
  int64_t eight[8];
  low.read(eight);
  std::memcpy(counts, eight, sizeof eight);
  high.read(eight);
  std::memcpy(counts + 8, eight, sizeof eight);
}

// Counts the bytes that are base, base + 1, … base + 15; `numel` is a multiple of kStride, at most 511 registers.
inline void count_bytes(const uint8_t* bytes, int64_t numel, int base, int64_t (&counts)[kWindow]) {
  if (numel < 32 * static_cast<int64_t>(sizeof(Lanes))) {
    count_window<5>(bytes, numel, base, counts);
  } else {
    count_window<9>(bytes, numel, base, counts);
  }
}

// Calls `body(byte)` with every byte from 1 to limit - 1; pays if there are few.
template <class Body>
inline void for_each_byte_below(const uint8_t* bytes, int64_t numel, int limit, const Body& body) {
  for (int64_t i = 0; i < numel; i += sizeof(Lanes)) {
    for (uint64_t bits = bits_of_nonzero_below(load_bytes(bytes + i), limit); bits != 0; bits &= bits - 1) {
      body(bytes[i + __builtin_ctzll(bits)]);
    }
  }
}

}  // namespace amplab::statistics
#endif
