// The arguments of every multi-tensor step, taken from torch's stack, checked and laid out. Their order is
//
//   params, grads, states…, steps (if the rule counts them), copies, grad_factor, found_inf, maximize, numbers…
//
// The rule reads the numbers itself. Only torch's stable C interface is used, as in tensor_lists.h.
#pragma once

#include <algorithm>
#include <optional>

#include "tensor_lists.h"

namespace amplab {

constexpr int kMostStates = 3;

// One of the tensors that an item of work reads or writes.
struct Operand {
  char* data = nullptr;              // null: missing
  Dtype dtype = kDtypes;
  const int64_t* strides = nullptr;  // null: dense, in the same order as the item's other dense operands
};

// A parameter with its gradient, states, copy and step count.
struct StepItem {
  Operand grad, param, copy;
  Operand states[kMostStates];
  int64_t numel;
  int64_t dim;
  const int64_t* sizes;
  float* step;  // the number of earlier steps; null if the rule does not count
  int index;    // in the list
};

// The numbers at the end of the stack, in order.
class StepNumbers {
 public:
  explicit StepNumbers(const StableIValue* next) : next_(next) {}
  double number() { return torch::stable::detail::to<double>(*next_++); }
  bool flag() { return torch::stable::detail::to<bool>(*next_++); }

 private:
  const StableIValue* next_;
};

class StepLists {
 public:
  // `states_may_miss`: the lists of states may be empty, for a rule that works without them.
  StepLists(const StableIValue* stack, int states, bool with_steps, bool states_may_miss = false)
      : params_(take_list(*stack++)) {
    grads_ = take_list(*stack++);
    for (int state = 0; state < states; ++state) {
      states_[state] = take_list(*stack++);
    }
    steps_ = with_steps ? take_list(*stack++) : std::vector<Handle>();
    copies_ = take_list(*stack++);
    take_scalar(*stack++, factor_);
    take_scalar(*stack++, found_inf_);
    maximize_ = torch::stable::detail::to<bool>(*stack++);
    numbers_ = stack;
    check_lengths(states, with_steps, states_may_miss);
    const int present = has_states() ? states : 0;
    items_.reserve(params_.size());
    for (size_t index = 0; index < params_.size(); ++index) {
      add(index, present);
    }
    check_memory(present);
  }

  const std::vector<StepItem>& items() const { return items_; }        // those with elements
  const std::vector<float*>& step_counts() const { return counts_; }   // of all parameters
  StepNumbers numbers() const { return StepNumbers(numbers_); }
  const float* factor() const { return scalar("grad_factor", factor_); }      // null: 1
  const float* found_inf() const { return scalar("found_inf", found_inf_); }  // null: 0
  float sign() const { return maximize_ ? -1.0f : 1.0f; }
  bool has_states() const { return !states_[0].empty(); }
  bool empty() const { return params_.empty(); }
  int32_t device_index() const { return params_[0].device_index(); }

 private:
  static void take_scalar(StableIValue value, std::optional<Handle>& scalar) {
    const auto handle = torch::stable::detail::to<std::optional<AtenTensorHandle>>(value);
    if (handle.has_value()) {
      scalar.emplace(torch::stable::detail::from(*handle));
    }
  }

  const float* scalar(const char* name, const std::optional<Handle>& scalar) const {
    if (!scalar.has_value()) {
      return nullptr;
    }
    if (scalar->numel() != 1 || scalar->dtype() != kFloat) {
      throw std::runtime_error(std::string(name) + ": expected one float32 element, such as torch.ones(1).");
    }
    if (!params_.empty() && !on_device(*scalar)) {
      throw std::runtime_error(std::string(name) + " is on another device than the parameters.");
    }
    require_memory(name, *scalar);
    return static_cast<const float*>(scalar->data());
  }

  bool on_device(const Handle& tensor) const {
    return tensor.device_type() == params_[0].device_type() && tensor.device_index() == params_[0].device_index();
  }

  void check_length(const char* name, const std::vector<Handle>& list, bool may_be_empty) const {
    if (list.size() != params_.size() && !(may_be_empty && list.empty())) {
      throw std::runtime_error(std::to_string(params_.size()) + " params, " + std::to_string(list.size()) + " " + name +
                               ": expected lists of equal length.");
    }
  }

  void check_lengths(int states, bool with_steps, bool states_may_miss) const {
    check_length("grads", grads_, false);
    check_length("copies", copies_, true);
    check_length("steps", steps_, !with_steps);
    for (int state = 0; state < states; ++state) {
      check_length("states", states_[state], states_may_miss);
    }
  }

  void check_tensor(const char* side, size_t index, const Handle& tensor, const Handle& param, bool written) const {
    require(tensor.is_strided(), side, index, " is not strided: sparse gradients have optimizers of their own.");
    require(tensor.dtype() != kDtypes, side, index, ": expected float16, bfloat16, float32 or float64.");
    require(on_device(tensor), side, index, " is on another device than the first parameter; call once per device.");
    const bool same_shape = tensor.dim() == param.dim() && equal(tensor.sizes(), param.sizes(), param.dim());
    require(same_shape, side, index, ": expected the shape of its parameter.");
    require(tensor.is_in_memory(), side, index, kNoMemory);
    require(!written || tensor.is_contiguous() || !repeats(tensor), side, index,
            " is expanded: several of its elements share one place in memory; pass a clone.");
  }

  void add(size_t index, int states) {
    const Handle& param = params_[index];
    check_tensor("param", index, param, param, true);
    check_tensor("grad", index, grads_[index], param, false);
    StepItem item{};
    if (!steps_.empty()) {
      item.step = count(index);
      counts_.push_back(item.step);
    }
    for (int state = 0; state < states; ++state) {
      check_tensor("state", index, states_[state][index], param, true);
    }
    if (!copies_.empty()) {
      check_tensor("copy", index, copies_[index], param, true);
    }
    item.index = static_cast<int>(index);
    item.numel = param.numel();
    item.dim = param.dim();
    item.sizes = param.sizes();
    if (item.numel == 0) {
      return;
    }
    bool alike = is_alike(grads_[index], param) && (copies_.empty() || is_alike(copies_[index], param));
    for (int state = 0; state < states; ++state) {
      alike = alike && is_alike(states_[state][index], param);
    }
    const bool in_one_order = alike && (param.is_contiguous() || is_gapless(param));
    item.param = operand(param, in_one_order);
    item.grad = operand(grads_[index], in_one_order);
    for (int state = 0; state < states; ++state) {
      item.states[state] = operand(states_[state][index], in_one_order);
    }
    if (!copies_.empty()) {
      item.copy = operand(copies_[index], in_one_order);
    }
    items_.push_back(item);
  }

  // Only gradients are not written, and may share memory.
  void check_memory(int states) const {
    std::vector<Extent>& extents = scratch<Extent>();
    extents.reserve(items_.size() * (4 + states));
    const auto count = static_cast<int>(params_.size());
    const auto add_operand = [&](const StepItem& item, const Operand& operand, int rank, bool only_read = false) {
      if (operand.data != nullptr) {
        const bool gapless = operand.strides == nullptr || is_gapless(item.sizes, operand.strides, item.dim, item.numel);
        const int64_t bytes = (gapless ? item.numel : 1) * kItemSize[operand.dtype];
        extents.push_back(extent_of(operand.data, bytes, only_read, rank * count + item.index));
      }
    };
    for (const StepItem& item : items_) {
      add_operand(item, item.param, 0);
      for (int state = 0; state < states; ++state) {
        add_operand(item, item.states[state], 1 + state);
      }
      add_operand(item, item.copy, states + 1);
      add_operand(item, item.grad, states + 3, true);
    }
    for (size_t index = 0; index < counts_.size(); ++index) {
      extents.push_back(extent_of(counts_[index], sizeof(float), false, (states + 2) * count + static_cast<int>(index)));
    }
    thread_local std::vector<int> order;
    require_apart(extents, order, [&](const Extent& each) {
      const char* const after[] = {"copy ", "step ", "grad "};
      const int rank = each.index / count;
      const char* side = rank == 0 ? "param " : rank <= states ? "state " : after[rank - states - 1];
      return side + std::to_string(each.index % count);
    });
  }

  float* count(size_t index) const {
    const Handle& step = steps_[index];
    require(step.numel() == 1 && step.dtype() == kFloat, "step", index, ": expected one float32 element.");
    require(on_device(step), "step", index, " is on another device than its parameter.");
    require(step.is_in_memory(), "step", index, kNoMemory);
    return static_cast<float*>(step.mutable_data());
  }

  // Whether both have the same memory order.
  static bool is_alike(const Handle& tensor, const Handle& param) {
    return (tensor.is_contiguous() && param.is_contiguous()) ||
           equal(tensor.strides(), param.strides(), param.dim());
  }

  static Operand operand(const Handle& tensor, bool in_one_order) {
    char* data = static_cast<char*>(const_cast<void*>(tensor.data()));
    return {data, tensor.dtype(), in_one_order || tensor.is_contiguous() ? nullptr : tensor.strides()};
  }

  static bool equal(const int64_t* a, const int64_t* b, int64_t dim) { return std::equal(a, a + dim, b); }

  static bool repeats(const Handle& tensor) {
    for (int64_t d = 0; d < tensor.dim(); ++d) {
      if (tensor.strides()[d] == 0 && tensor.sizes()[d] > 1) {
        return true;
      }
    }
    return false;
  }

  // Whether it is dense, in any order of its dimensions.
  static bool is_gapless(const Handle& tensor) {
    return is_gapless(tensor.sizes(), tensor.strides(), tensor.dim(), tensor.numel());
  }

  static bool is_gapless(const int64_t* sizes, const int64_t* strides, int64_t dim, int64_t numel) {
    int64_t expected = 1;  // the stride that the next outer dimension must have
    for (int64_t found = 0; found < dim; ++found) {
      for (int64_t d = 0; d < dim; ++d) {
        if (strides[d] == expected && sizes[d] > 1) {
          expected *= sizes[d];
          break;
        }
      }
    }
    return expected == numel;
  }

  std::vector<Handle> params_, grads_, steps_, copies_;
  std::vector<Handle> states_[kMostStates];
  std::optional<Handle> factor_, found_inf_;
  bool maximize_ = false;
  const StableIValue* numbers_ = nullptr;
  std::vector<StepItem> items_;
  std::vector<float*> counts_;
};

}  // namespace amplab
