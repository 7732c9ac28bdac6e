/* Generated from the operator definitions by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* Softmax attention of each block of query rows to the blocks of keys that a block mask makes visible.
 *   query: Query rows.
 *   key: Key rows; N1 is a multiple of N2.
 *   value: Value rows.
 *   blockSparseMaskOptional: [B, N1, ceil(S1 / X), ceil(S2 / Y)]; nonzero: the keys of a block of keys are visible
 *       to the rows of a block of rows. S1 and S2 are the largest lengths; blocks count from each sequence's first
 *       token. None: all are visible. Null: absent.
 *   attenMaskOptional: Reserved. Null: absent.
 *   blockShapeOptional: [X, Y], rows and keys of a block; None: [128, 128]. Null: absent.
 *   actualSeqLengthsOptional: Query rows of every sequence; required in layout TND. Null: absent.
 *   actualSeqLengthsKvOptional: Keys of every sequence; required in layout TND. Null: absent.
 *   blockTableOptional: Reserved. Null: absent.
 *   qInputLayout: Axis order of query rows.
 *   kvInputLayout: Axis order of keys; it must be that of queries.
 *   numKeyValueHeads: Key heads.
 *   maskType: 0: no mask except the block mask.
 *   scaleValue: Factor on query . key; the default is 1.0, not 1 / sqrt(D).
 *   innerPrecise: Without effect: the softmax is in float32.
 *   blockSize: Without effect.
 *   preTokens: Without effect.
 *   nextTokens: Without effect.
 *   softmaxLseFlag: 1: return softmax_lse.
 *   attentionOut: The output rows.
 *   softmaxLseOptional: log(sum(exp(s))) of every row and head; -inf in a row without visible keys. */
ACLNN_FUNCTION aclnnStatus aclnnBlockSparseAttentionGetWorkspaceSize(
    const aclTensor *query, const aclTensor *key, const aclTensor *value, const aclTensor *blockSparseMaskOptional,
    const aclTensor *attenMaskOptional, const aclIntArray *blockShapeOptional,
    const aclIntArray *actualSeqLengthsOptional, const aclIntArray *actualSeqLengthsKvOptional,
    const aclTensor *blockTableOptional, char *qInputLayout, char *kvInputLayout, int64_t numKeyValueHeads,
    int64_t maskType, double scaleValue, int64_t innerPrecise, int64_t blockSize, int64_t preTokens,
    int64_t nextTokens, int64_t softmaxLseFlag, const aclTensor *attentionOut, const aclTensor *softmaxLseOptional,
    uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnBlockSparseAttention(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);
