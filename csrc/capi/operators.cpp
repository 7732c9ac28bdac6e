// The C functions of all operators, generated from their declarations (codegen/c_definitions.py). OPERATOR defines both
// phases of one: its name, its parameters in brackets, and their names again.
#include "capi/entry.h"  // IWYU pragma: keep

#define PARAMETERS(...) __VA_ARGS__
#define OPERATOR(NAME, IN_BRACKETS, ...)                                                                            \
    static constexpr fusion::capi::Operator NAME{"aclnn" #NAME, #__VA_ARGS__};                                      \
    aclnnStatus aclnn##NAME##GetWorkspaceSize(PARAMETERS IN_BRACKETS, uint64_t *workspaceSize,                      \
                                              aclOpExecutor **executor) {                                           \
        const fusion::capi::Value values[] = {__VA_ARGS__};                                                         \
        return fusion::capi::plan(NAME, values, workspaceSize, executor);                                           \
    }                                                                                                               \
    aclnnStatus aclnn##NAME(void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, aclrtStream stream) { \
        return fusion::capi::run(NAME, workspace, workspaceSize, executor, stream);                                 \
    }

#include "capi/operators.inc"
