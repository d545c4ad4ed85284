// The CPU kernels of amplab::multi_tensor_unscale_{,copy,add}; schemas and reference are in unscale.py.
//
// The whole list is one range of elements that the threads share evenly, whatever the sizes of its tensors. Every
// element is read once and written once; the check for inf and NaN is done on what is in the registers anyway.
#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <limits>

#if defined(__AVX2__) && defined(__F16C__)
#include <immintrin.h>
#endif

#include "parameter_list.h"
#include "tensor_lists.h"
#include "unscale.h"

namespace amplab {
namespace {

constexpr int64_t kGrain = 32768;  // elements a thread must have to be worth waking, as in TensorIterator

// Outputs larger than this, in bytes, are written past the caches: a line that is overwritten whole need not be read
// first, and nothing of it would still be there when the optimizer comes.
constexpr int64_t kStreamFrom = 16 << 20;

constexpr size_t kLookAhead = 512;  // bytes of the next tensor to ask for while one is worked on

#if defined(__AVX2__) && defined(__F16C__)

constexpr int64_t kLanes = 8;

// Eight elements at a time; the same operations as unscale_element, so the same bits.
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

// The smallest magnitude that is infinite once it is rounded: halfway from the largest number to the next power of 2.
constexpr float kInfinity = std::numeric_limits<float>::infinity();
template <class Out>
constexpr float kOverflow = kInfinity;
template <>
constexpr float kOverflow<Half> = 65520.0f;
template <>
constexpr float kOverflow<BFloat16> = 0x1.ffp127f;

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

template <Write write, class In, class Out>
bool unscale_floats(const In* x, Out* y, int64_t numel, float inv_scale) {
  const __m256 inverse = _mm256_set1_ps(inv_scale);
  __m256 bad = _mm256_setzero_ps();
  int64_t i = 0;
#pragma GCC unroll 4
  for (; i + kLanes <= numel; i += kLanes) {
    bad = _mm256_or_ps(bad, unscale_lanes<write>(x + i, y + i, inverse));
  }
  if (i < numel) {  // the rest among zeros, which are finite
    In x_rest[kLanes] = {};
    Out y_rest[kLanes] = {};
    std::memcpy(x_rest, x + i, (numel - i) * sizeof(In));
    std::memcpy(y_rest, y + i, (numel - i) * sizeof(Out));
    bad = _mm256_or_ps(bad, unscale_lanes<write>(x_rest, y_rest, inverse));
    std::memcpy(y + i, y_rest, (numel - i) * sizeof(Out));
  }
  return _mm256_movemask_ps(bad) != 0;
}

// As unscale_floats<replace>, with stores that go past the caches; they need 32-byte alignment.
template <class In>
bool stream_floats(const In* x, float* y, int64_t numel, float inv_scale) {
  const __m256 inverse = _mm256_set1_ps(inv_scale);
  const int64_t misaligned = static_cast<int64_t>(reinterpret_cast<uintptr_t>(y) / sizeof(float)) % kLanes;
  int64_t i = std::min(numel, (kLanes - misaligned) % kLanes);
  bool found = unscale_floats<Write::replace>(x, y, i, inv_scale);
  __m256 bad = _mm256_setzero_ps();
  for (; i + kLanes <= numel; i += kLanes) {
    const __m256 product = _mm256_mul_ps(load(x + i), inverse);
    _mm256_stream_ps(y + i, product);
    bad = _mm256_or_ps(bad, reaches(product, kInfinity));
  }
  _mm_sfence();
  found |= unscale_floats<Write::replace>(x + i, y + i, numel - i, inv_scale);
  return found | (_mm256_movemask_ps(bad) != 0);
}

#else

template <Write write, class In, class Out>
bool unscale_floats(const In* x, Out* y, int64_t numel, float inv_scale) {
  bool bad = false;
  for (int64_t i = 0; i < numel; ++i) {
    bad |= unscale_element<write>(x[i], y[i], inv_scale);
  }
  return bad;
}

template <class In>
bool stream_floats(const In* x, float* y, int64_t numel, float inv_scale) {
  return unscale_floats<Write::replace>(x, y, numel, inv_scale);
}

#endif

// Where float64 takes part: rare enough for one element at a time.
template <Write write, class In, class Out>
bool unscale_doubles(const In* x, Out* y, int64_t numel, double inv_scale) {
  bool bad = false;
  for (int64_t i = 0; i < numel; ++i) {
    bad |= unscale_element<write>(x[i], y[i], inv_scale);
  }
  return bad;
}

template <Write write, class In, class Out>
bool unscale_range(const void* input, void* output, int64_t begin, int64_t end, float inv_scale) {
  const In* x = static_cast<const In*>(input) + begin;
  Out* y = static_cast<Out*>(output) + begin;
  if constexpr (sizeof(typename Arithmetic<In, Out>::type) == sizeof(float)) {
    return unscale_floats<write>(x, y, end - begin, inv_scale);
  } else {
    return unscale_doubles<write>(x, y, end - begin, inv_scale);
  }
}

using Range = bool (*)(const void* input, void* output, int64_t begin, int64_t end, float inv_scale);

template <Write write, class In>
constexpr std::array<Range, kDtypes> kInto = {
    unscale_range<write, In, Half>,
    unscale_range<write, In, BFloat16>,
    unscale_range<write, In, float>,
    unscale_range<write, In, double>,
};

template <Write write>
constexpr std::array<std::array<Range, kDtypes>, kDtypes> kRanges = {
    kInto<write, Half>,
    kInto<write, BFloat16>,
    kInto<write, float>,
    kInto<write, double>,
};

template <class In>
bool stream_range(const void* input, void* output, int64_t begin, int64_t end, float inv_scale) {
  return stream_floats(static_cast<const In*>(input) + begin, static_cast<float*>(output) + begin, end - begin,
                       inv_scale);
}

Range range_for(const TypedSpan& typed, Write write, bool stream) {
  if (stream && typed.output_dtype == kFloat && typed.input_dtype != kDouble) {
    constexpr std::array<Range, kDtypes> kStreams = {stream_range<Half>, stream_range<BFloat16>, stream_range<float>};
    return kStreams[typed.input_dtype];
  }
  const auto& ranges = write == Write::replace ? kRanges<Write::replace> : kRanges<Write::accumulate>;
  return ranges[typed.input_dtype][typed.output_dtype];
}

template <class Body>
void parallel_for(int64_t end, const Body& body) {
  const auto call = [](int64_t first, int64_t last, void* context) {
    (*static_cast<const Body*>(context))(first, last);
  };
  check(torch_parallel_for(0, end, kGrain, call, const_cast<Body*>(&body)), "parallel_for");
}

bool unscale_spans(const std::vector<TypedSpan>& spans, float inv_scale, Write write, bool in_place) {
  std::vector<int64_t> ends;  // of each span, in elements of the whole list
  ends.reserve(spans.size());
  int64_t total = 0;
  for (const TypedSpan& typed : spans) {
    ends.push_back(total += typed.span.numel);
  }
  const bool stream = !in_place && write == Write::replace && total * int64_t{sizeof(float)} > kStreamFrom;
  std::atomic<bool> found{false};
  parallel_for(total, [&](int64_t begin, int64_t end) {
    bool found_here = false;
    for (int index = find_span(ends, static_cast<int>(spans.size()), begin); begin < end; ++index) {
      const Span& span = spans[index].span;
      if (ends[index] < end) {  // the hardware looks ahead within a page only
        prefetch(spans[index + 1].span.input, kLookAhead);
      }
      const int64_t start = ends[index] - span.numel;
      const int64_t stop = std::min(end, ends[index]);
      const Range range = range_for(spans[index], write, stream);
      found_here |= range(span.input, span.output, begin - start, stop - start, inv_scale);
      begin = stop;
    }
    if (found_here) {
      found.store(true, std::memory_order_relaxed);
    }
  });
  return found.load();
}

// Element by element along the last dimension; the positions are in elements from the first one.
bool unscale_strided(const StridedPair& pair, Range range, float inv_scale, int64_t dim, int64_t in_at,
                     int64_t out_at) {
  if (dim == pair.dim) {
    const char* input = static_cast<const char*>(pair.input) + in_at * kItemSize[pair.input_dtype];
    char* output = static_cast<char*>(pair.output) + out_at * kItemSize[pair.output_dtype];
    return range(input, output, 0, 1, inv_scale);
  }
  bool found = false;
  for (int64_t i = 0; i < pair.sizes[dim]; ++i) {
    found |= unscale_strided(pair, range, inv_scale, dim + 1, in_at, out_at);
    in_at += pair.input_strides[dim];
    out_at += pair.output_strides[dim];
  }
  return found;
}

template <Write write, bool in_place>
void unscale(StableIValue* stack, uint64_t /*inputs*/, uint64_t /*outputs*/) {
  const PairedLists lists = take_arguments(stack, in_place);
  const float inv_scale = *lists.inv_scale();
  bool found = unscale_spans(lists.spans(), inv_scale, write, in_place);
  for (const StridedPair& pair : lists.strided()) {
    const Range range = kRanges<write>[pair.input_dtype][pair.output_dtype];
    found |= unscale_strided(pair, range, inv_scale, 0, 0, 0);
  }
  if (found) {
    *lists.found_inf() = 1.0f;
  }
}

// -- the same for the gradients of parameters that were handed over before ------------------------------------------

const ParameterList& parameter_list(StableIValue value) {
  return *reinterpret_cast<const ParameterList*>(torch::stable::detail::to<int64_t>(value));
}

void remember_parameters(StableIValue* stack, uint64_t /*inputs*/, uint64_t /*outputs*/) {
  const auto* list = new ParameterList(take_list(stack[0]));
  stack[0] = torch::stable::detail::from(reinterpret_cast<int64_t>(list));
}

void forget_parameters(StableIValue* stack, uint64_t /*inputs*/, uint64_t /*outputs*/) {
  const Handle here(stack[1]);
  delete &parameter_list(stack[0]);
}

// Returns how many gradients were unscaled; -1 where the general operator has to do it, and nothing was written.
void unscale_remembered(StableIValue* stack, uint64_t /*inputs*/, uint64_t /*outputs*/) {
  const Handle found_inf(stack[1]);
  const Handle inv_scale(stack[2]);
  std::vector<TypedSpan> spans;
  if (!parameter_list(stack[0]).lay_out_gradients(torch::stable::detail::to<bool>(stack[3]), spans)) {
    stack[0] = torch::stable::detail::from(int64_t{-1});
    return;
  }
  if (unscale_spans(spans, *static_cast<const float*>(inv_scale.data()), Write::replace, true)) {
    *static_cast<float*>(found_inf.mutable_data()) = 1.0f;
  }
  stack[0] = torch::stable::detail::from(static_cast<int64_t>(spans.size()));
}

double sum_of_squares(const Span& span) {
  constexpr int64_t kSums = 16;  // side by side, so that the compiler takes several at once
  const float* x = static_cast<const float*>(span.input);
  double sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums <= span.numel; i += kSums) {
    for (int64_t lane = 0; lane < kSums; ++lane) {
      sums[lane] += static_cast<double>(x[i + lane]) * x[i + lane];
    }
  }
  for (; i < span.numel; ++i) {
    sums[i % kSums] += static_cast<double>(x[i]) * x[i];
  }
  double sum = 0.0;
  for (const double each : sums) {
    sum += each;
  }
  return sum;
}

// Writes the 2-norm of the gradients and scales them down to max_norm; returns as unscale_remembered.
void clip_remembered(StableIValue* stack, uint64_t /*inputs*/, uint64_t /*outputs*/) {
  const Handle norm(stack[1]);
  std::vector<TypedSpan> spans;
  bool floats = parameter_list(stack[0]).lay_out_gradients(false, spans);
  double sum = 0.0;
  for (const TypedSpan& typed : spans) {
    floats = floats && typed.input_dtype == kFloat;
    sum += floats ? sum_of_squares(typed.span) : 0.0;
  }
  if (!floats) {
    stack[0] = torch::stable::detail::from(int64_t{-1});
    return;
  }
  const float total = static_cast<float>(std::sqrt(sum));
  const float factor = static_cast<float>(torch::stable::detail::to<double>(stack[2])) / (total + 1e-6f);
  *static_cast<float*>(norm.mutable_data()) = total;
  if (!(factor >= 1.0f)) {  // NaN goes on, as in torch
    unscale_spans(spans, factor, Write::replace, true);
  }
  stack[0] = torch::stable::detail::from(static_cast<int64_t>(spans.size()));
}

STABLE_TORCH_LIBRARY_IMPL(amplab, CPU, m) {
  m.impl("remember_parameters", &remember_parameters);
  m.impl("forget_parameters", &forget_parameters);
  m.impl("unscale_remembered_", &unscale_remembered);
  m.impl("clip_remembered_", &clip_remembered);
  m.impl("multi_tensor_unscale_", &unscale<Write::replace, true>);
  m.impl("multi_tensor_unscale_copy", &unscale<Write::replace, false>);
  m.impl("multi_tensor_unscale_add", &unscale<Write::accumulate, false>);
}

}  // namespace
}  // namespace amplab
