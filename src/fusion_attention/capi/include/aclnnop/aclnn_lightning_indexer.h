/* Generated from the operator definitions by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* Selects the keys with the highest scores for each row; a score is a weighted sum of ReLU(q . k) over heads.
 *   query: Query rows.
 *   key: Key rows, one head for all query heads.
 *   weights: Weight of every query head, in the query's dtype or float32; a scale of the scores is multiplied into
 *       it.
 *   actualSeqLengthsQueryOptional: Query rows of every sequence; TND: cumulative ends, required. Null: absent.
 *   actualSeqLengthsKeyOptional: Keys of every sequence; TND: cumulative ends, required. Null: absent.
 *   blockTableOptional: The pages of every sequence, for keys in layout PA_BSND. Null: absent.
 *   layoutQueryOptional: Axis order of query rows.
 *   layoutKeyOptional: Axis order of keys: the layout of queries, or PA_BSND.
 *   sparseCount: Number of keys that a row selects.
 *   sparseMode: 0: all keys are visible; 3: causal, the last row sees the last key.
 *   preTokens: Without effect.
 *   nextTokens: Without effect.
 *   returnValues: Return the scores of the selected keys.
 *   sparseIndicesOut: The selected keys by descending score, then -1.
 *   sparseValuesOut: The scores of the selected keys, then -inf. */
ACLNN_FUNCTION aclnnStatus aclnnLightningIndexerGetWorkspaceSize(
    const aclTensor *query, const aclTensor *key, const aclTensor *weights,
    const aclTensor *actualSeqLengthsQueryOptional, const aclTensor *actualSeqLengthsKeyOptional,
    const aclTensor *blockTableOptional, char *layoutQueryOptional, char *layoutKeyOptional, int64_t sparseCount,
    int64_t sparseMode, int64_t preTokens, int64_t nextTokens, bool returnValues, const aclTensor *sparseIndicesOut,
    const aclTensor *sparseValuesOut, uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnLightningIndexer(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);
