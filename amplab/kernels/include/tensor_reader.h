// A tensor in a kernel, taken from torch's stack.
//
// Through torch's stable C interface (torch >= 2.10): its headers compile in a quarter of the time. On the CPU the
// fields are read from c10's class directly: ten calls for each of a thousand small tensors take measurable time.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#if !defined(__CUDACC__)
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#endif

#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace amplab {

enum Dtype : int { kHalf, kBFloat16, kFloat, kDouble, kDtypes };
constexpr int64_t kItemSize[kDtypes] = {2, 2, 4, 8};

inline void check(AOTITorchError code, const char* what) {
  if (code != 0) {
    throw std::runtime_error(std::string(what) + " failed inside torch; its own message is on stderr.");
  }
}

inline Dtype dtype_of(torch::headeronly::ScalarType type) {
  using torch::headeronly::ScalarType;
  switch (type) {
    case ScalarType::Half: return kHalf;
    case ScalarType::BFloat16: return kBFloat16;
    case ScalarType::Float: return kFloat;
    case ScalarType::Double: return kDouble;
    default: return kDtypes;
  }
}

#if !defined(__CUDACC__)
// A Tensor is just a pointer to its TensorImpl, and a handle of the C interface is a pointer to a Tensor.
using TensorPointer = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// Whether the elements of a strided tensor can be read. A program can free the storage under a tensor, and a ZeroTensor
// of forward-mode AD has none: torch's own ops would crash.
inline bool is_in_memory(const c10::TensorImpl& tensor) {
  const int64_t numel = tensor.numel();
  if (numel == 0) {
    return true;
  }
  int64_t spanned = numel;
  if (!tensor.is_contiguous()) {
    spanned = 1;
    for (int64_t d = 0; d < tensor.dim(); ++d) {
      spanned += (tensor.sizes()[d] - 1) * tensor.strides()[d];
    }
  }
  const c10::Storage& storage = tensor.storage();
  const auto bytes = static_cast<size_t>(tensor.storage_offset() + spanned) * tensor.itemsize();
  return storage.data() != nullptr && storage.nbytes() >= bytes;
}
#endif

constexpr const char* kNoMemory = " has no memory: its storage was freed, or it is a ZeroTensor; pass a clone.";

// Owns one reference to a tensor.
class Handle {
 public:
  explicit Handle(StableIValue value) : tensor_(torch::stable::detail::to<AtenTensorHandle>(value)) {}
  Handle(Handle&& other) noexcept : tensor_(std::exchange(other.tensor_, nullptr)) {}
  Handle& operator=(Handle&&) = delete;
  ~Handle() {
    if (tensor_ != nullptr) {
      aoti_torch_delete_tensor_object(tensor_);
    }
  }

  AtenTensorHandle get() const { return tensor_; }
  Dtype dtype() const { return dtype_of(scalar_type()); }

#if defined(__CUDACC__)
  int64_t numel() const { return get<int64_t>(aoti_torch_get_numel); }
  int64_t dim() const { return get<int64_t>(aoti_torch_get_dim); }
  const int64_t* sizes() const { return get<int64_t*>(aoti_torch_get_sizes); }
  const int64_t* strides() const { return get<int64_t*>(aoti_torch_get_strides); }
  bool is_contiguous() const { return get<bool>(aoti_torch_is_contiguous); }
  int32_t device_type() const { return get<int32_t>(aoti_torch_get_device_type); }
  int32_t device_index() const { return get<int32_t>(aoti_torch_get_device_index); }
  bool is_strided() const { return get<int32_t>(aoti_torch_get_layout) == aoti_torch_layout_strided(); }
  const void* data() const { return get<const void*>(torch_get_const_data_ptr); }
  // Less than below, since each field is a call: CUDA itself reports an address that nothing is at.
  bool is_in_memory() const { return numel() == 0 || data() != nullptr; }
  void* mutable_data() const { return get<void*>(torch_get_mutable_data_ptr); }
  torch::headeronly::ScalarType scalar_type() const {
    return static_cast<torch::headeronly::ScalarType>(get<int32_t>(aoti_torch_get_dtype));
  }
#else
  int64_t numel() const { return impl().numel(); }
  int64_t dim() const { return impl().dim(); }
  const int64_t* sizes() const { return impl().sizes().data(); }
  const int64_t* strides() const { return impl().strides().data(); }
  bool is_contiguous() const { return impl().is_contiguous(); }
  int32_t device_type() const { return static_cast<int32_t>(impl().device_type()); }
  int32_t device_index() const { return impl().device().index(); }
  bool is_strided() const { return impl().layout() == c10::kStrided; }
  const void* data() const { return impl().data(); }
  bool is_in_memory() const { return amplab::is_in_memory(impl()); }
  void* mutable_data() const { return impl().mutable_data(); }
  torch::headeronly::ScalarType scalar_type() const { return c10::typeMetaToScalarType(impl().dtype()); }

  const TensorPointer& pointer() const { return *reinterpret_cast<const TensorPointer*>(tensor_); }
  c10::TensorImpl& impl() const { return *pointer(); }
#endif

 private:
  template <class T>
  T get(AOTITorchError (*getter)(AtenTensorHandle, T*)) const {
    T value;
    check(getter(tensor_, &value), "Reading a tensor");
    return value;
  }

  AtenTensorHandle tensor_;
};

inline std::vector<Handle> take_list(StableIValue value) {
  const auto list = torch::stable::detail::to<StableListHandle>(value);
  size_t size = 0;
  std::vector<Handle> handles;
  check(torch_list_size(list, &size), "Reading a list");
  handles.reserve(size);
  for (size_t index = 0; index < size; ++index) {
    StableIValue element;
    check(torch_list_get_item(list, index, &element), "Reading a list");
    handles.emplace_back(element);
  }
  check(torch_delete_list(list), "Releasing a list");
  return handles;
}

inline std::optional<Handle> take_optional(StableIValue value) {
  const auto handle = torch::stable::detail::to<std::optional<AtenTensorHandle>>(value);
  return handle ? std::optional<Handle>(Handle(torch::stable::detail::from(*handle))) : std::nullopt;
}

}  // namespace amplab
