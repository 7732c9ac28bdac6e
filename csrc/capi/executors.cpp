// The C functions for executors (libnnopbase): creation, destruction, and addresses of their tensors.
#include "aclnn/acl_meta.h"
#include "capi/handles.h"

namespace fusion::capi {
namespace {

enum class Side { inputs, outputs, both };

std::shared_ptr<const Executor> live(Handle executor) {
    if (auto object = find<Executor>(executor)) return object;
    const std::string got = "executor: expected one from phase 1, got " + wrong(executor);
    if (executor == nullptr) throw Refusal(nn_inner_null, got);
    throw Refusal(ended(executor, Kind::executor) ? nn_runtime : nn_invalid, got);
}

// Returns the argument of phase 1 at an index, which also counts absent arguments.
Handle slot(const Executor &of, std::size_t index, Side side, const char *param) {
    std::vector<Handle> slots;
    if (side != Side::outputs) slots = of.inputs;
    if (side != Side::inputs) slots.insert(slots.end(), of.outputs.begin(), of.outputs.end());
    if (index >= slots.size()) throw Refusal(nn_invalid, param, ": expected 0 to ", slots.size() - 1, ", got ", index);
    if (slots[index] == nullptr) throw Refusal(nn_invalid, param, ": ", index, " was null in phase 1");
    return slots[index];
}

template <class T>
void need_slot(Handle executor, std::size_t index, Handle given, Side side, const char *index_name, const char *param) {
    const auto of = live(executor);
    need<T>(given, param, nn_inner_null);
    if (!of->repeatable)
        throw Refusal(nn_runtime, "executor: ", of->operation, ": make it repeatable before addresses change");
    if (slot(*of, index, side, index_name) != given)
        throw Refusal(nn_invalid, param, ": expected the one that phase 1 was given at ", index_name, " ", index);
}

// Sets the address of a tensor, or of member `relative` of a list.
int set_tensor(Handle executor, std::size_t index, Handle tensor, void *address, Side side, Caller caller = {}) {
    return coded<nn_runtime>(
        [&](const Call &call) {
            need_slot<Tensor>(executor, index, tensor, side, "index", "tensor");
            move(tensor, address, call);
        },
        caller);
}

int set_member(Handle executor, std::size_t index, std::size_t relative, Handle tensors, void *address, Side side,
               Caller caller = {}) {
    return coded<nn_runtime>(
        [&](const Call &call) {
            need_slot<TensorList>(executor, index, tensors, side, "irIndex", "tensors");
            const auto list = need<TensorList>(tensors, "tensors");
            if (relative >= list->values.size()) {
                throw Refusal(nn_invalid, "relativeIndex: expected less than ", list->values.size(), ", got ",
                              relative);
            }
            move(list->values[relative], address, call, "tensors");
        },
        caller);
}

}  // namespace

FUSION_C aclnnStatus aclSetAclOpExecutorRepeatable(aclOpExecutor *executor) {
    return coded([&] {
        const auto object = live(executor);
        if (object->used)
            throw Refusal(nn_runtime, "executor: ", object->operation, ": used before it was made repeatable");
        object->repeatable = true;
    });
}

FUSION_C aclnnStatus aclDestroyAclOpExecutor(aclOpExecutor *executor) {
    return coded([&] {
        live(executor);
        remove(executor, Kind::executor);
    });
}

// CANN defines each of these functions with two spellings.
#define FUSION_SET_TENSOR(NAME, SIDE)                                                                            \
    FUSION_C aclnnStatus NAME(aclOpExecutor *executor, const std::size_t index, aclTensor *tensor, void *addr) { \
        return set_tensor(executor, index, tensor, addr, SIDE);                                                  \
    }
#define FUSION_SET_MEMBER(NAME, SIDE)                                                                        \
    FUSION_C aclnnStatus NAME(aclOpExecutor *executor, std::size_t irIndex, const std::size_t relativeIndex, \
                              aclTensorList *tensors, void *addr) {                                          \
        return set_member(executor, irIndex, relativeIndex, tensors, addr, SIDE);                            \
    }

FUSION_SET_TENSOR(aclSetInputTensorAddr, Side::inputs)
FUSION_SET_TENSOR(AclSetInputTensorAddr, Side::inputs)
FUSION_SET_TENSOR(aclSetOutputTensorAddr, Side::outputs)
FUSION_SET_TENSOR(AclSetOutputTensorAddr, Side::outputs)
FUSION_SET_TENSOR(aclSetTensorAddr, Side::both)
FUSION_SET_TENSOR(AclSetTensorAddr, Side::both)
FUSION_SET_MEMBER(aclSetDynamicInputTensorAddr, Side::inputs)
FUSION_SET_MEMBER(AclSetDynamicInputTensorAddr, Side::inputs)
FUSION_SET_MEMBER(aclSetDynamicOutputTensorAddr, Side::outputs)
FUSION_SET_MEMBER(AclSetDynamicOutputTensorAddr, Side::outputs)
FUSION_SET_MEMBER(aclSetDynamicTensorAddr, Side::both)
FUSION_SET_MEMBER(AclSetDynamicTensorAddr, Side::both)

}  // namespace fusion::capi
