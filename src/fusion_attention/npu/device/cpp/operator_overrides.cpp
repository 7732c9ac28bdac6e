// Kernels of npu for operators that the CPU does not support, or whose result for npu differs from that for the CPU.
#include <ATen/ops/histc.h>
#include <torch/library.h>

#include "storage_aliases.h"

namespace fusion_npu {
namespace {

// Computes histograms of integers too, as the chip and CUDA do, because models count an expert's tokens by them on
// devices other than the CPU. A double represents all counts, and all integers that bins can distinguish.
at::Tensor histc(const at::Tensor &self, int64_t bins, const at::Scalar &low, const at::Scalar &high) {
    at::Tensor alias = alias_of(self);
    bool counted = base() == DeviceType::CPU && at::isIntegralType(alias.scalar_type(), /*includeBool=*/false);
    at::Tensor made = counted ? at::histc(alias.to(at::kDouble), bins, low, high).to(alias.scalar_type())
                              : at::histc(alias, bins, low, high);
    return npu_over(made, in_front_of(made.unsafeGetTensorImpl()->unsafe_storage(), self.device().index()));
}

// True if one tensor may become the other in place. Between the host and npu it may, as between the host and CUDA: when
// a module moves, its parameters stay the same objects, so layers continue to share weights.
bool may_become(const at::Tensor &self, const at::Tensor &from) {
    const auto dense = [](DispatchKeySet keys) {
        using c10::BackendComponent;
        return keys.has(DispatchKey::Dense) &&
               keys.has_any(DispatchKeySet(
                   {BackendComponent::CPUBit, BackendComponent::CUDABit, BackendComponent::PrivateUse1Bit}));
    };
    return self.key_set() == from.key_set() || (dense(self.key_set()) && dense(from.key_set()));
}

// False, because npu has no nested tensors: a TransformerEncoder must not pack its rows into one.
bool may_nest(const at::Tensor & /*rows*/, const at::Tensor & /*mask*/) { return false; }

// Does nothing on a host, where the work of a stream is complete when a call returns.
void record_stream(at::Tensor &self, c10::Stream stream) {
    if (base() == DeviceType::CPU) return;
    if (stream.device_type() == NPU) {
        stream = c10::Stream(c10::Stream::UNSAFE, Device(base(), stream.device_index()), stream.id());
    }
    alias_of(self).record_stream(stream);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("record_stream", record_stream);
    m.impl("histc", histc);
    m.impl("_nested_tensor_from_mask_left_aligned", may_nest);
    m.impl("_has_compatible_shallow_copy_type", may_become);
}

}  // namespace fusion_npu
