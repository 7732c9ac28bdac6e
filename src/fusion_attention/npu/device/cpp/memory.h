// Tensors on device "npu" and their aliases on the device that computes: one memory, two tensors.
//
// Behind every storage of npu stands its twin, a storage of the device that computes, which owns the memory. Kernels
// get tensors over the twin; what they make comes back as tensors over a storage of npu in front of it. So overlap,
// resizing and emptying are the twin's, and need no bookkeeping here.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <vector>

namespace fusion_npu {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::StorageImpl;
using c10::TensorImpl;

constexpr DeviceType NPU = DeviceType::PrivateUse1;

// The device that computes, CPU or CUDA: set once, before the first tensor.
DeviceType base();
void set_base(DeviceType type);
inline DispatchKey base_key() { return base() == DeviceType::CUDA ? DispatchKey::CUDA : DispatchKey::CPU; }

inline bool on_npu(const at::Tensor &t) { return t.defined() && t.unsafeGetTensorImpl()->device_type() == NPU; }

// The twin of a storage of npu; a storage that torch made around foreign memory (from_blob) gets one.
StorageImpl *twin_of(StorageImpl *storage);

// A storage of npu in front of a storage of the device that computes. On a host its number is the one given; elsewhere
// it is the twin's.
c10::Storage in_front_of(const c10::Storage &twin, DeviceIndex index);

// The tensor of the device that computes on the memory of one of npu; autograd does not see it.
at::Tensor alias_of(const at::Tensor &npu);

// A tensor of the device that computes with the shape of any tensor, and no memory.
at::Tensor shape_of(const at::Tensor &t);

// The tensor of npu on the memory of one of the device that computes, over a storage of npu in front of its storage.
at::Tensor npu_over(const at::Tensor &made, c10::Storage storage);

// Gives a tensor of npu, and its storage, the shape and the memory that a kernel has given its alias.
void follow(TensorImpl *npu, const TensorImpl *alias, const std::vector<c10::Storage> &known);

// Gives a storage of npu the memory of its twin, which has been resized.
void follow_twin(StorageImpl *storage);

// Keeps the pages of host memory that pin_memory() asked for; nothing is locked, for no device reads them.
c10::Allocator *pinned_memory();
bool is_pinned(const void *pointer);

}  // namespace fusion_npu
