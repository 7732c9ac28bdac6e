// What functions of the library take and give: aliases of tensors of npu, with which autograd goes on.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "memory.h"
#include "runtime.h"

namespace fusion_npu {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A change in place of one is a change of the other, which autograd must see.
at::Tensor counted_as(at::Tensor made, const at::Tensor &given) {
    if (!given.is_inference() && !made.is_inference()) {
        made.unsafeGetTensorImpl()->set_version_counter(given.unsafeGetTensorImpl()->version_counter());
    }
    return made;
}

// The storage of npu in front of a tensor's memory: that of a tensor known to lie there, or a new one.
at::Tensor npu_of(const at::Tensor &made, const at::TensorList known, DeviceIndex index) {
    const c10::Storage &behind = made.unsafeGetTensorImpl()->unsafe_storage();
    for (const at::Tensor &one : known) {
        const c10::Storage &storage = one.unsafeGetTensorImpl()->unsafe_storage();
        if (!on_npu(one) || !storage) continue;
        if (twin_of(storage.unsafeGetStorageImpl()) == behind.unsafeGetStorageImpl()) return npu_over(made, storage);
    }
    return npu_over(made, in_front_of(behind, index));
}

at::Tensor crossed(const at::Tensor &t, const at::TensorList known, DeviceIndex index) {
    return counted_as(on_npu(t) ? alias_of(t) : npu_of(t, known, index), t);
}

// To the other side; the gradient comes back the same way. (The list goes as a pointer: autograd would count its
// tensors.)
struct Cross : torch::autograd::Function<Cross> {
    static at::Tensor forward(AutogradContext *context, const at::Tensor &t, const at::TensorList *known,
                              int64_t index) {
        context->set_materialize_grads(false);
        context->saved_data["index"] = static_cast<int64_t>(t.device().index());
        return crossed(t, *known, static_cast<DeviceIndex>(index));
    }
    static variable_list backward(AutogradContext *context, const variable_list &gradients) {
        const at::Tensor &gradient = gradients[0];
        const at::TensorList none;
        if (!gradient.defined()) return {at::Tensor(), at::Tensor(), at::Tensor()};
        return {Cross::apply(gradient, &none, context->saved_data["index"].toInt()), at::Tensor(), at::Tensor()};
    }
};

at::Tensor to_other_side(const at::Tensor &t, const at::TensorList known, DeviceIndex index) {
    return at::GradMode::is_enabled() && t.requires_grad() ? Cross::apply(t, &known, static_cast<int64_t>(index))
                                                           : crossed(t, known, index);
}

at::Tensor to_base(const at::Tensor &t) {
    TORCH_CHECK(on_npu(t), "fusion_attention: device npu: expected a tensor on npu, got one on ", t.device());
    return to_other_side(t, {}, -1);
}

// The number is that of the first of the tensors known, or of the current device.
at::Tensor to_npu(const at::Tensor &t, at::TensorList known) {
    TORCH_CHECK(t.device().type() == base() && t.layout() == at::kStrided,
                "fusion_attention: device npu: expected a strided tensor on ", base(), ", got one on ", t.device());
    const Device first = known.empty() ? Device(NPU) : known.front().device();
    return to_other_side(t, known, fusion_npu::known(Device(NPU, first.type() == NPU ? first.index() : -1)).index());
}

// Composite operators that on a device like this one would ask for a fused kernel: the device that computes takes them
// whole, and autograd goes through its own.
void whole(const c10::OperatorHandle &op, c10::DispatchKeySet /*keys*/, torch::jit::Stack *stack) {
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
          [index](const at::Tensor &t) { return to_other_side(t, {}, index); });
}

}  // namespace

void take_whole(torch::Library &m) {
    for (const char *name : {"lstm.input", "lstm.data", "gru.input", "gru.data", "lstm_cell", "gru_cell",
                             "rnn_tanh.input", "rnn_tanh.data", "rnn_relu.input", "rnn_relu.data"}) {
        m.impl(name, torch::CppFunction::makeFromBoxedFunction<&whole>());
    }
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { take_whole(m); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { take_whole(m); }  // in inference mode

TORCH_LIBRARY(fusion_attention_npu, m) {
    m.def("to_base(Tensor t) -> Tensor", to_base);
    m.def("to_npu(Tensor t, Tensor[] known) -> Tensor", to_npu);
    m.def("set_count(int devices) -> ()", [](int64_t devices) { set_count(devices); });
    m.def("register_operators(bool cuda) -> int", [](bool cuda) {
        set_base(cuda ? DeviceType::CUDA : DeviceType::CPU);
        register_profiler();
        return register_operators();
    });
}

}  // namespace fusion_npu
