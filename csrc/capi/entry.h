// The two functions that implement the C functions of all operators: plan() and run(). The C functions pack arguments
// in the order of their parameters; the C type of an argument determines the kind of its value.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "aclnn/aclnn_base.h"

namespace fusion::capi {

// One unchecked argument of a C function.
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

// The properties of an operator that the library requires without Python; its record contains all others.
struct Operator {
    const char *name;        // of its second phase: "aclnnFlashAttentionScore"
    const char *parameters;  // CANN's names in its order: "query, key, value"

    std::string parameter(std::size_t i) const;
};

// Implements aclnnXxxGetWorkspaceSize. values: one for each parameter; caller: return address of the C function.
aclnnStatus plan(const Operator &op, std::span<const Value> values, std::uint64_t *workspace_size,
                 aclOpExecutor **executor, const void *caller = __builtin_return_address(0)) noexcept;

// Implements aclnnXxx.
aclnnStatus run(const Operator &op, void *workspace, std::uint64_t workspace_size, aclOpExecutor *executor,
                aclrtStream stream, const void *caller = __builtin_return_address(0)) noexcept;

}  // namespace fusion::capi
