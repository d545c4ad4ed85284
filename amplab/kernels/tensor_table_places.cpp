// Gradients that belong into one flat tensor: where they are, and bringing them in. Schemas are in gradient_places.py.
//
// `bring_in` reads each new gradient once and writes it once, into its part; then the part becomes the gradient. The
// parts do not overlap, and a new gradient is outside of the flat tensor, so no overlap has to be searched.
#include <numeric>

#include "tensor_table.h"

#include "unscale_spans.h"

namespace amplab {
namespace {

enum : int64_t { kKept = 1, kNew = 2, kMissing = 4 };
constexpr int64_t kMisfit = -1;
constexpr int64_t kSwapped = -2;

// The parts of a flat tensor for the gradients of the parameters of a table.
class Places {
 public:
  Places(TensorTable* params, TensorTable* lent, std::vector<int64_t> offsets)
      : params_(params), lent_(lent), offsets_(std::move(offsets)) {}

  // Fills `spans` with every gradient and its part; returns bits, or why a gradient cannot be brought in.
  int64_t sort(const Handle& flat, std::vector<TypedSpan>& spans, std::vector<int>& fresh) const {
    if (!params_->is_current()) {
      return kSwapped;
    }
    const Dtype dtype = flat.dtype();
    char* base = static_cast<char*>(flat.mutable_data());
    const char* end = base + flat.numel() * kItemSize[dtype];
    int64_t seen = 0;
    for (size_t index = 0; index < params_->size(); ++index) {
      const c10::TensorImpl* grad = params_->find(index, true);
      if (grad == c10::UndefinedTensorImpl::singleton()) {
        seen |= kMissing;
        continue;
      }
      const c10::TensorImpl& param = *params_->tensor(index);
      if (!params_->is_plain(*grad) || dtype_of(c10::typeMetaToScalarType(grad->dtype())) != dtype ||
          grad->requires_grad() || grad->sizes() != param.sizes()) {
        return kMisfit;
      }
      char* place = base + offsets_[index] * kItemSize[dtype];
      const auto* data = static_cast<const char*>(grad->data());
      if (grad->numel() == 0 || (data == place && grad->strides() == param.strides())) {
        seen |= kKept;
        data = place;
      } else if ((data >= base && data < end) || grad->strides() != param.strides()) {
        return kMisfit;
      } else {
        seen |= kNew;
        fresh.push_back(static_cast<int>(index));
      }
      spans.push_back({{data, place, grad->numel()}, dtype, dtype, static_cast<int>(index)});
    }
    return seen;
  }

  // Whether the tensors that are lent to `.grad` are still the parts of the flat tensor.
  bool can_lend(const Handle& flat, const std::vector<int>& fresh) const {
    const auto* base = static_cast<const char*>(flat.data());
    const int64_t size = kItemSize[flat.dtype()];
    return lent_->is_current() && std::all_of(fresh.begin(), fresh.end(), [&](int index) {
             const c10::TensorImpl& lent = *lent_->tensor(index);
             return (lent.numel() == 0 || lent.data() == base + offsets_[index] * size) && !lent.requires_grad();
           });
  }

  size_t size() const { return params_->size(); }
  bool is_current() const { return params_->is_current(); }

  void lend(int index) const { gradient(index) = lent_->held(index); }

  void clear(int index) const { gradient(index).reset(); }

 private:
  TensorPointer& gradient(int index) const {
    return reinterpret_cast<TensorPointer&>(params_->tensor(index)->mutable_grad());
  }

  TensorTable* params_;
  TensorTable* lent_;
  std::vector<int64_t> offsets_;  // in elements
};

Places& places_of(StableIValue value) {
  return *reinterpret_cast<Places*>(torch::stable::detail::to<int64_t>(value));
}

void make_gradient_places(StableIValue* stack, uint64_t /*inputs*/, uint64_t /*outputs*/) {
  auto* places = new Places(&table_of(stack[0]), &table_of(stack[1]),
                            torch::stable::detail::to<std::vector<int64_t>>(stack[2]));
  const Handle here(stack[3]);
  stack[0] = torch::stable::detail::from(reinterpret_cast<int64_t>(places));
}

void delete_gradient_places(StableIValue* stack, uint64_t /*inputs*/, uint64_t /*outputs*/) {
  const Handle here(stack[1]);
  delete &places_of(stack[0]);
}

void find_gradients(StableIValue* stack, uint64_t /*inputs*/, uint64_t /*outputs*/) {
  const Places& places = places_of(stack[0]);
  const Handle flat(stack[1]);
  std::vector<int>& fresh = scratch<int>();
  const int64_t seen = places.sort(flat, scratch<TypedSpan>(), fresh);
  stack[0] = torch::stable::detail::from(seen < 0 || places.can_lend(flat, fresh) ? seen : kMisfit);
}

void bring_in_gradients(StableIValue* stack, uint64_t /*inputs*/, uint64_t /*outputs*/) {
  const Places& places = places_of(stack[0]);
  const Handle flat(stack[1]);
  const Handle found_inf(stack[2]);
  const Handle inv_scale(stack[3]);
  require_memory("found_inf", found_inf);
  require_memory("inv_scale", inv_scale);
  const bool moves = torch::stable::detail::to<bool>(stack[4]);
  const bool lends = torch::stable::detail::to<bool>(stack[5]);
  std::vector<TypedSpan>& spans = scratch<TypedSpan>();
  std::vector<int>& fresh = scratch<int>();
  int64_t seen = places.sort(flat, spans, fresh);
  if (seen >= 0 && !places.can_lend(flat, fresh)) {
    seen = kMisfit;
  }
  if (seen >= 0 && (moves || fresh.empty())) {
    const float factor = *static_cast<const float*>(inv_scale.data());
    if (seen == kKept && std::isfinite(factor)) {  // else the padding would become NaN
      void* data = flat.mutable_data();
      spans.assign(1, {{data, data, flat.numel()}, flat.dtype(), flat.dtype(), 0});
    }
    const Task task{Write::replace, factor, (seen & kNew) == 0, false};
    Findings findings(spans.size(), task);
    unscale_spans(spans, task, findings);
    findings.write(static_cast<float*>(found_inf.mutable_data()), nullptr, nullptr, nullptr);
    if (lends) {
      std::for_each(fresh.begin(), fresh.end(), [&](int index) { places.lend(index); });
    } else {
      for (size_t index = 0; index < places.size(); ++index) {
        places.clear(static_cast<int>(index));
      }
    }
  }
  stack[0] = torch::stable::detail::from(seen);
}

// Makes every part the gradient of its parameter.
void lend_gradients(StableIValue* stack, uint64_t /*inputs*/, uint64_t /*outputs*/) {
  const Places& places = places_of(stack[0]);
  const Handle flat(stack[1]);
  std::vector<int>& all = scratch<int>();
  all.resize(places.size());
  std::iota(all.begin(), all.end(), 0);
  const int64_t seen = !places.is_current() ? kSwapped : places.can_lend(flat, all) ? kKept : kMisfit;
  if (seen == kKept) {
    std::for_each(all.begin(), all.end(), [&](int index) { places.lend(index); });
  }
  stack[0] = torch::stable::detail::from(seen);
}

// Writes the 2-norm of float32 gradients that are all in their places, as one tensor, and scales them down to max_norm.
void clip_gradients(StableIValue* stack, uint64_t /*inputs*/, uint64_t /*outputs*/) {
  const Places& places = places_of(stack[0]);
  const Handle flat(stack[1]);
  const Handle norm(stack[2]);
  const double max_norm = torch::stable::detail::to<double>(stack[3]);
  int64_t seen = places.sort(flat, scratch<TypedSpan>(), scratch<int>());
  if (seen >= 0 && (seen != kKept || flat.dtype() != kFloat)) {
    seen = kMisfit;
  }
  if (seen >= 0) {
    void* data = flat.mutable_data();
    std::vector<TypedSpan>& whole = scratch<TypedSpan>();
    whole.push_back({{data, data, flat.numel()}, kFloat, kFloat, 0});
    const Task measure{Write::nothing, 1.0f, true, true};
    Findings findings(1, measure);
    unscale_spans(whole, measure, findings);
    const float total = findings.norm();
    const float factor = static_cast<float>(max_norm) / (total + 1e-6f);
    *static_cast<float*>(norm.mutable_data()) = total;
    if (std::isnan(factor)) {
      seen = kMisfit;  // applied to each gradient, it does not reach the padding
    } else if (factor < 1.0f) {
      unscale_spans(whole, {Write::replace, factor, true, false}, findings);
    }
  }
  stack[0] = torch::stable::detail::from(seen);
}

STABLE_TORCH_LIBRARY_IMPL(amplab, CPU, m) {
  m.impl("make_gradient_places", &make_gradient_places);
  m.impl("delete_gradient_places", &delete_gradient_places);
  m.impl("find_gradients", &find_gradients);
  m.impl("bring_in_gradients_", &bring_in_gradients);
  m.impl("lend_gradients", &lend_gradients);
  m.impl("clip_gradients_", &clip_gradients);
}

}  // namespace
}  // namespace amplab
