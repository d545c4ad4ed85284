// How a CUDA kernel moves elements of two widths: 16 bytes at a time on both sides.
//
// If the elements of one side are twice as wide as those of the other, two neighboring threads exchange one part of
// their narrow elements, so that both sides are read and written in whole sectors of 32 bytes:
//
//   pairs of threads        even          odd
//   narrow, in memory       [a b]         [c d]        one access of 16 bytes each
//   narrow, exchanged       [a c]         [b d]
//   wide                    a  then c     b  then d    two accesses of 16 bytes, contiguous across neighbors
#pragma once

#include "unscale.h"

namespace amplab::unscale_cuda {

constexpr int kWarp = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;

struct alignas(16) Words {
  uint32_t at[4];
};

// The words of N elements, and the elements.
template <class T, int N>
struct Pack {
  static constexpr int kWords = N * static_cast<int>(sizeof(T)) / 16;
  Words words[kWords];

  AMPLAB_FUNCTION void get(T (&elements)[N]) const { memcpy(elements, words, sizeof words); }
  AMPLAB_FUNCTION void set(const T (&elements)[N]) { memcpy(words, elements, sizeof words); }
};

template <class In, class Out>
constexpr int kPack = 16 / static_cast<int>(sizeof(In) < sizeof(Out) ? sizeof(In) : sizeof(Out));

// The position of the words of pack number `pack`, in units of 16 bytes.
template <int kWords>
AMPLAB_FUNCTION size_t word_at(uint32_t pack, int word) {
  if (kWords == 2) {
    const uint32_t odd = pack % 2;
    return static_cast<size_t>(pack - odd) * 2 + odd + 2 * word;
  }
  return static_cast<size_t>(pack) * kWords + word;
}

// Exchanges a part of a narrow pack with the neighboring thread; applied twice, it is the identity. By value and with
// constant indices, because a register has no address.
AMPLAB_FUNCTION uint32_t given(const Words& words, bool odd, int i) {
  const uint32_t low = words.at[i];
  const uint32_t high = words.at[2 + i];
  return odd ? low : high;
}

AMPLAB_FUNCTION void take(Words& words, bool odd, int i, uint32_t got) {
  const uint32_t low = words.at[i];
  const uint32_t high = words.at[2 + i];
  words.at[i] = odd ? got : low;
  words.at[2 + i] = odd ? high : got;
}

// Must be called by all threads of a warp.
template <class T, class Other>
AMPLAB_FUNCTION void exchange(Pack<T, kPack<T, Other>>& pack) {
  if constexpr (2 * sizeof(T) == sizeof(Other)) {
    const bool odd = threadIdx.x % 2 == 1;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      take(pack.words[0], odd, i, __shfl_xor_sync(kAllLanes, given(pack.words[0], odd, i), 1));
    }
  }
}

template <class T, int N>
AMPLAB_FUNCTION void load(const T* memory, uint32_t at, bool active, Pack<T, N>& pack) {
#pragma unroll
  for (int word = 0; word < pack.kWords; ++word) {
    pack.words[word] = Words{};
    if (active) {
      pack.words[word] = reinterpret_cast<const Words*>(memory)[word_at<Pack<T, N>::kWords>(at, word)];
    }
  }
}

template <class T, int N>
AMPLAB_FUNCTION void store(T* memory, uint32_t at, bool active, const Pack<T, N>& pack) {
#pragma unroll
  for (int word = 0; word < pack.kWords; ++word) {
    if (active) {
      reinterpret_cast<Words*>(memory)[word_at<Pack<T, N>::kWords>(at, word)] = pack.words[word];
    }
  }
}

}  // namespace amplab::unscale_cuda
