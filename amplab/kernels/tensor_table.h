// Tensors that Python hands over once, so that a step takes no list of objects apart: the tensors themselves, or the
// gradients of parameters. A gradient fresh from backward has no Python object yet, and making one costs more than
// unscaling a thousand elements.
//
// No address of memory is kept: what a tensor's storage is now is read at every call, one cache line for each.
#pragma once

#include <algorithm>
#include <vector>

#include "tensor_lists.h"
#include "unscale_loops.h"

namespace amplab {

// Which word of a Python tensor points at its TensorImpl: the one after the object's head. 0 where there is none.
inline size_t find_tensor_word(const void* const* object, const c10::TensorImpl* tensor) {
  constexpr size_t kFirst = 2;
  constexpr size_t kLast = 4;  // of the smallest object that any torch makes
  const void* const* found = std::find(object + kFirst, object + kLast + 1, static_cast<const void*>(tensor));
  return found <= object + kLast ? found - object : 0;
}

class TensorTable {
 public:
  // Without `objects`, holds the tensors. With them, the Python objects that do: a count of our own would stop
  // torch.utils.swap_tensors, and with it module.to(). Whoever calls keeps the objects alive.
  TensorTable(std::vector<Handle> tensors, const std::vector<int64_t>& objects) {
    tensors_.reserve(tensors.size());
    for (const Handle& tensor : tensors) {
      tensors_.push_back(&tensor.impl());
      device_ = tensor.impl().device();
    }
    for (const int64_t address : objects) {
      objects_.push_back(reinterpret_cast<const void* const*>(address));
    }
    if (objects_.empty()) {
      held_ = std::move(tensors);
    } else {
      word_ = find_tensor_word(objects_[0], tensors_[0]);
    }
  }

  // Whether every object still has the tensor that it had; no tensor is looked at before that is sure.
  bool is_current() const {
    for (size_t index = 0; index < objects_.size(); ++index) {
      if (word_ == 0 || objects_[index][word_] != tensors_[index]) {
        return false;
      }
    }
    return true;
  }

  size_t size() const { return tensors_.size(); }

  // Lays out the tensors, or the gradients that they have now, each in the place of its tensor. nullptr where something is
  // not what the kernels take as it comes: on the list's device, strided and without gaps, of a floating dtype, float16
  // only where it is allowed, sharing no memory. What has not changed since the last call is not looked at twice.
  const std::vector<TypedSpan>* lay_out(bool gradients, bool allow_half) {
    if (!is_current()) {
      return nullptr;
    }
    size_t count = 0;
    bool changed = false;
    for (size_t index = 0; index < size(); ++index) {
      c10::TensorImpl* tensor = find(index, gradients);
      if (tensor == c10::UndefinedTensorImpl::singleton()) {
        continue;
      }
      const Dtype dtype = dtype_of(c10::typeMetaToScalarType(tensor->dtype()));
      if (!is_plain(*tensor) || dtype == kDtypes || (dtype == kHalf && !allow_half)) {
        return nullptr;
      }
      void* data = tensor->numel() == 0 ? nullptr : tensor->mutable_data();
      const TypedSpan typed{{data, data, tensor->numel()}, dtype, dtype, static_cast<int>(index)};
      if (count == spans_.size()) {
        spans_.push_back(typed);
        changed = true;
      } else if (!same(spans_[count], typed)) {
        spans_[count] = typed;
        changed = true;
      }
      ++count;
    }
    spans_.resize(count);
    if (changed && share_memory()) {
      spans_.clear();
      return nullptr;
    }
    return &spans_;
  }

 private:
  c10::TensorImpl* find(size_t index, bool gradients) const {
    constexpr size_t kAhead = 4;
    const auto ahead = [this](size_t place) { return tensors_[std::min(place, size() - 1)]; };
    if (!gradients) {
      prefetch(ahead(index + kAhead), sizeof(c10::TensorImpl));
      return tensors_[index];
    }
    prefetch(ahead(index + 2 * kAhead), sizeof(c10::TensorImpl));
    prefetch(gradient(ahead(index + kAhead)), sizeof(c10::TensorImpl));
    return gradient(tensors_[index]);
  }

  static c10::TensorImpl* gradient(const c10::TensorImpl* tensor) {
    return reinterpret_cast<const TensorPointer&>(tensor->grad()).get();
  }

  static bool same(const TypedSpan& a, const TypedSpan& b) {
    return a.span.output == b.span.output && a.span.numel == b.span.numel && a.output_dtype == b.output_dtype &&
           a.index == b.index;
  }

  bool is_plain(const c10::TensorImpl& tensor) const {
    constexpr c10::DispatchKeySet kLazy({c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor});
    return tensor.layout() == c10::kStrided && tensor.device() == device_ && !tensor.is_python_dispatch() &&
           tensor.has_storage() && !tensor.key_set().has_any(kLazy) && tensor.is_non_overlapping_and_dense();
  }

  bool share_memory() {
    std::vector<Extent>& extents = scratch<Extent>();
    for (const auto& [span, dtype, output_dtype, index] : spans_) {
      if (span.numel > 0) {
        extents.push_back(extent_of(span.output, span.numel * kItemSize[dtype], false, index));
      }
    }
    return find_overlap(extents, order_).has_value();
  }

  std::vector<c10::TensorImpl*> tensors_;
  c10::Device device_ = c10::kCPU;
  std::vector<Handle> held_;
  std::vector<const void* const*> objects_;
  size_t word_ = 0;
  std::vector<TypedSpan> spans_;  // of the last call
  std::vector<int> order_;        // by address
};

// What an operator answers: how many tensors it worked on, or why it wrote nothing.
inline int64_t reply(const TensorTable& list, const std::vector<TypedSpan>* spans) {
  constexpr int64_t kRefused = -1;  // the general operator has to do it
  constexpr int64_t kChanged = -2;  // torch.utils.swap_tensors exchanged a tensor: remember them anew
  return spans != nullptr ? static_cast<int64_t>(spans->size()) : list.is_current() ? kRefused : kChanged;
}

inline TensorTable& table_of(StableIValue value) {
  return *reinterpret_cast<TensorTable*>(torch::stable::detail::to<int64_t>(value));
}

inline void make_tensor_table(StableIValue* stack, uint64_t /*inputs*/, uint64_t /*outputs*/) {
  std::vector<Handle> tensors = take_list(stack[0]);
  auto* list = new TensorTable(std::move(tensors), torch::stable::detail::to<std::vector<int64_t>>(stack[1]));
  stack[0] = torch::stable::detail::from(reinterpret_cast<int64_t>(list));
}

}  // namespace amplab
