// The CUDA kernels of LAMB and NovoGrad; schemas and references are in layerwise_steps.py, the arithmetic is in
// layerwise_steps.h, the loops in layerwise_device.h. Nothing waits for the host: norms stay in memory that torch's
// allocator provides for the duration of a call, on the stream of the launches.
#include "layerwise_device.h"
#include "step_launch.h"

namespace amplab {
namespace layerwise {

// Device memory that is freed at the end of the scope; later work on the same stream may reuse it.
class DeviceBytes {
 public:
  DeviceBytes(int64_t bytes, int32_t device) {
    const int64_t sizes[] = {(bytes + 7) / 8};
    const int64_t strides[] = {1};
    check(aoti_torch_empty_strided(1, sizes, strides, aoti_torch_dtype_float64(), aoti_torch_device_type_cuda(), device,
                                   &tensor_),
          "Allocating");
    check(aoti_torch_get_data_ptr(tensor_, &memory_), "Allocating");
  }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  ~DeviceBytes() { aoti_torch_delete_tensor_object(tensor_); }

  template <class T>
  T* at(int64_t bytes) const {
    return reinterpret_cast<T*>(static_cast<char*>(memory_) + bytes);
  }

 private:
  AtenTensorHandle tensor_ = nullptr;
  void* memory_ = nullptr;
};

// What LAMB and NovoGrad launch instead of StepKernels.
template <int kStates>
struct LayerKernels {
  static constexpr uint32_t kMostUnits = UINT32_MAX;  // `scratch` has room for the resident blocks
  LayerScratch scratch;

  template <class T, class Table, class Arguments>
  void step(const Table& table, uint32_t blocks, cudaStream_t stream, const Arguments& arguments) const {
    measure_layers_kernel<T, kStates><<<blocks, kThreads, 0, stream>>>(table, arguments, scratch);
    check_cuda(cudaGetLastError());
    const uint32_t tensors = std::min(static_cast<uint32_t>(table.count), blocks);
    add_up_layers_kernel<<<tensors, kThreads, 0, stream>>>(table, arguments, scratch, blocks);
    check_cuda(cudaGetLastError());
    step_layers_kernel<T, kStates><<<blocks, kThreads, 0, stream>>>(table, arguments, scratch);
  }

  template <class T, class Item, class Arguments>
  void step_strided(const Item& item, size_t index, uint32_t /*blocks*/, cudaStream_t stream,
                    const Arguments& arguments) const {
    const int place = static_cast<int>(index);
    strided_layer_kernel<T, kStates><<<1, kThreads, 0, stream>>>(item, arguments, scratch, place);
  }
};

// Memory for the slots of one launch, and for totals and norms of that many parameters; totals are empty.
class Scratch {
 public:
  template <int kPointers>
  static Scratch of(const LaunchPlace& place, int32_t device, size_t params, std::integral_constant<int, kPointers>) {
    return Scratch(place, device, params, place.resident_blocks + LaunchTable<kPointers>::kCapacity);
  }

  const LayerScratch& memory() const { return memory_; }

 private:
  Scratch(const LaunchPlace& place, int32_t device, size_t params, int64_t slots)
      : bytes_(std::make_unique<DeviceBytes>((slots + params) * sizeof(LayerSums) + params * sizeof(float), device)) {
    const int64_t totals = slots * sizeof(LayerSums);
    const int64_t norms = totals + params * sizeof(LayerSums);
    memory_ = {bytes_->at<LayerSums>(0), bytes_->at<LayerSums>(totals), bytes_->at<float>(norms)};
    check_cuda(cudaMemsetAsync(memory_.totals, 0, params * sizeof(LayerSums), place.stream));
  }

  std::unique_ptr<DeviceBytes> bytes_;
  LayerScratch memory_{};
};

template <class T>
using Lamb = AnyLamb<T, false>;

void lamb_on_device(StableIValue* stack, uint64_t /*inputs*/, uint64_t /*outputs*/) {
  const StepLists lists(stack, 2, true);
  StepNumbers numbers = lists.numbers();
  const auto settings = LambSettings::take(numbers);
  if (lists.empty()) {
    return;
  }
  const LaunchPlace place(lists.device_index());
  const std::integral_constant<int, StepPlaces<2>::kPointers> pointers;
  const Scratch scratch = Scratch::of(place, lists.device_index(), lists.step_counts().size(), pointers);
  StepLaunches<Lamb, LayerKernels<2>>(lists, settings, place, {scratch.memory()}).run();
}

// -- NovoGrad -------------------------------------------------------------------------------------------------------

std::vector<float*> take_norms(const std::vector<Handle>& norms, const StepLists& lists) {
  const size_t params = lists.step_counts().size();
  if (norms.size() != params) {
    throw std::runtime_error(std::to_string(params) + " params, " + std::to_string(norms.size()) +
                             " norms: expected lists of equal length.");
  }
  std::vector<float*> pointers;
  for (size_t index = 0; index < norms.size(); ++index) {
    const bool one = norms[index].numel() == 1 && norms[index].dtype() == kFloat;
    require(one, "norm", index, ": expected one float32 element.");
    require(norms[index].device_index() == lists.device_index(), "norm", index, " is on another device.");
    pointers.push_back(static_cast<float*>(norms[index].mutable_data()));
  }
  return pointers;
}

// The norms in the order of the items, then those of parameters without elements.
std::vector<float*> in_order_of_items(const std::vector<float*>& norms, const StepLists& lists) {
  std::vector<float*> ordered, rest;
  for (size_t place = 0; place < norms.size(); ++place) {
    const size_t next = ordered.size();
    const bool is_item = next < lists.items().size() && lists.items()[next].step == lists.step_counts()[place];
    (is_item ? ordered : rest).push_back(norms[place]);
  }
  ordered.insert(ordered.end(), rest.begin(), rest.end());
  return ordered;
}

template <class Kernel>
void for_each_norm(const std::vector<float*>& norms, const LaunchPlace& place, const Kernel& kernel) {
  Launches<1> launches(place, kernel);
  for (size_t index = 0; index < norms.size(); ++index) {
    launches.add({norms[index]}, 1, static_cast<int64_t>(index));
  }
  launches.flush();
}

void novograd_on_device(StableIValue* stack, uint64_t /*inputs*/, uint64_t /*outputs*/) {
  constexpr size_t kNormsAt = 17;  // after the numbers
  const std::vector<Handle> handles = take_list(stack[kNormsAt]);
  const StepLists lists(stack, 1, true);
  StepNumbers numbers = lists.numbers();
  const auto settings = NovogradSettings::take(numbers);
  const std::vector<float*> norms = take_norms(handles, lists);
  if (lists.empty()) {
    return;
  }
  const LaunchPlace place(lists.device_index());
  const std::integral_constant<int, StepPlaces<1>::kPointers> pointers;
  const Scratch scratch = Scratch::of(place, lists.device_index(), norms.size(), pointers);
  const LayerScratch& memory = scratch.memory();
  const float* found_inf = lists.found_inf();
  const std::vector<float*> ordered = in_order_of_items(norms, lists);
  for_each_norm(ordered, place, [&](const LaunchTable<1>& table, uint32_t blocks) {
    gather_norms_kernel<<<blocks, kThreads, 0, place.stream>>>(table, memory);
  });
  StepLaunches<Novograd, LayerKernels<1>>(lists, settings, place, {memory}).run();
  for_each_norm(ordered, place, [&](const LaunchTable<1>& table, uint32_t blocks) {
    scatter_norms_kernel<<<blocks, kThreads, 0, place.stream>>>(table, memory, settings, found_inf);
  });
}

STABLE_TORCH_LIBRARY_IMPL(amplab, CUDA, m) {
  m.impl("multi_tensor_lamb_", &lamb_on_device);
  m.impl("multi_tensor_novograd_", &novograd_on_device);
}

}  // namespace layerwise
}  // namespace amplab
