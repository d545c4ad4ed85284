// The arguments of amplab::update_scale_, taken from torch's stack and checked with the messages of the reference.
#pragma once

#include <optional>

#include "tensor_lists.h"
#include "update_scale.h"

namespace amplab::scale {

class Arguments {
 public:
  explicit Arguments(StableIValue* stack)
      : scale_(stack[0]), growth_tracker_(stack[1]), hysteresis_tracker_(take_optional(stack[2])), found_inf_(stack[3]) {
    using torch::stable::detail::to;
    rule_ = {to<double>(stack[4]), to<double>(stack[5]), to<int64_t>(stack[6]), to<int64_t>(stack[7]),
             to<double>(stack[8]), to<double>(stack[9]), to<bool>(stack[10]),   to<bool>(stack[11]),
             to<bool>(stack[12])};
    check_tensors();
    expect(rule_.growth_interval >= 1,
           "growth_interval=" + std::to_string(rule_.growth_interval) + ": expected at least one step.");
    expect(rule_.hysteresis >= 1 && rule_.hysteresis < int64_t{1} << 31,
           "hysteresis=" + std::to_string(rule_.hysteresis) +
               ": expected 1, which backs off at every overflow, or more.");
  }

  const Constants& rule() const { return rule_; }
  bool is_double() const { return scale_.dtype() == kDouble; }
  void* scale() const { return scale_.mutable_data(); }
  int32_t* growth_tracker() const { return static_cast<int32_t*>(growth_tracker_.mutable_data()); }
  int32_t* hysteresis_tracker() const {
    return hysteresis_tracker_ ? static_cast<int32_t*>(hysteresis_tracker_->mutable_data()) : nullptr;
  }
  const float* found_inf() const { return static_cast<const float*>(found_inf_.data()); }
  int32_t device_index() const { return scale_.device_index(); }

 private:
  static std::optional<Handle> take_optional(StableIValue value) {
    const auto boxed = torch::stable::detail::to<std::optional<AtenTensorHandle>>(value);
    return boxed ? std::optional<Handle>(torch::stable::detail::from(*boxed)) : std::nullopt;
  }

  static void expect(bool condition, const std::string& otherwise) {
    if (!condition) {
      throw std::runtime_error(otherwise);
    }
  }

  static bool is_int32(const Handle& tensor) {
    return tensor.numel() == 1 && tensor.scalar_type() == torch::headeronly::ScalarType::Int;
  }

  void check_tensors() const {
    const Dtype dtype = scale_.dtype();
    expect(scale_.numel() == 1 && (dtype == kFloat || dtype == kDouble),
           "scale: expected one float32 or float64 element, such as torch.tensor(65536.0).");
    require_memory("scale", scale_);
    expect(is_int32(growth_tracker_),
           "growth_tracker: expected one int32 element, such as torch.zeros(1, dtype=torch.int32).");
    expect(!hysteresis_tracker_ || is_int32(*hysteresis_tracker_),
           "hysteresis_tracker: expected one int32 element, or None to back off at every overflow.");
    expect(found_inf_.numel() == 1 && found_inf_.dtype() == kFloat,
           "found_inf: expected one float32 element, such as torch.zeros(1).");
    check_device("growth_tracker", growth_tracker_);
    if (hysteresis_tracker_) {
      check_device("hysteresis_tracker", *hysteresis_tracker_);
    }
    check_device("found_inf", found_inf_);
  }

  void check_device(const char* name, const Handle& tensor) const {
    expect(tensor.device_type() == scale_.device_type() && tensor.device_index() == scale_.device_index(),
           std::string(name) + " is on another device than scale; keep them together.");
    require_memory(name, tensor);
  }

  Handle scale_;
  Handle growth_tracker_;
  std::optional<Handle> hysteresis_tracker_;
  Handle found_inf_;
  Constants rule_;
};

}  // namespace amplab::scale
