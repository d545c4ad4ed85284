// Tensors that Python passes once, so that a step does not unpack a list of objects: the tensors themselves, or the
// gradients of parameters. A new gradient of backward has no Python object yet, and making one costs more than
// unscaling a thousand elements.
//
// No memory address is kept: every call reads the current storage of each tensor, one cache line for each.
#pragma once

#include <algorithm>
#include <vector>

#include "tensor_lists.h"
#include "unscale_loops.h"

namespace amplab {

// The word of a Python tensor object that points to its TensorImpl, after the object's header; 0 if there is none. Reading
// it detects torch.utils.swap_tensors. Measured on 2000 parameters of 16 elements: the whole call takes 0.5 ms; comparing
// `_cdata` of each parameter in Python instead would add 2 ms.
inline size_t find_tensor_word(const void* const* object, const c10::TensorImpl* tensor) {
  constexpr size_t kFirst = 2;
  constexpr size_t kLast = 4;  // within the smallest tensor object of any torch version
  const void* const* found = std::find(object + kFirst, object + kLast + 1, static_cast<const void*>(tensor));
  return found <= object + kLast ? found - object : 0;
}

class TensorTable {
 public:
  // Without `objects`, holds references to the tensors. With the addresses of the Python objects it does not, because a
  // reference would make torch.utils.swap_tensors, and so module.to(), fail. The caller keeps the objects alive.
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

  // Whether every object still has the same tensor; checked before any tensor is read.
  bool is_current() const {
    for (size_t index = 0; index < objects_.size(); ++index) {
      if (word_ == 0 || objects_[index][word_] != tensors_[index]) {
        return false;
      }
    }
    return true;
  }

  size_t size() const { return tensors_.size(); }
  c10::TensorImpl* tensor(size_t index) const { return tensors_[index]; }
  const TensorPointer& held(size_t index) const { return held_[index].pointer(); }

  // Returns the spans of the tensors, or of their current gradients, with the index of each tensor. nullptr if the
  // kernels cannot take one directly: it must be on the list's device, strided without gaps, of a floating dtype
  // (float16 only if allowed), and share no memory. Overlaps are searched again only if a span has changed since the
  // last call.
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

  // The tensor, or its gradient; those that follow are prefetched.
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

  // Whether the kernels can take it directly: strided without gaps, and on the list's device.
  bool is_plain(const c10::TensorImpl& tensor) const {
    constexpr c10::DispatchKeySet kLazy({c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor});
    return tensor.layout() == c10::kStrided && tensor.device() == device_ && !tensor.is_python_dispatch() &&
           tensor.has_storage() && !tensor.key_set().has_any(kLazy) && tensor.is_non_overlapping_and_dense() &&
           is_in_memory(tensor);
  }

 private:
  static c10::TensorImpl* gradient(const c10::TensorImpl* tensor) {
    return reinterpret_cast<const TensorPointer&>(tensor->grad()).get();
  }

  static bool same(const TypedSpan& a, const TypedSpan& b) {
    return a.span.output == b.span.output && a.span.numel == b.span.numel && a.output_dtype == b.output_dtype &&
           a.index == b.index;
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

// The result of an operator: how many tensors it processed, or why it wrote nothing.
inline int64_t reply(const TensorTable& list, const std::vector<TypedSpan>* spans) {
  constexpr int64_t kRefused = -1;  // use the general operator
  constexpr int64_t kChanged = -2;  // torch.utils.swap_tensors exchanged a tensor: make a new table
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
