/* Written from the operators' records by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* Attention to the blocks of keys that a mask leaves to each block of query rows.
 *   query: Query rows.
 *   key: Key rows; N1 is a multiple of N2.
 *   value: Value rows.
 *   blockSparseMaskOptional: Nonzero: the rows of this block see the keys of this block. [B, N1, ceil(S1 / X),
 *       ceil(S2 / Y)], S1 and S2 of the longest sequence; blocks are counted from each sequence's first token.
 *       None: all keys are visible. Null: absent.
 *   attenMaskOptional: Reserved. Null: absent.
 *   blockShapeOptional: [X, Y], rows and keys of a block; None: [128, 128]. Null: absent.
 *   actualSeqLengthsOptional: Query rows of every sequence; TND: needed. Null: absent.
 *   actualSeqLengthsKvOptional: Keys of every sequence; TND: needed. Null: absent.
 *   blockTableOptional: Reserved. Null: absent.
 *   qInputLayout: Axis order of query rows.
 *   kvInputLayout: Axis order of key rows: as the queries'.
 *   numKeyValueHeads: Key heads.
 *   maskType: 0: no mask beside the blocks.
 *   scaleValue: Factor on query . key; no value stands for 1 / sqrt(D).
 *   innerPrecise: Without effect: the softmax is in float32.
 *   blockSize: Without effect.
 *   preTokens: Without effect: no window is defined beside the blocks.
 *   nextTokens: Without effect: no window is defined beside the blocks.
 *   softmaxLseFlag: 1: return softmax_lse.
 *   attentionOut: The output rows.
 *   softmaxLseOptional: log(sum(exp(s))) of every row and head; -inf in a row that sees no key. */
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
