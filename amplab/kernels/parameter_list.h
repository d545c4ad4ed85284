// Parameters that Python hands over once, so that their gradients are found at every step without Python: a gradient
// fresh from backward has no Python object yet, and making one costs more than unscaling a thousand elements.
//
// This needs c10's TensorImpl; everything else keeps to torch's stable C interface (tensor_lists.h).
#pragma once

#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>

#include <vector>

#include "tensor_lists.h"

namespace amplab {

// Owns nothing: a count of its own on a parameter would stop torch.utils.swap_tensors. So whoever calls makes sure that
// every parameter is alive, and is the tensor that it was.
class ParameterList {
 public:
  explicit ParameterList(const std::vector<Handle>& parameters) {
    parameters_.reserve(parameters.size());
    for (const Handle& parameter : parameters) {
      parameters_.push_back(pointer(parameter).get());
    }
    if (!parameters_.empty()) {
      device_ = parameters_.front()->device();
    }
  }

  // Lays out the gradients that are there. False where one of them is not what the kernels take as it comes: on the
  // first parameter's device, strided and without gaps, of a floating dtype; float16 only where it is allowed. `spans` is then of no use.
  bool lay_out_gradients(bool allow_half, std::vector<TypedSpan>& spans) const {
    std::vector<const TensorPointer*> grads;
    grads.reserve(parameters_.size());
    for (const c10::TensorImpl* parameter : parameters_) {
      const TensorPointer& grad = pointer(parameter->grad());
      if (grad.defined()) {
        prefetch(grad.get(), sizeof(c10::TensorImpl));
        grads.push_back(&grad);
      }
    }
    spans.reserve(grads.size());
    for (const TensorPointer* each : grads) {
      c10::TensorImpl& grad = **each;
      const Dtype dtype = dtype_of(grad);
      if (!is_plain(grad) || dtype == kDtypes || (dtype == kHalf && !allow_half)) {
        return false;
      }
      void* data = grad.numel() == 0 ? nullptr : grad.mutable_data();
      spans.push_back({{data, data, grad.numel()}, dtype, dtype, static_cast<int>(spans.size())});
    }
    return true;
  }

 private:
  using TensorPointer = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  // A Tensor is a pointer to its TensorImpl and no more, and a handle of the C interface is a pointer to a Tensor.
  static const TensorPointer& pointer(const at::Tensor& tensor) {
    return reinterpret_cast<const TensorPointer&>(tensor);
  }
  static const TensorPointer& pointer(const Handle& handle) {
    return *reinterpret_cast<const TensorPointer*>(handle.get());
  }

  bool is_plain(const c10::TensorImpl& grad) const {
    constexpr c10::DispatchKeySet kLazy({c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor});
    return grad.layout() == c10::kStrided && grad.device() == device_ && !grad.is_python_dispatch() &&
           grad.has_storage() && !grad.key_set().has_any(kLazy) && grad.is_non_overlapping_and_dense();
  }

  static Dtype dtype_of(const c10::TensorImpl& grad) {
    switch (c10::typeMetaToScalarType(grad.dtype())) {
      case c10::ScalarType::Half: return kHalf;
      case c10::ScalarType::BFloat16: return kBFloat16;
      case c10::ScalarType::Float: return kFloat;
      case c10::ScalarType::Double: return kDouble;
      default: return kDtypes;
    }
  }

  std::vector<const c10::TensorImpl*> parameters_;
  c10::Device device_ = c10::kCPU;
};

}  // namespace amplab
