/* Generated from the operator definitions by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* PromptFlashAttention with key lengths, sparse modes, int8 queries and int8 output.
 *   actualSeqLengthsKv: Keys of every sequence (one number serves all); packed keys: cumulative ends; pages:
 *       lengths. None: all. Null: absent.
 *   deqScale1: With an int8 query: factor on the integer scores. Null: absent.
 *   quantScale1: With an int8 query: factor on the weights before they are rounded to int8. Null: absent.
 *   deqScale2: With an int8 query: factor on the integer output; it includes 1 / quant_scale1. Null: absent.
 *   quantScale2: Scale of int8 output, 1 or N1*Dv elements. Null: absent.
 *   quantOffset2: Offset of int8 output, in the shape of quant_scale2. Null: absent.
 *   sparseMode: 0 mask and window, 1 mask alone, 2 causal from the upper left, 3 to the lower right, 4 window to
 *       the lower right.
 * The other parameters are explained in aclnn_prompt_flash_attention.h. */
ACLNN_FUNCTION aclnnStatus aclnnPromptFlashAttentionV2GetWorkspaceSize(
    const aclTensor *query, const aclTensor *key, const aclTensor *value, const aclTensor *pseShift,
    const aclTensor *attenMask, const aclIntArray *actualSeqLengths, const aclIntArray *actualSeqLengthsKv,
    const aclTensor *deqScale1, const aclTensor *quantScale1, const aclTensor *deqScale2,
    const aclTensor *quantScale2, const aclTensor *quantOffset2, int64_t numHeads, double scaleValue,
    int64_t preTokens, int64_t nextTokens, char *inputLayout, int64_t numKeyValueHeads, int64_t sparseMode,
    const aclTensor *attentionOut, uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnPromptFlashAttentionV2(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);
