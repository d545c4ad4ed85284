// Tensors that Python hands over once, so that a step takes no list of objects apart: the tensors themselves, or the
// gradients of parameters. A gradient fresh from backward has no Python object yet, and making one costs more than
// unscaling a thousand elements.
//
// No address of memory is kept: what a tensor's storage is now is read at every call, one cache line for each.
#pragma once

#include <vector>

#include "tensor_lists.h"
#include "unscale_loops.h"

namespace amplab {

class Remembered {
 public:
  // Holds the tensors, or leaves that to whoever calls: a count of our own stops torch.utils.swap_tensors, and with it
  // module.to(). Then every call has to be sure that each is alive, and is the tensor that it was.
  Remembered(std::vector<Handle> tensors, bool hold) {
    tensors_.reserve(tensors.size());
    for (const Handle& tensor : tensors) {
      tensors_.push_back(&tensor.impl());
      device_ = tensor.impl().device();
    }
    if (hold) {
      held_ = std::move(tensors);
    }
  }

  size_t size() const { return tensors_.size(); }

  // Lays out the tensors, or the gradients that they have now. False where something is not what the kernels take as it
  // comes: on the list's device, strided and without gaps, of a floating dtype, float16 only where it is allowed, sharing no
  // memory. `spans` is then of no use.
  bool lay_out(bool gradients, bool allow_half, std::vector<TypedSpan>& spans) const {
    std::vector<Place>& places = scratch<Place>();
    find(gradients, places);
    spans.reserve(places.size());
    for (const Place& place : places) {
      c10::TensorImpl& tensor = *place.tensor;
      const Dtype dtype = dtype_of(c10::typeMetaToScalarType(tensor.dtype()));
      if (!is_plain(tensor) || dtype == kDtypes || (dtype == kHalf && !allow_half)) {
        return false;
      }
      void* data = tensor.numel() == 0 ? nullptr : tensor.mutable_data();
      spans.push_back({{data, data, tensor.numel()}, dtype, dtype, place.index});
    }
    return !share_memory(spans);
  }

 private:
  struct Place {
    c10::TensorImpl* tensor;
    int index;
  };

  void find(bool gradients, std::vector<Place>& places) const {
    constexpr size_t kAhead = 4;
    places.reserve(size());
    for (size_t index = 0; index < size(); ++index) {
      prefetch(tensors_[std::min(index + kAhead, size() - 1)], sizeof(c10::TensorImpl));
      c10::TensorImpl* tensor = tensors_[index];
      if (gradients) {
        tensor = reinterpret_cast<const TensorPointer&>(std::as_const(*tensor).grad()).get();
        prefetch(tensor, sizeof(c10::TensorImpl));
      }
      if (tensor != c10::UndefinedTensorImpl::singleton()) {
        places.push_back({tensor, static_cast<int>(index)});
      }
    }
  }

  bool is_plain(const c10::TensorImpl& tensor) const {
    constexpr c10::DispatchKeySet kLazy({c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor});
    return tensor.layout() == c10::kStrided && tensor.device() == device_ && !tensor.is_python_dispatch() &&
           tensor.has_storage() && !tensor.key_set().has_any(kLazy) && tensor.is_non_overlapping_and_dense();
  }

  bool share_memory(const std::vector<TypedSpan>& spans) const {
    std::vector<Extent>& extents = scratch<Extent>();
    for (const auto& [span, dtype, output_dtype, index] : spans) {
      if (span.numel > 0) {
        extents.push_back(extent_of(span.output, span.numel * kItemSize[dtype], false, index));
      }
    }
    return find_overlap(extents, order_).has_value();
  }

  std::vector<c10::TensorImpl*> tensors_;
  c10::Device device_ = c10::kCPU;
  std::vector<Handle> held_;
  mutable std::vector<int> order_;  // by address, at the last call
};

}  // namespace amplab
