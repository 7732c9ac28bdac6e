// Tensors on device "npu" and their aliases, tensors over the same memory on the computing device (CPU or CUDA).
//
// Every storage on npu has a twin, a storage on the computing device that owns the memory. Kernels receive tensors over
// the twin; for their results, npu tensors over a storage of npu for the result's storage are made. The twin therefore
// determines overlaps and sizes of memory.
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

// The computing device, CPU or CUDA: set once, before the first tensor.
DeviceType base();
void set_base(DeviceType type);
inline DispatchKey base_key() { return base() == DeviceType::CUDA ? DispatchKey::CUDA : DispatchKey::CPU; }

inline bool on_npu(const at::Tensor &t) { return t.defined() && t.unsafeGetTensorImpl()->device_type() == NPU; }

// Returns the twin of a storage of npu; makes one for a storage that torch made over given memory (from_blob).
StorageImpl *twin_of(StorageImpl *storage);

// Makes a storage of npu whose twin is the given storage. On a host its device number is `index`, else the twin's.
c10::Storage in_front_of(const c10::Storage &twin, DeviceIndex index);

// Returns the alias of a tensor of npu: a tensor of the computing device over the same memory, unknown to autograd.
at::Tensor alias_of(const at::Tensor &npu);

// Returns a tensor of the computing device with the shape of `t`, without memory.
at::Tensor shape_of(const at::Tensor &t);

// Returns a tensor of npu with the shape of a tensor of the computing device, over a storage of npu for its memory.
at::Tensor npu_over(const at::Tensor &made, c10::Storage storage);

// Updates a tensor of npu and its storage after a kernel has changed the shape or the memory of its alias.
void follow(TensorImpl *npu, const TensorImpl *alias, const std::vector<c10::Storage> &storages);

// Updates a storage of npu after its twin has been resized.
void follow_twin(StorageImpl *storage);

// Allocates and lists the host memory of pin_memory(); pages are not locked, because no other device reads them.
c10::Allocator *pinned_memory();
bool is_pinned(const void *pointer);

}  // namespace fusion_npu
