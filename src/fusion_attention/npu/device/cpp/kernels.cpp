// Kernels of npu's own: what the CPU refuses, or answers for itself alone.
#include <ATen/ops/histc.h>
#include <torch/library.h>

#include "memory.h"

namespace fusion_npu {
namespace {

// Of integers too, as on the chip and on CUDA: models count an expert's tokens so wherever they are not on a CPU. A
// double holds every count, and every integer that a bin can tell from the next.
at::Tensor histc(const at::Tensor &self, int64_t bins, const at::Scalar &low, const at::Scalar &high) {
    at::Tensor alias = alias_of(self);
    bool counted = base() == DeviceType::CPU && at::isIntegralType(alias.scalar_type(), /*includeBool=*/false);
    at::Tensor made = counted ? at::histc(alias.to(at::kDouble), bins, low, high).to(alias.scalar_type())
                              : at::histc(alias, bins, low, high);
    return npu_over(made, in_front_of(made.unsafeGetTensorImpl()->unsafe_storage()));
}

// Whether one tensor may become the other in place. Between the host and npu it may, as between the host and CUDA: a
// module that moves keeps its parameters, so weights that layers share stay one.
bool may_become(const at::Tensor &self, const at::Tensor &from) {
    const auto dense = [](DispatchKeySet keys) {
        using c10::BackendComponent;
        return keys.has(DispatchKey::Dense) &&
               keys.has_any(DispatchKeySet(
                   {BackendComponent::CPUBit, BackendComponent::CUDABit, BackendComponent::PrivateUse1Bit}));
    };
    return self.key_set() == from.key_set() || (dense(self.key_set()) && dense(from.key_set()));
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("histc", histc);
    m.impl("_has_compatible_shallow_copy_type", may_become);
}

}  // namespace fusion_npu
