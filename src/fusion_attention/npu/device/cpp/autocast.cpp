// torch.autocast("npu"): casts the operators in torch's lists; one function per policy serves all signatures.
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include "storage_aliases.h"

namespace fusion_npu {
namespace {

using at::autocast::cached_cast;
using c10::IValue;

constexpr DispatchKey KEY = DispatchKey::AutocastPrivateUse1;

template <typename Change>
void each_tensor(IValue *first, IValue *last, const Change &change) {
    for (IValue *value = first; value != last; ++value) {
        if (value->isTensor() && value->toTensor().defined()) {
            *value = change(value->toTensor());
        } else if (value->isTensorList()) {
            c10::List<at::Tensor> found;
            for (const at::Tensor &t : value->toTensorList()) found.push_back(t.defined() ? change(t) : t);
            *value = std::move(found);
        }
    }
}

void call(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
    c10::impl::ExcludeDispatchKeyGuard no_autocast(KEY);
    op.callBoxed(stack);
}

IValue *arguments(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
    return stack->data() + (stack->size() - op.schema().arguments().size());
}

void cast_all(const c10::OperatorHandle &op, torch::jit::Stack *stack, at::ScalarType type) {
    c10::impl::ExcludeDispatchKeyGuard no_autocast(KEY);
    each_tensor(arguments(op, stack), stack->data() + stack->size(),
                [type](const at::Tensor &t) { return cached_cast(type, t, NPU); });
    op.callBoxed(stack);
}

void lower_precision_fp(const c10::OperatorHandle &op, DispatchKeySet /*keys*/, torch::jit::Stack *stack) {
    cast_all(op, stack, at::autocast::get_autocast_dtype(NPU));
}

void fp32(const c10::OperatorHandle &op, DispatchKeySet /*keys*/, torch::jit::Stack *stack) {
    cast_all(op, stack, at::kFloat);
}

// Sets the argument dtype to float32 if the call does not give it.
void fp32_set_opt_dtype(const c10::OperatorHandle &op, DispatchKeySet /*keys*/, torch::jit::Stack *stack) {
    IValue *first = arguments(op, stack);
    bool eligible = first->isTensor() && at::autocast::is_autocast_eligible(first->toTensor(), NPU);
    for (size_t i = 0; eligible && i < op.schema().arguments().size(); ++i) {
        if (op.schema().arguments()[i].name() == "dtype" && first[i].isNone()) {
            first[i] = static_cast<int64_t>(at::kFloat);
        }
    }
    call(op, stack);
}

// torch redispatches norm without a dtype to the overload with a dtype; casting the tensor gives the same numbers.
void fp32_append_dtype(const c10::OperatorHandle &op, DispatchKeySet keys, torch::jit::Stack *stack) {
    fp32(op, keys, stack);
}

void promote(const c10::OperatorHandle &op, DispatchKeySet /*keys*/, torch::jit::Stack *stack) {
    at::ScalarType type = at::autocast::get_autocast_dtype(NPU);
    each_tensor(arguments(op, stack), stack->data() + stack->size(), [&type](const at::Tensor &t) {
        type = at::autocast::prioritize(type, t, NPU);
        return t;
    });
    cast_all(op, stack, type);
}

void banned(const c10::OperatorHandle & /*op*/, DispatchKeySet /*keys*/, torch::jit::Stack * /*stack*/) {
    TORCH_CHECK(false,
                "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
                "Use torch.nn.functional.binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss, or leave "
                "autocast around the call.");
}

}  // namespace

#define BOXED(POLICY) torch::CppFunction::makeFromBoxedFunction<&POLICY>()
#define NAMED1(OP, POLICY) m.impl("aten::" #OP, BOXED(POLICY));
#define NAMED2(OP, OVERLOAD, POLICY) m.impl("aten::" #OP "." #OVERLOAD, BOXED(POLICY));
#define CHOSEN(_0, _1, _2, NAME, ...) NAME
#define IMPL(...) CHOSEN(__VA_ARGS__, NAMED2, NAMED1)(__VA_ARGS__)
#define IMPL_LOWER(...) IMPL(__VA_ARGS__, lower_precision_fp)
#define IMPL_FP32(...) IMPL(__VA_ARGS__, fp32)
#define IMPL_SET(...) IMPL(__VA_ARGS__, fp32_set_opt_dtype)
#define IMPL_PROMOTE(...) IMPL(__VA_ARGS__, promote)
#define IMPL_APPEND(CALLED, NAME, FROM, TO, POLICY) m.impl("aten::" NAME, BOXED(POLICY));

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
    AT_FORALL_LOWER_PRECISION_FP(IMPL_LOWER)
    AT_FORALL_FP32(IMPL_FP32)
    AT_FORALL_FP32_SET_OPT_DTYPE(IMPL_SET)
    AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(IMPL_APPEND)
    AT_FORALL_PROMOTE(IMPL_PROMOTE)
    m.impl("aten::binary_cross_entropy", BOXED(banned));
}

}  // namespace fusion_npu
