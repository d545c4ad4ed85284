// Preparation of the list of an operator that only reads: argument checks, with the messages of the reference, and the
// memory layout of the tensors. For operators that write, see tensor_lists.h.
#pragma once

#include "tensor_lists.h"

namespace amplab::statistics {

// The memory of one tensor. `gapless`: numel consecutive elements, in any order.
struct Source {
  const void* data;
  Dtype dtype;
  int64_t numel;
  bool gapless;
  int64_t dim;
  const int64_t* sizes;
  const int64_t* strides;
};

// Whether the elements are dense in memory, without overlap, in any order of the dimensions.
inline bool is_gapless(const Handle& tensor) {
  if (tensor.is_contiguous()) {
    return true;
  }
  const int64_t dim = tensor.dim();
  int64_t expected = 1;  // the stride that the next outer dimension must have
  for (int64_t found = 0; found < dim; ++found) {
    int64_t next = -1;
    for (int64_t d = 0; d < dim && next < 0; ++d) {
      if (tensor.strides()[d] == expected && tensor.sizes()[d] > 1) {
        next = d;
      }
    }
    if (next < 0) {
      break;
    }
    expected *= tensor.sizes()[next];
  }
  return expected == tensor.numel();
}

// The checked list of one call; it owns the tensors to which the layouts point.
class ReadList {
 public:
  explicit ReadList(std::vector<Handle> tensors) : tensors_(std::move(tensors)) {
    sources_.reserve(tensors_.size());
    for (size_t index = 0; index < tensors_.size(); ++index) {
      add(index);
    }
  }

  const std::vector<Source>& sources() const { return sources_; }
  int32_t device_type() const { return tensors_[0].device_type(); }
  int32_t device_index() const { return tensors_[0].device_index(); }

 private:
  void add(size_t index) {
    const Handle& tensor = tensors_[index];
    require(tensor.is_strided(), "tensor", index, " is not strided: pass the values of a coalesced sparse tensor.");
    const Dtype dtype = tensor.dtype();
    require(dtype != kDtypes, "tensor", index, ": expected float16, bfloat16, float32 or float64.");
    require(tensor.device_type() == device_type() && tensor.device_index() == device_index(), "tensor", index,
            " is on another device than tensor 0; call once per device.");
    require(tensor.is_in_memory(), "tensor", index, kNoMemory);
    const int64_t numel = tensor.numel();
    const void* data = numel == 0 ? nullptr : tensor.data();
    sources_.push_back({data, dtype, numel, is_gapless(tensor), tensor.dim(), tensor.sizes(), tensor.strides()});
  }

  std::vector<Handle> tensors_;
  std::vector<Source> sources_;
};

// The table of one call, int64 (tensors, columns), not initialized. The caller of the operator owns it.
class Table {
 public:
  Table(int64_t rows, int64_t columns, int32_t device_type, int32_t device_index) {
    const int64_t sizes[] = {rows, columns};
    const int64_t strides[] = {columns, 1};
    check(aoti_torch_empty_strided(2, sizes, strides, aoti_torch_dtype_int64(), device_type, device_index, &tensor_),
          "Making the table");
  }
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;
  ~Table() {
    if (tensor_ != nullptr) {
      aoti_torch_delete_tensor_object(tensor_);
    }
  }

  int64_t* data() const {
    void* data = nullptr;
    check(aoti_torch_get_data_ptr(tensor_, &data), "Reading a tensor");
    return static_cast<int64_t*>(data);
  }
  StableIValue release() { return torch::stable::detail::from(std::exchange(tensor_, nullptr)); }

 private:
  AtenTensorHandle tensor_ = nullptr;
};

struct Arguments {
  ReadList list;
  int64_t low;
  int64_t bins;
};

// The arguments of amplab::tensor_stats, taken from torch's stack. An empty list has no device and is handled
// elsewhere.
inline Arguments take_stats_arguments(StableIValue* stack) {
  std::vector<Handle> tensors = take_list(stack[0]);
  const int64_t low = torch::stable::detail::to<int64_t>(stack[1]);
  const int64_t bins = torch::stable::detail::to<int64_t>(stack[2]);
  if (bins < 1 || bins > 4096) {
    throw std::runtime_error("bins=" + std::to_string(bins) +
                             ": expected 1 to 4096; 64 from low=-47 are half's range and what is near.");
  }
  if (low < -4096 || low > 4096) {
    throw std::runtime_error("low=" + std::to_string(low) +
                             ": expected an exponent from -4096 to 4096; float32's lowest is -149.");
  }
  return {ReadList(std::move(tensors)), low, bins};
}

}  // namespace amplab::statistics
