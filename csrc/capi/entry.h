// How operators.inc calls an operator: one plan() and one run() for all of them. The C functions pack their arguments
// in the order of their parameters; which C type an argument has says what kind of value it is.

#pragma once

#include <cstddef>
#include <cstdint>

#include "aclnn/aclnn_base.h"

namespace fusion::capi {

// One argument, as its C function got it: nothing is followed or checked yet.
struct Value {
    enum class Kind : std::uint8_t { tensor, tensor_list, int_array, integer, number, flag, text };

    Value(const aclTensor *tensor) : kind(Kind::tensor), handle(tensor) {}
    Value(const aclTensorList *tensors) : kind(Kind::tensor_list), handle(tensors) {}
    Value(const aclIntArray *array) : kind(Kind::int_array), handle(array) {}
    Value(std::int64_t value) : kind(Kind::integer), integer(value) {}
    Value(double value) : kind(Kind::number), number(value) {}
    Value(bool value) : kind(Kind::flag), flag(value) {}
    Value(const char *value) : kind(Kind::text), text(value) {}

    Kind kind;
    union {
        const void *handle;  // tensor, tensor_list, int_array
        std::int64_t integer;
        double number;
        bool flag;
        const char *text;
    };
};

// What the library knows of an operator without Python; everything else its record says.
struct Operator {
    const char *name;               // of its second phase: "aclnnFlashAttentionScore"
    const char *const *parameters;  // CANN's names, in its order
    std::size_t count;
    std::uint64_t outputs;  // bit i: parameter i is written
};

// aclnnXxxGetWorkspaceSize. values: one for each parameter; caller: who called the C function that asks.
aclnnStatus plan(const Operator &op, const Value *values, std::uint64_t *workspace_size, aclOpExecutor **executor,
                 const void *caller = __builtin_return_address(0)) noexcept;

// aclnnXxx.
aclnnStatus run(const Operator &op, void *workspace, std::uint64_t workspace_size, aclOpExecutor *executor,
                aclrtStream stream, const void *caller = __builtin_return_address(0)) noexcept;

}  // namespace fusion::capi
