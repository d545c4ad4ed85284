// One pass over a list of tensors on the CPU: unscale, detect what is not finite, compute norms.
//
// The whole list is one range of elements that the threads share evenly, whatever the sizes of its tensors. A thread
// takes the chunks that begin in its part, so that the sums of squares do not depend on the number of threads.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "tensor_lists.h"
#include "unscale_loops.h"

namespace amplab {

inline constexpr int64_t kChunk = 32768;  // the least elements per thread, as in TensorIterator
inline constexpr int64_t kBlock = 2048;   // elements that stay in the first-level cache until their norm is computed

// Larger outputs, in bytes, bypass the caches: a line that is fully overwritten need not be read first, and none of it
// would still be cached when the optimizer reads it.
inline constexpr int64_t kStreamFrom = 16 << 20;

// The hardware prefetches only within a page. So while these last elements of a tensor are processed, the first ones of
// the next tensor but one are prefetched.
inline constexpr int64_t kLookAhead = 1024;

using Range = bool (*)(const void* input, void* output, int64_t begin, int64_t end, float inv_scale,
                       const char* ahead);
using Measure = bool (*)(const void* values, int64_t begin, int64_t end, float inv_scale, double* sum);
using Squared = double (*)(const void* values, int64_t begin, int64_t end);

template <Write write, class In, class Out>
bool unscale_range(const void* input, void* output, int64_t begin, int64_t end, float inv_scale, const char* ahead) {
  const In* x = static_cast<const In*>(input) + begin;
  Out* y = static_cast<Out*>(output) + begin;
  if constexpr (write == Write::replace && std::is_same_v<In, BFloat16> && std::is_same_v<Out, BFloat16>) {
    return unscale_bfloat16s(x, y, end - begin, inv_scale, ahead);
  } else if constexpr (sizeof(typename Arithmetic<In, Out>::type) == sizeof(float)) {
    return unscale_floats<write>(x, y, end - begin, inv_scale, ahead);
  } else {
    return unscale_doubles<write>(x, y, end - begin, inv_scale);
  }
}

template <class In>
bool stream_range(const void* input, void* output, int64_t begin, int64_t end, float inv_scale,
                  const char* /*ahead*/) {
  return stream_floats(static_cast<const In*>(input) + begin, static_cast<float*>(output) + begin, end - begin,
                       inv_scale);
}

template <bool squares, class In>
bool measure_range(const void* values, int64_t begin, int64_t end, float inv_scale, double* sum) {
  const In* x = static_cast<const In*>(values) + begin;
  if constexpr (sizeof(In) == sizeof(double)) {
    return measure_doubles(x, end - begin, inv_scale, sum);
  } else {
    return measure_floats<squares>(x, end - begin, inv_scale, sum);
  }
}

template <class T>
double squared_range(const void* values, int64_t begin, int64_t end) {
  return squares_of(static_cast<const T*>(values) + begin, end - begin);
}

template <Write write, class In>
inline constexpr std::array<Range, kDtypes> kInto = {
    unscale_range<write, In, Half>,
    unscale_range<write, In, BFloat16>,
    unscale_range<write, In, float>,
    unscale_range<write, In, double>,
};

template <Write write>
inline constexpr std::array<std::array<Range, kDtypes>, kDtypes> kRanges = {
    kInto<write, Half>,
    kInto<write, BFloat16>,
    kInto<write, float>,
    kInto<write, double>,
};

template <bool squares>
inline constexpr std::array<Measure, kDtypes> kMeasures = {
    measure_range<squares, Half>,
    measure_range<squares, BFloat16>,
    measure_range<squares, float>,
    measure_range<squares, double>,
};

inline constexpr std::array<Squared, kDtypes> kSquared = {squared_range<Half>, squared_range<BFloat16>,
                                                          squared_range<float>, squared_range<double>};

// The operation on every element of a list.
struct Task {
  Write write;
  float inv_scale;
  bool in_place;
  bool squares;  // whether norms are requested
};

// The results of one pass.
class Findings {
 public:
  static constexpr int kNone = std::numeric_limits<int>::max();

  Findings(size_t tensors, const Task& task) : squares_(task.squares ? tensors : 0) {}

  bool any() const { return first_bad_ != kNone; }
  int first_bad() const { return first_bad_; }  // the index of a tensor

  void add_bad(int index) { first_bad_ = std::min(first_bad_, index); }
  void add_squares(int index, double sum) { squares_[index] += sum; }

  float norm() const {
    double sum = 0.0;
    for (const double each : squares_) {
      sum += each;
    }
    return static_cast<float>(std::sqrt(sum));
  }

  void write(float* found_inf, float* norm, float* norms, int64_t* first_bad) const {
    if (any()) {
      *found_inf = 1.0f;
    }
    if (any() && first_bad != nullptr) {
      *first_bad = *first_bad < 0 ? first_bad_ : std::min<int64_t>(*first_bad, first_bad_);
    }
    if (norms != nullptr) {
      std::transform(squares_.begin(), squares_.end(), norms,
                     [](double sum) { return static_cast<float>(std::sqrt(sum)); });
    }
    if (norm != nullptr) {
      *norm = this->norm();
    }
  }

 private:
  int first_bad_ = kNone;
  std::vector<double> squares_;  // of each tensor
};

// The loops for one pair of dtypes; nullptr if that step is not needed.
struct Loops {
  Range write;
  Measure measure;  // of the products, before rounding
  Squared squared;  // of the output
};

inline Loops loops_for(Dtype input, Dtype output, const Task& task, bool stream) {
  const Measure measure = task.squares ? kMeasures<true>[input] : nullptr;
  if (task.write == Write::nothing) {
    return {nullptr, task.squares ? measure : kMeasures<false>[input], nullptr};
  }
  if (stream && output == kFloat && input != kDouble) {  // the output is not cached: measure the input
    constexpr std::array<Range, kDtypes> kStreams = {stream_range<Half>, stream_range<BFloat16>, stream_range<float>};
    return {kStreams[input], measure, nullptr};
  }
  const auto& ranges = task.write == Write::replace ? kRanges<Write::replace> : kRanges<Write::accumulate>;
  return {ranges[input][output], nullptr, task.squares ? kSquared[output] : nullptr};
}

// Processes a part of one tensor. Returns whether anything is not finite; adds to `sum` if squares are requested.
inline bool work_on(const Span& span, const Loops& loops, float inv_scale, int64_t begin, int64_t end, double* sum,
                    const char* ahead = nullptr) {
  if (loops.write == nullptr) {
    return loops.measure(span.input, begin, end, inv_scale, sum);
  }
  if (loops.measure == nullptr && loops.squared == nullptr) {
    return loops.write(span.input, span.output, begin, end, inv_scale, ahead);
  }
  bool bad = false;
  for (; begin < end; begin += kBlock) {
    const int64_t stop = std::min(end, begin + kBlock);
    bad |= loops.write(span.input, span.output, begin, stop, inv_scale, ahead);
    if (loops.squared != nullptr) {
      *sum += loops.squared(span.output, begin, stop);
    } else {
      loops.measure(span.input, begin, stop, inv_scale, sum);
    }
  }
  return bad;
}

// As work_on; at the end of a tensor, `next` is prefetched.
inline bool work_on_chunk(const Span& span, const Loops& loops, float inv_scale, int64_t begin, int64_t end,
                          double* sum, const void* next) {
  int64_t cut = end;
  if (end == span.numel) {
    cut = begin + std::max<int64_t>(0, end - begin - kLookAhead) / kLookAhead * kLookAhead;
  }
  bool bad = cut > begin && work_on(span, loops, inv_scale, begin, cut, sum, nullptr);
  if (cut < end) {
    bad |= work_on(span, loops, inv_scale, cut, end, sum, static_cast<const char*>(next));
  }
  return bad;
}

template <class Body>
void parallel_over(int64_t end, const Body& body) {
  const auto call = [](int64_t first, int64_t last, void* context) {
    (*static_cast<const Body*>(context))(first, last);
  };
  check(torch_parallel_for(0, end, kChunk, call, const_cast<Body*>(&body)), "parallel_for");
}

inline void lower(std::atomic<int>& lowest, int index) {
  int before = lowest.load(std::memory_order_relaxed);
  while (index < before && !lowest.compare_exchange_weak(before, index, std::memory_order_relaxed)) {
  }
}

inline void unscale_spans(const std::vector<TypedSpan>& spans, const Task& task, Findings& findings) {
  std::vector<int64_t>& ends = scratch<int64_t, 0>();    // of each span, in elements of the whole list
  std::vector<int64_t>& chunks = scratch<int64_t, 1>();  // before each span
  int64_t total = 0;
  int64_t chunk_count = 0;
  ends.reserve(spans.size());
  chunks.reserve(spans.size());
  for (const TypedSpan& typed : spans) {
    ends.push_back(total += typed.span.numel);
    chunks.push_back(chunk_count);
    chunk_count += (typed.span.numel + kChunk - 1) / kChunk;
  }
  const bool stream =
      !task.in_place && task.write == Write::replace && total * int64_t{sizeof(float)} > kStreamFrom;
  std::vector<double>& sums = scratch<double>();  // of each chunk
  sums.resize(task.squares ? chunk_count : 0);
  std::atomic<int> first_bad{Findings::kNone};
  parallel_over(total, [&](int64_t begin, int64_t end) {
    const int count = static_cast<int>(spans.size());
    int first_bad_here = Findings::kNone;
    for (int index = find_span(ends, count, begin); index < count && ends[index] - spans[index].span.numel < end;
         ++index) {
      const auto& [span, input_dtype, output_dtype, place] = spans[index];
      const void* next = spans[std::min(index + 2, count - 1)].span.input;
      const Loops loops = loops_for(input_dtype, output_dtype, task, stream);
      const int64_t start = ends[index] - span.numel;
      const int64_t first = begin <= start ? 0 : (begin - start + kChunk - 1) / kChunk;
      for (int64_t chunk = first; chunk * kChunk < std::min(span.numel, end - start); ++chunk) {
        const int64_t stop = std::min(span.numel, (chunk + 1) * kChunk);
        double sum = 0.0;
        if (work_on_chunk(span, loops, task.inv_scale, chunk * kChunk, stop, &sum, next)) {
          first_bad_here = std::min(first_bad_here, place);
        }
        if (task.squares) {
          sums[chunks[index] + chunk] = sum;
        }
      }
    }
    lower(first_bad, first_bad_here);
  });
  if (first_bad.load() != Findings::kNone) {
    findings.add_bad(first_bad.load());
  }
  if (task.squares) {
    for (size_t index = 0; index < spans.size(); ++index) {
      const int64_t stop = index + 1 < spans.size() ? chunks[index + 1] : chunk_count;
      for (int64_t chunk = chunks[index]; chunk < stop; ++chunk) {
        findings.add_squares(spans[index].index, sums[chunk]);
      }
    }
  }
}

}  // namespace amplab
