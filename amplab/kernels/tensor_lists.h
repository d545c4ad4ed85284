// What every multi-tensor operator does with its lists before the work begins: refuse what it cannot take, in the
// words of the reference, and lay the tensors out as spans of memory.
//
// Only torch's stable C interface is used (torch >= 2.10): its headers compile in a quarter of the time.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "unscale.h"

namespace amplab {

enum Dtype : int { kHalf, kBFloat16, kFloat, kDouble, kDtypes };
constexpr int64_t kItemSize[kDtypes] = {2, 2, 4, 8};

inline void check(AOTITorchError code, const char* what) {
  if (code != 0) {
    throw std::runtime_error(std::string(what) + " failed inside torch; its own message is on stderr.");
  }
}

inline void require(bool condition, const char* side, size_t index, const char* expectation) {
  if (!condition) {
    throw std::runtime_error(std::string(side) + " " + std::to_string(index) + expectation);
  }
}

// Asks for memory that will be read soon, one cache line after the other.
inline void prefetch(const void* memory, size_t bytes) {
#if defined(__GNUC__)
  constexpr size_t kLine = 64;
  for (size_t at = 0; at < bytes; at += kLine) {
    __builtin_prefetch(static_cast<const char*>(memory) + at);
  }
#else
  static_cast<void>(memory);
  static_cast<void>(bytes);
#endif
}

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
  int64_t numel() const { return get<int64_t>(aoti_torch_get_numel); }
  int64_t dim() const { return get<int64_t>(aoti_torch_get_dim); }
  const int64_t* sizes() const { return get<int64_t*>(aoti_torch_get_sizes); }
  const int64_t* strides() const { return get<int64_t*>(aoti_torch_get_strides); }
  bool is_contiguous() const { return get<bool>(aoti_torch_is_contiguous); }
  int32_t device_type() const { return get<int32_t>(aoti_torch_get_device_type); }
  int32_t device_index() const { return get<int32_t>(aoti_torch_get_device_index); }
  bool is_strided() const { return get<int32_t>(aoti_torch_get_layout) == aoti_torch_layout_strided(); }
  const void* data() const { return get<const void*>(torch_get_const_data_ptr); }
  void* mutable_data() const { return get<void*>(torch_get_mutable_data_ptr); }

  int32_t scalar_type() const { return get<int32_t>(aoti_torch_get_dtype); }

  Dtype dtype() const {
    using torch::headeronly::ScalarType;
    switch (static_cast<ScalarType>(scalar_type())) {
      case ScalarType::Half: return kHalf;
      case ScalarType::BFloat16: return kBFloat16;
      case ScalarType::Float: return kFloat;
      case ScalarType::Double: return kDouble;
      default: return kDtypes;
    }
  }

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

// A pair of tensors of one shape whose elements do not lie in memory in the same gapless order.
struct StridedPair {
  const void* input;
  void* output;
  Dtype input_dtype;
  Dtype output_dtype;
  int64_t dim;
  const int64_t* sizes;
  const int64_t* input_strides;
  const int64_t* output_strides;
};

struct TypedSpan {
  Span span;
  Dtype input_dtype;
  Dtype output_dtype;
};

// The checked lists of one call: spans for the gapless pairs, strided pairs for the rest.
class PairedLists {
 public:
  // `outputs` empty means in place.
  PairedLists(std::vector<Handle> inputs, std::vector<Handle> outputs, bool in_place, Handle found_inf,
              Handle inv_scale)
      : inputs_(std::move(inputs)),
        outputs_(std::move(outputs)),
        in_place_(in_place),
        found_inf_(std::move(found_inf)),
        inv_scale_(std::move(inv_scale)),
        device_type_(found_inf_.device_type()),
        device_index_(found_inf_.device_index()) {
    check_scalar("found_inf", found_inf_);
    check_scalar("inv_scale", inv_scale_);
    if (!in_place_ && inputs_.size() != outputs_.size()) {
      throw std::runtime_error(std::to_string(inputs_.size()) + " inputs, " + std::to_string(outputs_.size()) +
                               " outputs: expected lists of equal length.");
    }
    spans_.reserve(inputs_.size());
    for (size_t index = 0; index < inputs_.size(); ++index) {
      add(index);
    }
  }

  const std::vector<TypedSpan>& spans() const { return spans_; }
  const std::vector<StridedPair>& strided() const { return strided_; }
  float* found_inf() const { return static_cast<float*>(found_inf_.mutable_data()); }
  const float* inv_scale() const { return static_cast<const float*>(inv_scale_.data()); }
  int32_t device_index() const { return device_index_; }

 private:
  bool on_device(const Handle& tensor) const {
    return tensor.device_type() == device_type_ && tensor.device_index() == device_index_;
  }

  void check_scalar(const char* name, const Handle& scalar) const {
    if (scalar.numel() != 1 || scalar.dtype() != kFloat) {
      throw std::runtime_error(std::string(name) + ": expected one float32 element, such as torch.zeros(1).");
    }
    if (!on_device(scalar)) {
      throw std::runtime_error(std::string(name) + " is on another device than found_inf; call once per device.");
    }
  }

  Dtype check_tensor(const char* side, size_t index, const Handle& tensor) const {
    require(tensor.is_strided(), side, index, " is not strided: pass the values of a coalesced sparse gradient.");
    const Dtype dtype = tensor.dtype();
    require(dtype != kDtypes, side, index, ": expected float16, bfloat16, float32 or float64.");
    require(on_device(tensor), side, index, " is on another device than found_inf; call once per device.");
    return dtype;
  }

  void add(size_t index) {
    const Handle& input = inputs_[index];
    const Handle& output = in_place_ ? input : outputs_[index];
    const Dtype input_dtype = check_tensor("input", index, input);
    const Dtype output_dtype = in_place_ ? input_dtype : check_tensor("output", index, output);
    const int64_t numel = input.numel();
    const int64_t dim = input.dim();
    const bool same_shape = in_place_ || (dim == output.dim() && equal(input.sizes(), output.sizes(), dim));
    require(same_shape, "output", index, ": expected the shape of the input.");
    const bool contiguous = output.is_contiguous();
    require(contiguous || !repeats(output), in_place_ ? "input" : "output", index,
            " is expanded: several of its elements share one place in memory; pass a clone.");
    if (numel == 0) {
      return;
    }
    if ((contiguous && (in_place_ || input.is_contiguous())) || is_gapless(input, output)) {
      spans_.push_back({{input.data(), output.mutable_data(), numel}, input_dtype, output_dtype});
    } else {
      strided_.push_back({input.data(), output.mutable_data(), input_dtype, output_dtype, dim, input.sizes(),
                          input.strides(), output.strides()});
    }
  }

  static bool equal(const int64_t* a, const int64_t* b, int64_t dim) {
    for (int64_t d = 0; d < dim; ++d) {
      if (a[d] != b[d]) {
        return false;
      }
    }
    return true;
  }

  static bool repeats(const Handle& tensor) {
    const int64_t dim = tensor.dim();
    for (int64_t d = 0; d < dim; ++d) {
      if (tensor.strides()[d] == 0 && tensor.sizes()[d] > 1) {
        return true;
      }
    }
    return false;
  }

  // Whether both, though not contiguous, lie in memory in one order without gaps: channels_last, transposed…
  bool is_gapless(const Handle& input, const Handle& output) const {
    const int64_t dim = input.dim();
    if (!in_place_ && !equal(input.strides(), output.strides(), dim)) {
      return false;
    }
    int64_t expected = 1;  // the stride that the next dimension outwards must have
    for (int64_t found = 0; found < dim; ++found) {
      int64_t next = -1;
      for (int64_t d = 0; d < dim && next < 0; ++d) {
        if (input.strides()[d] == expected && input.sizes()[d] > 1) {
          next = d;
        }
      }
      if (next < 0) {
        break;
      }
      expected *= input.sizes()[next];
    }
    return expected == input.numel();
  }

  std::vector<Handle> inputs_;
  std::vector<Handle> outputs_;
  bool in_place_;
  Handle found_inf_;
  Handle inv_scale_;
  int32_t device_type_;
  int32_t device_index_;
  std::vector<TypedSpan> spans_;
  std::vector<StridedPair> strided_;
};

// The arguments of amplab::multi_tensor_unscale_ and of its siblings with outputs, taken from torch's stack.
inline PairedLists take_arguments(StableIValue* stack, bool in_place) {
  std::vector<Handle> inputs = take_list(stack[0]);
  std::vector<Handle> outputs = in_place ? std::vector<Handle>() : take_list(stack[1]);
  Handle found_inf(stack[in_place ? 1 : 2]);
  Handle inv_scale(stack[in_place ? 2 : 3]);
  return PairedLists(std::move(inputs), std::move(outputs), in_place, std::move(found_inf), std::move(inv_scale));
}

}  // namespace amplab
