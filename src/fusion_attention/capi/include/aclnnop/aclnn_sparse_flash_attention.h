/* Generated from the operator definitions by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* Softmax attention over the blocks of keys that every row selects.
 *   query: Query rows.
 *   key: Key rows.
 *   value: Value rows; None: values are the first Dv elements of key rows, and dkey is the sum of both gradients.
 *       Null: absent.
 *   sparseIndices: Per row and key head a list of selected blocks, numbered from 0 in each sequence; -1 ends a
 *       list.
 *   blockTableOptional: The pages of every sequence, for keys in layout PA_BSND. Null: absent.
 *   actualSeqLengthsQueryOptional: Query rows of every sequence; TND: cumulative ends, required. Null: absent.
 *   actualSeqLengthsKvOptional: Keys of every sequence; TND: cumulative ends, required. Null: absent.
 *   queryRopeOptional: Rope part of the query rows. Null: absent.
 *   keyRopeOptional: Rope part of the key rows. Null: absent.
 *   scaleValue: Factor on query . key.
 *   sparseBlockSizeOptional: Tokens of a selected block.
 *   layoutQueryOptional: Axis order of query rows.
 *   layoutKvOptional: Axis order of keys: the layout of queries, or PA_BSND.
 *   sparseMode: 0: all keys are visible; 3: causal, the last row sees the last key.
 *   preTokens: Without effect.
 *   nextTokens: Without effect.
 *   attentionMode: Without effect; the chip supports 2 alone, with values that are the first elements of keys.
 *   returnSoftmaxLse: Return row maxima and sums.
 *   attentionOut: The output rows.
 *   softmaxMax: Row maxima of the scaled scores; 0 in rows without visible keys.
 *   softmaxSum: Row sums of exp(score - max); 0 in rows without visible keys. */
ACLNN_FUNCTION aclnnStatus aclnnSparseFlashAttentionGetWorkspaceSize(
    const aclTensor *query, const aclTensor *key, const aclTensor *value, const aclTensor *sparseIndices,
    const aclTensor *blockTableOptional, const aclTensor *actualSeqLengthsQueryOptional,
    const aclTensor *actualSeqLengthsKvOptional, const aclTensor *queryRopeOptional,
    const aclTensor *keyRopeOptional, double scaleValue, int64_t sparseBlockSizeOptional, char *layoutQueryOptional,
    char *layoutKvOptional, int64_t sparseMode, int64_t preTokens, int64_t nextTokens, int64_t attentionMode,
    bool returnSoftmaxLse, const aclTensor *attentionOut, const aclTensor *softmaxMax, const aclTensor *softmaxSum,
    uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnSparseFlashAttention(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);
