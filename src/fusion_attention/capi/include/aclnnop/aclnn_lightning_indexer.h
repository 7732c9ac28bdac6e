/* Written from the operators' records by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* Scores of keys by ReLU-weighted heads, and per row the keys that score highest.
 *   query: Query rows.
 *   key: Key rows, one head for all query heads.
 *   weights: Weight of every query head, in the query's dtype or float32; scale factors belong into it.
 *   actualSeqLengthsQueryOptional: Query rows of every sequence; TND (needed): their cumulative ends. Null: absent.
 *   actualSeqLengthsKeyOptional: Keys of every sequence; TND (needed): their cumulative ends. Null: absent.
 *   blockTableOptional: The pages of every sequence, for keys in layout PA_BSND. Null: absent.
 *   layoutQueryOptional: Axis order of query rows.
 *   layoutKeyOptional: Axis order of key rows: as the queries', or PA_BSND.
 *   sparseCount: Keys that a row chooses.
 *   sparseMode: 0: rows see all keys; 3: causal, the last row sees the last key.
 *   preTokens: Without effect.
 *   nextTokens: Without effect.
 *   returnValues: Return the scores of the chosen keys.
 *   sparseIndicesOut: The keys chosen, best first; -1 behind the last.
 *   sparseValuesOut: Their scores; -inf behind the last. */
ACLNN_FUNCTION aclnnStatus aclnnLightningIndexerGetWorkspaceSize(
    const aclTensor *query, const aclTensor *key, const aclTensor *weights,
    const aclTensor *actualSeqLengthsQueryOptional, const aclTensor *actualSeqLengthsKeyOptional,
    const aclTensor *blockTableOptional, char *layoutQueryOptional, char *layoutKeyOptional, int64_t sparseCount,
    int64_t sparseMode, int64_t preTokens, int64_t nextTokens, bool returnValues, const aclTensor *sparseIndicesOut,
    const aclTensor *sparseValuesOut, uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnLightningIndexer(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);
