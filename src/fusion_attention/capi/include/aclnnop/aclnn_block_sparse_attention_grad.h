/* Generated from the operator definitions by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* Gradients of BlockSparseAttention, from its output and its softmax_lse.
 *   dout: Gradient of the output.
 *   query: Query rows.
 *   key: Key rows; N1 is a multiple of N2.
 *   value: Value rows.
 *   attentionOut: The forward's output.
 *   softmaxLse: As the forward returned it; its last axis, of 1, may be missing.
 *   blockSparseMaskOptional: [B, N1, ceil(S1 / X), ceil(S2 / Y)]; nonzero: the keys of a block of keys are visible
 *       to the rows of a block of rows. S1 and S2 are the largest lengths; blocks count from each sequence's first
 *       token. None: all are visible. Null: absent.
 *   attenMaskOptional: Reserved. Null: absent.
 *   blockShapeOptional: [X, Y], rows and keys of a block; None: [128, 128]. Null: absent.
 *   actualSeqLengthsOptional: Query rows of every sequence; required in layout TND. Null: absent.
 *   actualSeqLengthsKvOptional: Keys of every sequence; required in layout TND. Null: absent.
 *   qInputLayout: Axis order of query rows.
 *   kvInputLayout: Axis order of keys; it must be that of queries.
 *   numKeyValueHeads: Key heads.
 *   maskType: 0: no mask except the block mask.
 *   scaleValue: Factor on query . key; the default is 1.0, not 1 / sqrt(D).
 *   preTokens: Without effect.
 *   nextTokens: Without effect.
 *   dq: Gradient of query.
 *   dk: Gradient of key.
 *   dv: Gradient of value. */
ACLNN_FUNCTION aclnnStatus aclnnBlockSparseAttentionGradGetWorkspaceSize(
    const aclTensor *dout, const aclTensor *query, const aclTensor *key, const aclTensor *value,
    const aclTensor *attentionOut, const aclTensor *softmaxLse, const aclTensor *blockSparseMaskOptional,
    const aclTensor *attenMaskOptional, const aclIntArray *blockShapeOptional,
    const aclIntArray *actualSeqLengthsOptional, const aclIntArray *actualSeqLengthsKvOptional, char *qInputLayout,
    char *kvInputLayout, int64_t numKeyValueHeads, int64_t maskType, double scaleValue, int64_t preTokens,
    int64_t nextTokens, const aclTensor *dq, const aclTensor *dk, const aclTensor *dv, uint64_t *workspaceSize,
    aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnBlockSparseAttentionGrad(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);
