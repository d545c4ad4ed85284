// Preparation of the lists of every multi-tensor operator: argument checks, with the messages of the reference
// (list_checks.py), and the spans of memory of the tensors.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "memory_overlap.h"
#include "tensor_reader.h"
#include "unscale.h"

namespace amplab {

inline void require(bool condition, const char* side, size_t index, const char* expectation) {
  if (!condition) {
    throw std::runtime_error(std::string(side) + " " + std::to_string(index) + expectation);
  }
}

// In Python's list format.
inline std::string printed(const int64_t* sizes, int64_t dim) {
  std::string text = "[";
  for (int64_t d = 0; d < dim; ++d) {
    text += (d == 0 ? "" : ", ") + std::to_string(sizes[d]);
  }
  return text + "]";
}

// The Python names of dtypes that no operator takes.
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

// A pair of tensors of one shape that are not dense with the same memory order.
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

// An empty vector that a thread keeps between calls: freeing its memory would make the allocator join the small blocks
// of a list of tensors and split them again at the next call.
template <class T, int place = 0>
std::vector<T>& scratch() {
  thread_local std::vector<T> kept;
  kept.clear();
  return kept;
}

// The optional outputs of an operator.
struct Receivers {
  std::optional<Handle> norm;
  std::optional<Handle> norms;
  std::optional<Handle> first_bad;
};

// nullptr if it was not requested.
template <class T>
T* receiver(const std::optional<Handle>& tensor) {
  return tensor && tensor->numel() > 0 ? static_cast<T*>(tensor->mutable_data()) : nullptr;
}

inline bool same_device(const Handle& a, const Handle& b) {
  return a.device_type() == b.device_type() && a.device_index() == b.device_index();
}

inline void check_device(const std::string& name, const Handle& tensor, const Handle& found_inf) {
  if (!same_device(tensor, found_inf)) {
    throw std::runtime_error(name + " is on another device than found_inf; call once per device.");
  }
}

inline void require_memory(const std::string& name, const Handle& tensor) {
  if (!tensor.is_in_memory()) {
    throw std::runtime_error(name + kNoMemory);
  }
}

inline void check_scalar(const char* name, const Handle& scalar, const Handle& found_inf) {
  if (scalar.numel() != 1 || scalar.dtype() != kFloat) {
    throw std::runtime_error(std::string(name) + ": expected one float32 element, such as torch.zeros(1).");
  }
  check_device(name, scalar, found_inf);
  require_memory(name, scalar);
}

inline void check_receivers(const Receivers& receivers, size_t tensors, const Handle& found_inf) {
  if (receivers.norm) {
    check_scalar("norm", *receivers.norm, found_inf);
  }
  if (receivers.norms) {
    const Handle& norms = *receivers.norms;
    const auto count = static_cast<int64_t>(tensors);
    if (norms.dim() != 1 || norms.numel() != count || norms.dtype() != kFloat || !norms.is_contiguous()) {
      throw std::runtime_error("norms: expected a float32 element for each tensor, such as torch.zeros(" +
                               std::to_string(count) + ").");
    }
    check_device("norms", norms, found_inf);
    require_memory("norms", norms);
  }
  if (receivers.first_bad) {
    const Handle& first_bad = *receivers.first_bad;
    if (first_bad.numel() != 1 || first_bad.scalar_type() != torch::headeronly::ScalarType::Long) {
      throw std::runtime_error("first_bad: expected one int64 element, such as torch.tensor(-1).");
    }
    check_device("first_bad", first_bad, found_inf);
    require_memory("first_bad", first_bad);
  }
}

// The checked lists of one call: spans for dense pairs, strided pairs for the rest.
class PairedLists {
 public:
  // In place, `outputs` is empty. With Write::nothing it is also empty, and the spans' outputs must not be written.
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
    check_scalar("found_inf", found_inf_, found_inf_);
    check_scalar("inv_scale", inv_scale_, found_inf_);
    if (!in_place_ && inputs_.size() != outputs_.size()) {
      throw std::runtime_error(std::to_string(inputs_.size()) + " inputs, " + std::to_string(outputs_.size()) +
                               " outputs: expected lists of equal length.");
    }
    spans_.reserve(inputs_.size());
    for (size_t index = 0; index < inputs_.size(); ++index) {
      add(index);
    }
    check_receivers(receivers_, size(), found_inf_);
    check_memory();
  }

  size_t size() const { return inputs_.size(); }
  const std::vector<TypedSpan>& spans() const { return spans_; }
  const std::vector<StridedPair>& strided() const { return strided_; }
  float* found_inf() const { return static_cast<float*>(found_inf_.mutable_data()); }
  const float* inv_scale() const { return static_cast<const float*>(inv_scale_.data()); }
  int32_t device_index() const { return device_index_; }

  float* norm() const { return receiver<float>(receivers_.norm); }
  float* norms() const { return receiver<float>(receivers_.norms); }
  int64_t* first_bad() const { return receiver<int64_t>(receivers_.first_bad); }

 private:
  static constexpr int kBeside = 5;
  static constexpr const char* kBesideNames[kBeside] = {"found_inf", "inv_scale", "norm", "norms", "first_bad"};

  bool on_device(const Handle& tensor) const {
    return tensor.device_type() == device_type_ && tensor.device_index() == device_index_;
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
    require(tensor.is_in_memory(), side, index, kNoMemory);
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

  // An output may be its own input. Of a tensor with gaps only the first element counts: the columns of a matrix
  // interleave, but do not overlap.
  void check_memory() const {
    std::vector<Extent>& extents = scratch<Extent>();
    extents.reserve(kBeside + (in_place_ ? inputs_.size() : 2 * inputs_.size()));
    add_beside(extents);
    const auto add_pair = [&](Extent input, Extent output) {
      extents.push_back(output);
      if (input.begin != output.begin || input.end != output.end) {
        extents.push_back(input);
      }
    };
    for (const TypedSpan& each : spans_) {
      if (!writes_) {
        break;
      }
      add_pair(extent_of(each.span.input, each.span.numel * kItemSize[each.input_dtype], true, each.index),
               extent_of(each.span.output, each.span.numel * kItemSize[each.output_dtype], false, each.index));
    }
    for (const StridedPair& each : strided_) {
      if (!writes_) {
        break;
      }
      const bool gapless_input = !in_place_ && is_gapless(inputs_[each.index], inputs_[each.index]);
      const bool gapless_output = !in_place_ && is_gapless(outputs_[each.index], outputs_[each.index]);
      const int64_t numel = inputs_[each.index].numel();
      add_pair(extent_of(each.input, (gapless_input ? numel : 1) * kItemSize[each.input_dtype], true, each.index),
               extent_of(each.output, (gapless_output ? numel : 1) * kItemSize[each.output_dtype], false, each.index));
    }
    thread_local std::vector<int> order;
    require_apart(extents, order, [&](const Extent& each) -> std::string {
      if (each.index < 0) {
        return kBesideNames[each.index + kBeside];
      }
      return (each.is_input || in_place_ ? "input " : "output ") + std::to_string(each.index);
    });
  }

  // The tensors beside the lists, at the indices below 0; all but inv_scale are written.
  void add_beside(std::vector<Extent>& extents) const {
    const auto add = [&](const void* memory, int64_t bytes, int place, bool is_input = false) {
      if (memory != nullptr) {
        extents.push_back(extent_of(memory, bytes, is_input, place - kBeside));
      }
    };
    add(found_inf(), sizeof(float), 0);
    add(inv_scale(), sizeof(float), 1, true);
    add(norm(), sizeof(float), 2);
    add(norms(), static_cast<int64_t>(size() * sizeof(float)), 3);
    add(first_bad(), sizeof(int64_t), 4);
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

  // Whether both, although not contiguous, are dense in the same order: channels_last, transposed…
  static bool is_gapless(const Handle& input, const Handle& output) {
    const int64_t dim = input.dim();
    if (&input != &output && !equal(input.strides(), output.strides(), dim)) {
      return false;
    }
    int64_t expected = 1;  // the stride that the next outer dimension must have
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
  std::vector<TypedSpan>& spans_ = scratch<TypedSpan>();
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
