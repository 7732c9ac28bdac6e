// Operators to_base and to_npu, by which the Python code converts tensors on npu to aliases on the computing device and
// back. Both are differentiable.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "storage_aliases.h"
#include "runtime.h"

namespace fusion_npu {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Makes an alias share its tensor's version counter, because autograd must notice a change in place of either.
at::Tensor with_version_of(at::Tensor alias, const at::Tensor &given) {
    if (!given.is_inference() && !alias.is_inference()) {
        alias.unsafeGetTensorImpl()->set_version_counter(given.unsafeGetTensorImpl()->version_counter());
    }
    return alias;
}

// Returns a tensor on npu over the memory of a tensor on the computing device. Its storage is that of one of the given
// npu tensors if that has the same memory, else a new one.
at::Tensor npu_of(const at::Tensor &made, const at::TensorList npu_tensors, DeviceIndex index) {
    const c10::Storage &behind = made.unsafeGetTensorImpl()->unsafe_storage();
    for (const at::Tensor &one : npu_tensors) {
        const c10::Storage &storage = one.unsafeGetTensorImpl()->unsafe_storage();
        if (!on_npu(one) || !storage) continue;
        if (twin_of(storage.unsafeGetStorageImpl()) == behind.unsafeGetStorageImpl()) return npu_over(made, storage);
    }
    return npu_over(made, in_front_of(behind, index));
}

at::Tensor crossed(const at::Tensor &t, const at::TensorList npu_tensors, DeviceIndex index) {
    return with_version_of(on_npu(t) ? alias_of(t) : npu_of(t, npu_tensors, index), t);
}

// Converts a tensor between npu and the computing device; backward converts the gradient back. The list is passed as a
// pointer, because autograd would treat its tensors as inputs.
struct Cross : torch::autograd::Function<Cross> {
    static at::Tensor forward(AutogradContext *context, const at::Tensor &t, const at::TensorList *npu_tensors,
                              int64_t index) {
        context->set_materialize_grads(false);
        context->saved_data["index"] = static_cast<int64_t>(t.device().index());
        return crossed(t, *npu_tensors, static_cast<DeviceIndex>(index));
    }
    static variable_list backward(AutogradContext *context, const variable_list &gradients) {
        const at::Tensor &gradient = gradients[0];
        const at::TensorList none;
        if (!gradient.defined()) return {at::Tensor(), at::Tensor(), at::Tensor()};
        return {Cross::apply(gradient, &none, context->saved_data["index"].toInt()), at::Tensor(), at::Tensor()};
    }
};

at::Tensor converted(const at::Tensor &t, const at::TensorList npu_tensors, DeviceIndex index) {
    return at::GradMode::is_enabled() && t.requires_grad() ? Cross::apply(t, &npu_tensors, static_cast<int64_t>(index))
                                                           : crossed(t, npu_tensors, index);
}

at::Tensor to_base(const at::Tensor &t) {
    TORCH_CHECK(on_npu(t), "fusion_attention: device npu: expected a tensor on npu, got one on ", t.device());
    return converted(t, {}, -1);
}

// The result's device number is that of the first given npu tensor, or the current device's.
at::Tensor to_npu(const at::Tensor &t, at::TensorList npu_tensors) {
    TORCH_CHECK(t.device().type() == base() && t.layout() == at::kStrided,
                "fusion_attention: device npu: expected a strided tensor on ", base(), ", got one on ", t.device());
    const Device first = npu_tensors.empty() ? Device(NPU) : npu_tensors.front().device();
    return converted(t, npu_tensors, checked_device(Device(NPU, first.type() == NPU ? first.index() : -1)).index());
}

// Runs a composite operator on aliases of its tensors. On a PrivateUse1 device torch would otherwise call a fused
// kernel that npu lacks. Autograd records the operators on the computing device.
void on_aliases(const c10::OperatorHandle &op, c10::DispatchKeySet /*keys*/, torch::jit::Stack *stack) {
    const size_t given = stack->size() - op.schema().arguments().size();
    DeviceIndex index = -1;
    auto cross = [stack](size_t first, auto &&change) {
        for (size_t i = first; i < stack->size(); ++i) {
            c10::IValue &value = (*stack)[i];
            if (value.isTensor() && value.toTensor().defined()) {
                value = change(value.toTensor());
            } else if (value.isTensorList()) {
                c10::List<at::Tensor> changed;
                for (const at::Tensor &t : value.toTensorList()) changed.push_back(t.defined() ? change(t) : t);
                value = std::move(changed);
            }
        }
    };
    cross(given, [&index](const at::Tensor &t) {
        if (!on_npu(t)) return t;
        TORCH_CHECK(index < 0 || t.device().index() == index,
                    "Expected all tensors to be on the same device, but found ", "at least two devices, ",
                    Device(NPU, index), " and ", t.device(), "!");
        index = t.device().index();
        return to_base(t);
    });
    op.callBoxed(stack);
    cross(stack->size() - op.schema().returns().size(),
          [index](const at::Tensor &t) { return converted(t, {}, index); });
}

}  // namespace

void register_composites(torch::Library &m) {
    for (const char *name : {"lstm.input", "lstm.data", "gru.input", "gru.data", "lstm_cell", "gru_cell",
                             "rnn_tanh.input", "rnn_tanh.data", "rnn_relu.input", "rnn_relu.data"}) {
        m.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_aliases>());
    }
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { register_composites(m); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { register_composites(m); }  // in inference mode

TORCH_LIBRARY(fusion_attention_npu, m) {
    m.def("to_base(Tensor t) -> Tensor", to_base);
    m.def("to_npu(Tensor t, Tensor[] npu_tensors) -> Tensor", to_npu);
    m.def("set_count(int devices) -> ()", [](int64_t devices) { set_count(devices); });
    m.def("register_operators(bool cuda) -> int", [](bool cuda) {
        set_base(cuda ? DeviceType::CUDA : DeviceType::CPU);
        register_profiler();
        return register_operators();
    });
}

}  // namespace fusion_npu
