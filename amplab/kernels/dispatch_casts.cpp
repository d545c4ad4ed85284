// Casts as a boxed kernel in PyTorch's dispatcher; dispatch_casts.py calls what is exported at the end.
//
// It is registered for AutocastIPU, an autocast key that PyTorch does not use and that no tensor of this process has.
// The key takes part in dispatch only in threads that include it, so torch.autocast, which has its own keys, and all
// other threads are not affected. A thread has one active plan at a time: a policy for each op, and a dtype.
#include <ATen/core/Tensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch::autograd {
TORCH_API int get_current_graph_task_id();  // -1 outside backward
}

namespace {

constexpr c10::DispatchKey kKey = c10::DispatchKey::AutocastIPU;

// As in dispatch_casts.py.
enum Cast : uint8_t { kNone, kLower, kFloat32, kSetDtype, kPromote, kMatchSelf, kBanned, kBannedInPlace };
constexpr uint8_t kOnCpu = 0x40;    // only if a tensor is on the CPU
constexpr uint8_t kProduct = 0x80;  // fp32 accumulation if all floating tensors are float16 on the CPU

struct Plan {
  std::vector<uint8_t> casts;  // by op
  at::ScalarType dtype;
  bool accumulates;
};

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

struct Entry {
  WeakTensor weight;
  int64_t version;
  const void* data;
  at::Tensor copy;
};

struct Thread {
  const Plan* plan = nullptr;
  int task = -1;  // the graph task in which the plan was entered: ops of a backward are not cast
  int torch_nesting = 0;  // how many regions of torch.autocast were open then
  std::unordered_map<uintptr_t, Entry> cache[2];  // by compute dtype: float16, bfloat16
};
thread_local Thread here;

std::vector<std::string> refusals;  // by op, for banned rows

bool is_half(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }
bool is_castable(at::ScalarType type) { return is_half(type) || type == at::kFloat; }

// The loops of argument_casts.py. For a tensor subclass the op runs with its original arguments.
template <typename Visit>  // bool(const at::Tensor&), false to stop
bool every_tensor(const c10::IValue& value, Visit&& visit) {
  if (value.isTensor()) return !value.toTensor().defined() || visit(value.toTensor());
  if (!value.isList()) return true;
  for (const c10::IValue item : value.toListRef())
    if (item.isTensor() && item.toTensor().defined() && !visit(item.toTensor())) return false;
  return true;
}

template <typename Visit>
bool every_tensor(const torch::jit::Stack& stack, size_t first, Visit&& visit) {
  for (size_t at = first; at < stack.size(); ++at)
    if (!every_tensor(stack[at], visit)) return false;
  return true;
}

template <typename Change>  // at::Tensor(const at::Tensor&)
void change_tensors(torch::jit::Stack& stack, size_t first, Change&& change) {
  for (size_t at = first; at < stack.size(); ++at) {
    c10::IValue& value = stack[at];
    if (value.isTensor()) {
      if (value.toTensor().defined()) value = change(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> changed;
      for (const at::Tensor& item : value.toTensorList()) changed.push_back(change(item));
      value = std::move(changed);
    } else if (value.isList() && value.type()->isSubtypeOf(*c10::ListType::ofOptionalTensors())) {
      c10::List<std::optional<at::Tensor>> changed;
      for (const c10::IValue item : value.toListRef())
        changed.push_back(item.isTensor() ? std::optional(change(item.toTensor())) : std::nullopt);
      value = std::move(changed);
    }
  }
}

struct Seen {  // properties of the floating arguments of a call
  bool plain = true, wide = false, half = false, mixed = false, foreign = false;
  bool only_cpu_half = true;
  std::optional<at::ScalarType> common;
};

Seen look(const torch::jit::Stack& stack, size_t first, at::ScalarType dtype) {
  Seen seen;
  seen.plain = every_tensor(stack, first, [&](const at::Tensor& tensor) {
    if (tensor.unsafeGetTensorImpl()->is_python_dispatch()) return false;
    const at::ScalarType type = tensor.scalar_type();
    if (!at::isFloatingType(type)) return true;
    seen.wide |= type == at::kDouble;
    seen.half |= is_half(type);
    seen.foreign |= type != dtype && is_castable(type);
    seen.mixed |= seen.common && *seen.common != type;
    seen.common = type;
    seen.only_cpu_half &= type == at::kHalf && tensor.is_cpu();
    return true;
  });
  return seen;
}

at::Tensor cached(const at::Tensor& weight, at::ScalarType type) {
  const auto key = reinterpret_cast<uintptr_t>(weight.unsafeGetTensorImpl());
  auto& cache = here.cache[type == at::kBFloat16];
  const auto found = cache.find(key);
  if (found != cache.end()) {
    const Entry& entry = found->second;
    if (!entry.weight.expired() && entry.version == weight._version() && entry.data == weight.const_data_ptr())
      return entry.copy;
  }
  // Made with grad enabled, so that an entry made under no_grad can be used by a later forward with gradients.
  c10::AutoGradMode grad(true);
  at::Tensor copy = weight.to(type);
  const auto version = static_cast<int64_t>(weight._version());
  cache.insert_or_assign(key, Entry{WeakTensor(weight.getIntrusivePtr()), version, weight.const_data_ptr(), copy});
  return copy;
}

at::Tensor lowered(const at::Tensor& tensor, at::ScalarType type) {
  const at::ScalarType own = tensor.scalar_type();
  if (own == type || !is_castable(own)) return tensor;
  const bool is_weight = tensor.requires_grad() && tensor.is_leaf() && !tensor.is_view() && is_half(type) &&
                         !c10::InferenceMode::is_enabled() && !tensor.is_inference() && tensor.has_storage();
  return is_weight ? cached(tensor, type) : tensor.to(type);
}

at::Tensor to_castable(const at::Tensor& tensor, at::ScalarType type) {
  return is_castable(tensor.scalar_type()) && tensor.scalar_type() != type ? tensor.to(type) : tensor;
}

at::Tensor raised(const at::Tensor& tensor) {
  return is_half(tensor.scalar_type()) ? tensor.to(at::kFloat) : tensor;
}

// float16 with bfloat16 is float32; a 0-dim float64 tensor does not widen tensors that have dimensions.
std::optional<at::ScalarType> widest(const torch::jit::Stack& stack, size_t first) {
  std::optional<at::ScalarType> voted;
  bool has_dims = false;
  every_tensor(stack, first, [&](const at::Tensor& tensor) {
    if (at::isFloatingType(tensor.scalar_type())) has_dims |= tensor.dim() > 0;
    return true;
  });
  every_tensor(stack, first, [&](const at::Tensor& tensor) {
    const at::ScalarType own = tensor.scalar_type();
    if (!at::isFloatingType(own)) return true;
    if (tensor.dim() > 0 || own != at::kDouble || !has_dims) voted = voted ? c10::promoteTypes(*voted, own) : own;
    return true;
  });
  return voted;
}

void accumulate(const c10::OperatorHandle& op, torch::jit::Stack& stack, size_t first) {
  change_tensors(stack, first, [](const at::Tensor& tensor) { return to_castable(tensor, at::kFloat); });
  op.callBoxed(&stack);
  change_tensors(stack, first, [](const at::Tensor& tensor) {
    return tensor.scalar_type() == at::kFloat ? tensor.to(at::kHalf) : tensor;
  });
}

void set_dtype(const c10::FunctionSchema& schema, torch::jit::Stack& stack, size_t first) {
  const auto place = schema.argumentIndexWithName("dtype");
  if (!place || stack[first + *place].isNone()) {
    if (place) stack[first + *place] = static_cast<int64_t>(at::kFloat);
    else change_tensors(stack, first, raised);
  }
}

// The steps of casting_steps.py.
void cast_arguments(uint8_t cast, size_t index, const Plan& plan, const c10::FunctionSchema& schema,
                    torch::jit::Stack& stack, size_t first, const Seen& seen) {
  switch (cast) {
    case kLower:
      if (!seen.wide) {
        if (seen.foreign) change_tensors(stack, first, [&](const at::Tensor& tensor) { return lowered(tensor, plan.dtype); });
        return;
      }
      [[fallthrough]];
    case kFloat32:
      if (seen.half) change_tensors(stack, first, raised);
      return;
    case kSetDtype:
      if (stack[first].isTensor() && is_half(stack[first].toTensor().scalar_type())) set_dtype(schema, stack, first);
      return;
    case kPromote:
      if (const auto type = seen.mixed ? widest(stack, first) : std::nullopt)
        change_tensors(stack, first, [&](const at::Tensor& tensor) { return to_castable(tensor, *type); });
      return;
    case kBanned:
      TORCH_CHECK_NOT_IMPLEMENTED(!seen.half, refusals[index]);
      return;
    case kBannedInPlace:
      TORCH_CHECK_NOT_IMPLEMENTED(!is_half(stack[first].toTensor().scalar_type()), refusals[index]);
      [[fallthrough]];
    case kMatchSelf: {
      const at::ScalarType own = stack[first].toTensor().scalar_type();
      if (at::isFloatingType(own))
        change_tensors(stack, first + 1, [&](const at::Tensor& tensor) { return to_castable(tensor, own); });
      return;
    }
    default:
      return;
  }
}

// An op that autograd has already passed is called inside another op, such as clamp_min by relu. (Inference mode gives
// no such information.)
bool is_inside() {
  return c10::impl::tls_local_dispatch_key_set().excluded_.has_all(c10::autograd_dispatch_keyset) &&
         !c10::InferenceMode::is_enabled();
}

int torch_nesting() {
  at::autocast::increment_nesting();
  return at::autocast::decrement_nesting();
}

// Regions of torch.autocast are nested inside the plan's, and torch casts nothing: the innermost is a disabled one.
bool is_disabled_by_torch() {
  return torch_nesting() > here.torch_nesting && !at::autocast::is_autocast_enabled(at::kCPU) &&
         !at::autocast::is_autocast_enabled(at::kCUDA);
}

bool any_on_cpu(const torch::jit::Stack& stack, size_t first) {
  return !every_tensor(stack, first, [](const at::Tensor& tensor) { return !tensor.is_cpu(); });
}

struct Kernel : c10::OperatorKernel {
  explicit Kernel(size_t index) : index(index) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const Plan* plan = here.plan;
    const auto uncast = [&] {
      op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
    };
    const uint8_t marks = plan ? plan->casts[index] : kNone;
    if (marks == kNone || is_inside() || torch::autograd::get_current_graph_task_id() != here.task) return uncast();
    const size_t first = stack->size() - op.schema().arguments().size();
    if ((marks & kOnCpu) && !any_on_cpu(*stack, first)) return uncast();
    // Ops inside this op are not cast: its arguments are cast once.
    c10::impl::ExcludeDispatchKeyGuard once(kKey);
    const Seen seen = look(*stack, first, plan->dtype);
    if (!seen.plain) return op.callBoxed(stack);
    if (!is_disabled_by_torch())
      cast_arguments(marks & ~(kProduct | kOnCpu), index, *plan, op.schema(), *stack, first, seen);
    const bool product = (marks & kProduct) && plan->accumulates;
    if (product && look(*stack, first, plan->dtype).only_cpu_half) return accumulate(op, *stack, first);
    op.callBoxed(stack);
  }

  size_t index;
};

}  // namespace

#if defined(_WIN32)
#define EXPORT extern "C" __declspec(dllexport)
#else
#define EXPORT extern "C" __attribute__((visibility("default")))
#endif

// Register the kernel for one overload, "add.Tensor"; returns its index in a plan's casts, -1 if there is no such op.
EXPORT int64_t amplab_cast_op(const char* overload, const char* refusal) {
  static torch::Library* const library = [] {
    const auto kind = torch::Library::IMPL;
    (new torch::Library(kind, "_", kKey, __FILE__, __LINE__))->fallback(torch::CppFunction::makeFallthrough());
    return new torch::Library(kind, "aten", kKey, __FILE__, __LINE__);
  }();
  const std::string name = std::string("aten::") + overload;
  const size_t dot = name.find('.');
  const std::string overload_name = dot == std::string::npos ? "" : name.substr(dot + 1);
  if (!c10::Dispatcher::singleton().findSchema({name.substr(0, dot), overload_name})) return -1;
  const size_t index = refusals.size();
  refusals.emplace_back(refusal);
  auto kernel = c10::BoxedKernel::makeFromFunctor(std::make_unique<Kernel>(index));
  library->impl(name.c_str(), torch::CppFunction::makeFromBoxedKernel(std::move(kernel)));
  return static_cast<int64_t>(index);
}

EXPORT void* amplab_cast_plan(const uint8_t* casts, int64_t count, int64_t dtype, int64_t accumulates) {
  return new Plan{{casts, casts + count}, static_cast<at::ScalarType>(dtype), accumulates != 0};
}

EXPORT void amplab_cast_forget(void* plan) { delete static_cast<Plan*>(plan); }

EXPORT int64_t amplab_cast_task() { return torch::autograd::get_current_graph_task_id(); }

EXPORT int64_t amplab_cast_torch_nesting() { return torch_nesting(); }

// Make a plan active in this thread, for the ops of one graph task; null for none. `torch_nesting` is the number of
// regions of torch.autocast around it: a disabled one inside ends the casts.
EXPORT void amplab_cast_enter(const void* plan, int64_t task, int64_t torch_nesting) {
  here.plan = static_cast<const Plan*>(plan);
  here.task = static_cast<int>(task);
  here.torch_nesting = static_cast<int>(torch_nesting);
  c10::impl::tls_set_dispatch_key_included(kKey, plan != nullptr);
  c10::impl::tls_set_dispatch_key_excluded(kKey, plan == nullptr);  // as every autocast key is by default
}

EXPORT void amplab_cast_clear() {
  for (auto& cache : here.cache) cache.clear();
}

EXPORT int64_t amplab_cast_kept() { return static_cast<int64_t>(here.cache[0].size() + here.cache[1].size()); }
