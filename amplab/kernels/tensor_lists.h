// What every multi-tensor operator does with its lists before the work begins: refuse what it cannot take, in the
// words of the reference (list_checks.py), and lay the tensors out as spans of memory.
//
// Only torch's stable C interface is used (torch >= 2.10): its headers compile in a quarter of the time.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "memory_overlap.h"
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

// As Python prints the list.
inline std::string printed(const int64_t* sizes, int64_t dim) {
  std::string text = "[";
  for (int64_t d = 0; d < dim; ++d) {
    text += (d == 0 ? "" : ", ") + std::to_string(sizes[d]);
  }
  return text + "]";
}

// The dtypes that no operator takes, as Python names them.
inline const char* dtype_name(torch::headeronly::ScalarType type) {
  using torch::headeronly::ScalarType;
  switch (type) {
    case ScalarType::Bool: return "bool";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Char: return "int8";
    case ScalarType::Short: return "int16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::ComplexHalf: return "complex32";
    case ScalarType::ComplexFloat: return "complex64";
    case ScalarType::ComplexDouble: return "complex128";
    case ScalarType::Float8_e5m2: return "float8_e5m2";
    case ScalarType::Float8_e4m3fn: return "float8_e4m3fn";
    default: return torch::headeronly::toString(type);
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

  torch::headeronly::ScalarType scalar_type() const {
    return static_cast<torch::headeronly::ScalarType>(get<int32_t>(aoti_torch_get_dtype));
  }
  Dtype dtype() const {
    using torch::headeronly::ScalarType;
    switch (scalar_type()) {
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

inline std::optional<Handle> take_optional(StableIValue value) {
  const auto handle = torch::stable::detail::to<std::optional<AtenTensorHandle>>(value);
  return handle ? std::optional<Handle>(Handle(torch::stable::detail::from(*handle))) : std::nullopt;
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
  int index;  // in the list
};

struct TypedSpan {
  Span span;
  Dtype input_dtype;
  Dtype output_dtype;
  int index;  // in the list
};

// What an operator is asked to tell besides found_inf.
struct Receivers {
  std::optional<Handle> norm;
  std::optional<Handle> norms;
  std::optional<Handle> first_bad;
};

// The checked lists of one call: spans for the gapless pairs, strided pairs for the rest.
class PairedLists {
 public:
  // In place, `outputs` is empty; with Write::nothing it is, too, and the spans' outputs are not to be written.
  PairedLists(std::vector<Handle> inputs, std::vector<Handle> outputs, bool in_place, Handle found_inf,
              Handle inv_scale, Receivers receivers = {}, Write write = Write::replace)
      : inputs_(std::move(inputs)),
        outputs_(std::move(outputs)),
        in_place_(in_place),
        writes_(write != Write::nothing),
        found_inf_(std::move(found_inf)),
        inv_scale_(std::move(inv_scale)),
        receivers_(std::move(receivers)),
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
    check_receivers();
    if (writes_) {
      check_memory();
    }
  }

  size_t size() const { return inputs_.size(); }
  const std::vector<TypedSpan>& spans() const { return spans_; }
  const std::vector<StridedPair>& strided() const { return strided_; }
  float* found_inf() const { return static_cast<float*>(found_inf_.mutable_data()); }
  const float* inv_scale() const { return static_cast<const float*>(inv_scale_.data()); }
  int32_t device_index() const { return device_index_; }

  // nullptr where it was not asked for.
  float* norm() const { return receiver<float>(receivers_.norm); }
  float* norms() const { return receiver<float>(receivers_.norms); }
  int64_t* first_bad() const { return receiver<int64_t>(receivers_.first_bad); }

 private:
  template <class T>
  static T* receiver(const std::optional<Handle>& tensor) {
    return tensor && tensor->numel() > 0 ? static_cast<T*>(tensor->mutable_data()) : nullptr;
  }

  bool on_device(const Handle& tensor) const {
    return tensor.device_type() == device_type_ && tensor.device_index() == device_index_;
  }

  void check_device(const std::string& name, const Handle& tensor) const {
    if (!on_device(tensor)) {
      throw std::runtime_error(name + " is on another device than found_inf; call once per device.");
    }
  }

  void check_scalar(const char* name, const Handle& scalar) const {
    if (scalar.numel() != 1 || scalar.dtype() != kFloat) {
      throw std::runtime_error(std::string(name) + ": expected one float32 element, such as torch.zeros(1).");
    }
    check_device(name, scalar);
  }

  void check_receivers() const {
    if (receivers_.norm) {
      check_scalar("norm", *receivers_.norm);
    }
    if (receivers_.norms) {
      const Handle& norms = *receivers_.norms;
      const auto count = static_cast<int64_t>(size());
      if (norms.dim() != 1 || norms.numel() != count || norms.dtype() != kFloat || !norms.is_contiguous()) {
        throw std::runtime_error("norms: expected a float32 element for each tensor, such as torch.zeros(" +
                                 std::to_string(count) + ").");
      }
      check_device("norms", norms);
    }
    if (receivers_.first_bad) {
      const Handle& first_bad = *receivers_.first_bad;
      if (first_bad.numel() != 1 || first_bad.scalar_type() != torch::headeronly::ScalarType::Long) {
        throw std::runtime_error("first_bad: expected one int64 element, such as torch.tensor(-1).");
      }
      check_device("first_bad", first_bad);
    }
  }

  Dtype check_tensor(const char* side, size_t index, const Handle& tensor) const {
    require(tensor.is_strided(), side, index, " is not strided: pass the values of a coalesced sparse gradient.");
    const Dtype dtype = tensor.dtype();
    if (dtype == kDtypes) {
      throw std::runtime_error(std::string(side) + " " + std::to_string(index) + " is " +
                               dtype_name(tensor.scalar_type()) +
                               ": expected float16, bfloat16, float32 or float64.");
    }
    require(on_device(tensor), side, index, " is on another device than found_inf; call once per device.");
    return dtype;
  }

  void check_shape(size_t index, const Handle& input, const Handle& output) const {
    const int64_t dim = input.dim();
    if (dim != output.dim() || !equal(input.sizes(), output.sizes(), dim)) {
      throw std::runtime_error("output " + std::to_string(index) + " has shape " +
                               printed(output.sizes(), output.dim()) + ": expected its input's, " +
                               printed(input.sizes(), dim) + ".");
    }
  }

  void add(size_t index) {
    const Handle& input = inputs_[index];
    const Handle& output = in_place_ ? input : outputs_[index];
    const Dtype input_dtype = check_tensor("input", index, input);
    Dtype output_dtype = input_dtype;
    if (!in_place_) {
      output_dtype = check_tensor("output", index, output);
      check_shape(index, input, output);
    }
    const int64_t numel = input.numel();
    const bool contiguous = output.is_contiguous();
    require(contiguous || !writes_ || !repeats(output), in_place_ ? "input" : "output", index,
            " is expanded: several of its elements share one place in memory; pass a clone.");
    if (numel == 0) {
      return;
    }
    void* written = writes_ ? output.mutable_data() : const_cast<void*>(input.data());
    if ((contiguous && (in_place_ || input.is_contiguous())) || is_gapless(input, output)) {
      spans_.push_back({{input.data(), written, numel}, input_dtype, output_dtype, static_cast<int>(index)});
    } else {
      strided_.push_back({input.data(), written, input_dtype, output_dtype, input.dim(), input.sizes(),
                          input.strides(), output.strides(), static_cast<int>(index)});
    }
  }

  // An output may be its own input. A tensor with gaps is looked up by its first element alone: columns of one matrix
  // interleave and do not overlap.
  void check_memory() const {
    std::vector<Extent> extents;
    extents.reserve(in_place_ ? inputs_.size() : 2 * inputs_.size());
    const auto add_pair = [&](Extent input, Extent output) {
      extents.push_back(output);
      if (input.begin != output.begin || input.end != output.end) {
        extents.push_back(input);
      }
    };
    for (const TypedSpan& each : spans_) {
      add_pair(extent_of(each.span.input, each.span.numel * kItemSize[each.input_dtype], true, each.index),
               extent_of(each.span.output, each.span.numel * kItemSize[each.output_dtype], false, each.index));
    }
    for (const StridedPair& each : strided_) {
      const bool gapless_input = !in_place_ && is_gapless(inputs_[each.index], inputs_[each.index]);
      const bool gapless_output = !in_place_ && is_gapless(outputs_[each.index], outputs_[each.index]);
      const int64_t numel = inputs_[each.index].numel();
      add_pair(extent_of(each.input, (gapless_input ? numel : 1) * kItemSize[each.input_dtype], true, each.index),
               extent_of(each.output, (gapless_output ? numel : 1) * kItemSize[each.output_dtype], false, each.index));
    }
    require_apart(extents, in_place_);
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
  static bool is_gapless(const Handle& input, const Handle& output) {
    const int64_t dim = input.dim();
    if (&input != &output && !equal(input.strides(), output.strides(), dim)) {
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
  bool writes_;
  Handle found_inf_;
  Handle inv_scale_;
  Receivers receivers_;
  int32_t device_type_;
  int32_t device_index_;
  std::vector<TypedSpan> spans_;
  std::vector<StridedPair> strided_;
};

// The arguments of amplab::multi_tensor_unscale_ and of its siblings, taken from torch's stack: one list or two,
// found_inf, inv_scale, norm, norms, first_bad.
inline PairedLists take_arguments(StableIValue* stack, bool in_place, Write write = Write::replace) {
  std::vector<Handle> inputs = take_list(stack[0]);
  std::vector<Handle> outputs = in_place ? std::vector<Handle>() : take_list(stack[1]);
  const int next = in_place ? 1 : 2;
  Handle found_inf(stack[next]);
  Handle inv_scale(stack[next + 1]);
  Receivers receivers{take_optional(stack[next + 2]), take_optional(stack[next + 3]), take_optional(stack[next + 4])};
  return PairedLists(std::move(inputs), std::move(outputs), in_place, std::move(found_inf), std::move(inv_scale),
                     std::move(receivers), write);
}

}  // namespace amplab
