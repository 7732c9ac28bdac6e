/* Generated from the operator definitions by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* IncreFlashAttentionV3 with left padding.
 *   kvPaddingSize: One number: unused tokens of the cache behind the last token of every sequence. Null: absent.
 * The other parameters are explained in aclnn_incre_flash_attention.h, aclnn_incre_flash_attention_v2.h,
 * aclnn_incre_flash_attention_v3.h. */
ACLNN_FUNCTION aclnnStatus aclnnIncreFlashAttentionV4GetWorkspaceSize(
    const aclTensor *query, const aclTensorList *key, const aclTensorList *value, const aclTensor *pseShift,
    const aclTensor *attenMask, const aclIntArray *actualSeqLengths, const aclTensor *dequantScale1,
    const aclTensor *quantScale1, const aclTensor *dequantScale2, const aclTensor *quantScale2,
    const aclTensor *quantOffset2, const aclTensor *antiquantScale, const aclTensor *antiquantOffset,
    const aclTensor *blocktable, const aclTensor *kvPaddingSize, int64_t numHeads, double scaleValue,
    char *inputLayout, int64_t numKeyValueHeads, int64_t blockSize, int64_t innerPrecise,
    const aclTensor *attentionOut, uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnIncreFlashAttentionV4(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);
