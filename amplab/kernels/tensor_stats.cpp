// The CPU kernel of amplab::tensor_stats; schema and reference are in tensor_stats.py.
//
// The whole list is one range of elements that the threads share evenly, whatever the sizes of its tensors. Each thread
// takes its part block by block (tensor_tally.h); a tensor with gaps is copied into a block first.
#include <algorithm>
#include <mutex>

#include "read_lists.h"
#include "tensor_tally.h"

namespace amplab::statistics {
namespace {

constexpr int64_t kGrain = 16384;  // the least elements per thread: below it a thread costs more than it saves

// Copies elements of a tensor with gaps, starting at `begin`, in the order of their indices.
template <class In>
void gather(const Source& source, int64_t begin, int64_t count, In* out) {
  const int64_t dim = source.dim;
  std::vector<int64_t> index(dim);
  int64_t at = 0;
  for (int64_t d = dim - 1, rest = begin; d >= 0; rest /= source.sizes[d], --d) {
    index[d] = rest % source.sizes[d];
    at += index[d] * source.strides[d];
  }
  const In* data = static_cast<const In*>(source.data);
  for (int64_t i = 0; i < count; ++i) {
    out[i] = data[at];
    for (int64_t d = dim - 1; d >= 0; --d) {
      at += source.strides[d];
      if (++index[d] < source.sizes[d]) {
        break;
      }
      at -= source.sizes[d] * source.strides[d];
      index[d] = 0;
    }
  }
}

template <class In>
void tally(const Source& source, int64_t begin, int64_t end, const Row& row) {
  std::vector<In> copy(source.gapless ? 0 : std::min(kBlock, end - begin));
  for (int64_t numel; begin < end; begin += numel) {
    numel = std::min(kBlock, end - begin);
    if (!source.gapless) {
      gather(source, begin, numel, copy.data());
    }
    tally_block(source.gapless ? static_cast<const In*>(source.data) + begin : copy.data(), numel, row);
  }
}

void tally_any(const Source& source, int64_t begin, int64_t end, const Row& row) {
  switch (source.dtype) {
    case kHalf: return tally<Half>(source, begin, end, row);
    case kBFloat16: return tally<BFloat16>(source, begin, end, row);
    case kFloat: return tally<float>(source, begin, end, row);
    default: return tally<double>(source, begin, end, row);
  }
}

template <class Body>
void parallel_for(int64_t end, const Body& body) {
  const auto call = [](int64_t first, int64_t last, void* context) {
    (*static_cast<const Body*>(context))(first, last);
  };
  check(torch_parallel_for(0, end, kGrain, call, const_cast<Body*>(&body)), "parallel_for");
}

void fill_table(const Arguments& arguments, int64_t* table) {
  const std::vector<Source>& sources = arguments.list.sources();
  const int64_t columns = kHead + arguments.bins;
  const auto row_at = [&](int64_t* start) { return Row(start, arguments.low, arguments.bins); };
  std::vector<int64_t> ends;  // of each tensor, in elements of the whole list
  ends.reserve(sources.size());
  int64_t total = 0;
  for (const Source& source : sources) {
    row_at(table + ends.size() * columns).clear();
    ends.push_back(total += source.numel);
  }
  std::mutex shared;  // for the rows of tensors that several threads count
  parallel_for(total, [&](int64_t begin, int64_t end) {
    std::vector<int64_t> part(columns);
    for (int index = find_span(ends, static_cast<int>(sources.size()), begin); begin < end; ++index) {
      const int64_t start = ends[index] - sources[index].numel;
      const int64_t stop = std::min(end, ends[index]);
      const Row row = row_at(table + index * columns);
      if (begin == start && stop == ends[index]) {
        tally_any(sources[index], 0, stop - start, row);
      } else {
        const Row own = row_at(part.data());
        own.clear();
        tally_any(sources[index], begin - start, stop - start, own);
        const std::lock_guard<std::mutex> lock(shared);
        row.merge(own);
      }
      begin = stop;
    }
  });
}

void tensor_stats(StableIValue* stack, uint64_t /*inputs*/, uint64_t /*outputs*/) {
  const Arguments arguments = take_stats_arguments(stack);
  const ReadList& list = arguments.list;
  Table table(static_cast<int64_t>(list.sources().size()), kHead + arguments.bins, list.device_type(),
              list.device_index());
  fill_table(arguments, table.data());
  stack[0] = table.release();
}

STABLE_TORCH_LIBRARY_IMPL(amplab, CPU, m) { m.impl("tensor_stats", &tensor_stats); }

}  // namespace
}  // namespace amplab::statistics
