/* Generated from the operator definitions by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* IncreFlashAttentionV2 with pse_shift, an int8 cache and pages.
 *   antiquantScale: Scales of an int8 cache, keys then values: [2], [2, N2, 1, D], [2, N2, D] or [2, N2*D]. Null:
 *       absent.
 *   antiquantOffset: Added to the integers before scaling; shape of antiquant_scale. Null: absent.
 *   blocktable: The pages of every sequence, in order. Null: absent.
 *   blockSize: Tokens of a page; ignored without a block table.
 *   innerPrecise: 0 or 1; both compute in float32.
 * The other parameters are explained in aclnn_incre_flash_attention.h, aclnn_incre_flash_attention_v2.h. */
ACLNN_FUNCTION aclnnStatus aclnnIncreFlashAttentionV3GetWorkspaceSize(
    const aclTensor *query, const aclTensorList *key, const aclTensorList *value, const aclTensor *pseShift,
    const aclTensor *attenMask, const aclIntArray *actualSeqLengths, const aclTensor *dequantScale1,
    const aclTensor *quantScale1, const aclTensor *dequantScale2, const aclTensor *quantScale2,
    const aclTensor *quantOffset2, const aclTensor *antiquantScale, const aclTensor *antiquantOffset,
    const aclTensor *blocktable, int64_t numHeads, double scaleValue, char *inputLayout, int64_t numKeyValueHeads,
    int64_t blockSize, int64_t innerPrecise, const aclTensor *attentionOut, uint64_t *workspaceSize,
    aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnIncreFlashAttentionV3(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);
