/* Generated from the operator definitions by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* The softmax statistics of an indexer's scores over all keys of a row.
 *   queryIndex: Query rows of the indexer.
 *   keyIndex: Key rows of the indexer, one head for all of its query heads.
 *   weight: Weight of every head of the indexer, in its query's dtype or float32; a scale of the scores is
 *       multiplied into it.
 *   actualSeqLengthsQueryOptional: Query rows of every sequence; TND: cumulative ends, required. Null: absent.
 *   actualSeqLengthsKeyOptional: Keys of every sequence; TND: cumulative ends, required. Null: absent.
 *   layoutOptional: Axis order of query rows.
 *   sparseMode: 0: all keys are visible; 3: causal, the last row sees the last key.
 *   preTokens: Without effect.
 *   nextTokens: Without effect.
 *   softmaxMaxOut: Row maxima of the scores; 0 in rows without visible keys.
 *   softmaxSumOut: Row sums of exp(score - max); 0 in rows without visible keys. */
ACLNN_FUNCTION aclnnStatus aclnnDenseLightningIndexerSoftmaxLseGetWorkspaceSize(
    const aclTensor *queryIndex, const aclTensor *keyIndex, const aclTensor *weight,
    const aclIntArray *actualSeqLengthsQueryOptional, const aclIntArray *actualSeqLengthsKeyOptional,
    char *layoutOptional, int64_t sparseMode, int64_t preTokens, int64_t nextTokens, const aclTensor *softmaxMaxOut,
    const aclTensor *softmaxSumOut, uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnDenseLightningIndexerSoftmaxLse(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);
