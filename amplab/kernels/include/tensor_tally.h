// Counts a block of contiguous elements into a row of the table: the inner loop of amplab::tensor_stats on the CPU,
// without a torch header.
//
// The block is read once: its extremes are kept in registers and its exponents as bytes, which are counted from the
// first-level cache (exponent_lanes.h). Rare values (inf, NaN, subnormals, float16's limits) are searched for
// only in blocks whose extremes show that they occur.
#pragma once

#include <algorithm>
#include <limits>

#include "exponent_lanes.h"
#include "tensor_stats.h"

namespace amplab::statistics {

constexpr int64_t kBlock = 8192;  // elements; their exponents stay in the first-level cache
constexpr int64_t kFew = 32;      // up to here, counting one by one is faster

// One row of the table, or what a thread adds to it.
class Row {
 public:
  Row(int64_t* columns, int64_t low, int64_t bins) : columns_(columns), low_(low), bins_(bins) {}

  void clear() const {
    std::fill_n(columns_, kHead + bins_, 0);
    columns_[kSmallest] = bit_cast<int64_t>(std::numeric_limits<double>::infinity());
  }

  void add(Column column, int64_t count) const { columns_[column] += count; }
  void head(Column column) const { columns_[column] += 1; }
  void bin(int64_t bin) const { columns_[kHead + bin] += 1; }

  // Elements of one binade; float16's limits inside a binade are handled elsewhere.
  void add_binade(int exponent, int64_t count) const {
    columns_[kSubnormals] += exponent < -14 ? count : 0;
    columns_[kFlushed] += exponent < -25 ? count : 0;
    columns_[kHead + bin_of(exponent, low_, bins_)] += count;
  }

  // Finite, non-zero magnitudes; those of doubles have the order of their bits.
  void widen_to(double smallest, double largest) const {
    columns_[kAbsmax] = std::max(columns_[kAbsmax], bit_cast<int64_t>(largest));
    columns_[kSmallest] = std::min(columns_[kSmallest], bit_cast<int64_t>(smallest));
  }

  void merge(const Row& part) const {
    columns_[kAbsmax] = std::max(columns_[kAbsmax], part.columns_[kAbsmax]);
    columns_[kSmallest] = std::min(columns_[kSmallest], part.columns_[kSmallest]);
    for (int64_t column = kZeros; column < kHead + bins_; ++column) {
      columns_[column] += part.columns_[column];
    }
  }

  int64_t low() const { return low_; }
  int64_t bins() const { return bins_; }

 private:
  int64_t* columns_;
  int64_t low_;
  int64_t bins_;
};

inline uint32_t magnitude_of(float x) { return bit_cast<uint32_t>(x) & 0x7fffffffu; }
inline uint32_t magnitude_of(Half x) { return magnitude_of(widen(x)); }
inline uint32_t magnitude_of(BFloat16 x) { return magnitude_of(widen(x)); }
inline uint64_t magnitude_of(double x) { return bit_cast<uint64_t>(x) & ~(uint64_t{1} << 63); }

inline double number(uint32_t bits) { return bit_cast<float>(bits); }
inline double number(uint64_t bits) { return bit_cast<double>(bits); }

// One element at a time: for float64, and for every dtype without vector instructions.
template <class In>
void tally_elements(const In* x, int64_t numel, const Row& row) {
  using Bits = decltype(magnitude_of(*x));
  Bits largest = 0;
  Bits smallest = Layout<Bits>::kInfinity;
  for (int64_t i = 0; i < numel; ++i) {
    const Bits magnitude = magnitude_of(x[i]);
    if (magnitude < Layout<Bits>::kInfinity && magnitude > 0) {
      largest = std::max(largest, magnitude);
      smallest = std::min(smallest, magnitude);
    }
    count_element(magnitude, row.low(), row.bins(), row);
  }
  if (largest > 0) {
    row.widen_to(number(smallest), number(largest));
  }
}

#if defined(AMPLAB_EXPONENT_LANES)

// In this section a magnitude is twice its bits: the sign is gone and the exponent is the highest byte.
constexpr uint32_t kInfinity = 2 * Layout<uint32_t>::kInfinity;
constexpr uint32_t kTie = 2 * kLargestFlushed<uint32_t>;
constexpr uint32_t kOverflow = 2 * kSmallestOverflow<uint32_t>;

struct Extremes {
  uint32_t largest;
  uint32_t smallest;  // of those that are not zero
};

// Calls `body(lanes…)` with four registers at a time, and finally with the rest padded with zeros. Forced inline, with
// the body, so that its sums stay in registers.
template <class In, class Body>
AMPLAB_INLINED void for_each_four(const In* x, int64_t numel, const Body& body) {
  constexpr int64_t kStep = 4 * kLanes;
  int64_t i = 0;
  for (; i + kStep <= numel; i += kStep) {
    body(i, twice(load_bits(x + i)), twice(load_bits(x + i + kLanes)), twice(load_bits(x + i + 2 * kLanes)),
         twice(load_bits(x + i + 3 * kLanes)));
  }
  if (i < numel) {
    In rest[kStep] = {};
    std::memcpy(rest, x + i, (numel - i) * sizeof(In));
    body(i, twice(load_bits(rest)), twice(load_bits(rest + kLanes)), twice(load_bits(rest + 2 * kLanes)),
         twice(load_bits(rest + 3 * kLanes)));
  }
}

// Reads the block, and writes the exponent of each element as a byte, in an order of its own.
template <class In>
Extremes scan(const In* x, int64_t numel, uint8_t* exponents) {
  const Lanes one = all_lanes(1);
  Lanes large = zero_lanes();
  Lanes small = all_lanes(0xffffffffu);  // minus one, so that zero is the largest
  for_each_four(x, numel, [&](int64_t i, Lanes a, Lanes b, Lanes c, Lanes d) AMPLAB_INLINED_BODY {
    large = larger(large, larger(larger(a, b), larger(c, d)));
    small = smaller(small, smaller(smaller(minus(a, one), minus(b, one)), smaller(minus(c, one), minus(d, one))));
    store_bytes(exponents + i, pack_tops(a, b, c, d));
  });
  return {largest(large), smallest(small) + 1};
}

template <class In>
int64_t elements_from(const In* x, int64_t numel, uint32_t limit) {
  const Lanes limits = all_lanes(limit);
  int64_t count = 0;
  for_each_four(x, numel, [&](int64_t, Lanes a, Lanes b, Lanes c, Lanes d) AMPLAB_INLINED_BODY {
    count += count_from(a, limits) + count_from(b, limits) + count_from(c, limits) + count_from(d, limits);
  });
  return count;
}

template <class In>
uint32_t largest_finite(const In* x, int64_t numel) {
  const Lanes limit = all_lanes(kInfinity);
  Lanes large = zero_lanes();
  for_each_four(x, numel, [&](int64_t, Lanes a, Lanes b, Lanes c, Lanes d) AMPLAB_INLINED_BODY {
    large = larger(large, larger(larger(zero_from(a, limit), zero_from(b, limit)),
                                 larger(zero_from(c, limit), zero_from(d, limit))));
  });
  return largest(large);
}

// Below 2^-126, whose exponents are not counted with the others. Returns how many there are.
template <class In>
int64_t tally_subnormals(const In* x, int64_t numel, const Row& row) {
  int64_t count = 0;
  for (int64_t i = 0; i < numel; ++i) {
    const uint32_t magnitude = magnitude_of(x[i]);
    if (magnitude != 0 && magnitude < power_of_two<uint32_t>(-126)) {
      row.add_binade(exponent_of(magnitude), 1);
      ++count;
    }
  }
  return count;
}

// Counts the elements whose exponent fields are `first` to `last`, at most `most`. Returns how many there are. Starts
// with the highest, because there are often few or none below them.
inline int64_t tally_binades(const uint8_t* exponents, int64_t numel, int first, int last, int64_t most,
                             const Row& row) {
  int64_t total = 0;
  while (last >= first && total < most) {
    if (most - total <= kFew) {
      for_each_byte_below(exponents, numel, last + 1, [&](int field) {
        row.add_binade(field - Layout<uint32_t>::kBias, 1);
        ++total;
      });
      break;
    }
    const int base = std::max(1, last - kWindow + 1);
    int64_t counts[kWindow];
    count_bytes(exponents, numel, base, counts);
    for (; last >= base; --last) {
      row.add_binade(last - Layout<uint32_t>::kBias, counts[last - base]);
      total += counts[last - base];
    }
  }
  return total;
}

template <class In>
int64_t tally_nonfinite(const In* x, int64_t numel, const Row& row) {
  const int64_t nonfinite = elements_from(x, numel, kInfinity);
  const int64_t nans = elements_from(x, numel, kInfinity + 1);
  row.add(kInfs, nonfinite - nans);
  row.add(kNans, nans);
  return nonfinite;
}

template <class In>
void tally_block(const In* x, int64_t numel, const Row& row) {
  alignas(64) uint8_t exponents[kBlock + kStride];
  auto [largest, smallest] = scan(x, numel, exponents);
  const int64_t scanned = (numel + 4 * kLanes - 1) / (4 * kLanes) * (4 * kLanes);
  const int64_t padded = (scanned + kStride - 1) / kStride * kStride;
  std::memset(exponents + scanned, 0, padded - scanned);
  int64_t nonfinite = 0;
  if (largest >= kInfinity) {
    nonfinite = tally_nonfinite(x, numel, row);
    largest = largest_finite(x, numel);
  }
  int64_t counted = 0;
  if (largest > 0) {
    row.widen_to(number(smallest / 2), number(largest / 2));
    if (smallest >> 24 == 0) {
      counted += tally_subnormals(x, numel, row);
    }
    const int64_t most = numel - nonfinite - counted;
    counted += tally_binades(exponents, padded, std::max(1u, smallest >> 24), largest >> 24, most, row);
    if (smallest <= kTie && kTie <= largest) {
      row.add(kFlushed, elements_from(x, numel, kTie) - elements_from(x, numel, kTie + 1));
    }
    if (largest >= kOverflow) {
      row.add(kOverflows, elements_from(x, numel, kOverflow) - nonfinite);
    }
  }
  row.add(kZeros, numel - nonfinite - counted);
}

inline void tally_block(const double* x, int64_t numel, const Row& row) { tally_elements(x, numel, row); }

#else

template <class In>
void tally_block(const In* x, int64_t numel, const Row& row) {
  tally_elements(x, numel, row);
}

#endif

}  // namespace amplab::statistics
