/* Generated from the operator definitions by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* IncreFlashAttention with int8 output.
 *   dequantScale1: Reserved (for an int8 query). Null: absent.
 *   quantScale1: Reserved (for an int8 query). Null: absent.
 *   dequantScale2: Reserved (for an int8 query). Null: absent.
 *   quantScale2: Scale of int8 output, 1 or N1*D elements; halves round to even (one scale) or away from zero.
 *       Null: absent.
 *   quantOffset2: Offset of int8 output, in the shape of quant_scale2. Null: absent.
 * The other parameters are explained in aclnn_incre_flash_attention.h. */
ACLNN_FUNCTION aclnnStatus aclnnIncreFlashAttentionV2GetWorkspaceSize(
    const aclTensor *query, const aclTensorList *key, const aclTensorList *value, const aclTensor *pseShift,
    const aclTensor *attenMask, const aclIntArray *actualSeqLengths, const aclTensor *dequantScale1,
    const aclTensor *quantScale1, const aclTensor *dequantScale2, const aclTensor *quantScale2,
    const aclTensor *quantOffset2, int64_t numHeads, double scaleValue, char *inputLayout, int64_t numKeyValueHeads,
    const aclTensor *attentionOut, uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnIncreFlashAttentionV2(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);
