/* Generated from the operator definitions by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* BlockSparseAttention with scales of fp8 tensors, and layout BSND.
 *   qDequantScale: Scales of query in fp8 (950 only): not computed here. Null: absent.
 *   kDequantScale: Scales of key in fp8 (950 only): not computed here. Null: absent.
 *   vDequantScale: Scales of value in fp8 (950 only): not computed here. Null: absent.
 * The other parameters are explained in aclnn_block_sparse_attention.h. */
ACLNN_FUNCTION aclnnStatus aclnnBlockSparseAttentionV2GetWorkspaceSize(
    const aclTensor *query, const aclTensor *key, const aclTensor *value, const aclTensor *blockSparseMaskOptional,
    const aclTensor *attenMaskOptional, const aclIntArray *blockShapeOptional,
    const aclIntArray *actualSeqLengthsOptional, const aclIntArray *actualSeqLengthsKvOptional,
    const aclTensor *blockTableOptional, const aclTensor *qDequantScale, const aclTensor *kDequantScale,
    const aclTensor *vDequantScale, char *qInputLayout, char *kvInputLayout, int64_t numKeyValueHeads,
    int64_t maskType, double scaleValue, int64_t innerPrecise, int64_t blockSize, int64_t preTokens,
    int64_t nextTokens, int64_t softmaxLseFlag, const aclTensor *attentionOut, const aclTensor *softmaxLseOptional,
    uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnBlockSparseAttentionV2(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);
