/* Generated from the operator definitions by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* Kullback-Leibler divergence of the indexer's distribution over the selected keys from the attention's, and its
 * gradients.
 *   query: Query rows.
 *   key: Key rows.
 *   queryIndex: Query rows of the indexer.
 *   keyIndex: Key rows of the indexer, one head for all of its query heads.
 *   weights: Weight of every head of the indexer, in its query's dtype or float32; a scale of the scores is
 *       multiplied into it.
 *   sparseIndices: The keys that every row selects, shared by all heads; -1 ends a list.
 *   softmaxMax: Row maxima that the forward returned.
 *   softmaxSum: Row sums that the forward returned.
 *   queryRope: Rope part of the query rows. Null: absent.
 *   keyRope: Rope part of the key rows. Null: absent.
 *   actualSeqLengthsQuery: Query rows of every sequence; TND: cumulative ends, required. Null: absent.
 *   actualSeqLengthsKey: Keys of every sequence; TND: cumulative ends, required. Null: absent.
 *   scaleValue: Factor on query . key.
 *   layout: Axis order of query rows.
 *   sparseMode: 0: all keys are visible; 3: causal, the last row sees the last key.
 *   pre_tokens: Without effect.
 *   next_tokens: Without effect.
 *   deterministic: Accepted; results are always reproducible on the CPU.
 *   dQueryIndex: Gradient of query_index.
 *   dKeyIndex: Gradient of key_index.
 *   dWeights: Gradient of weights.
 *   loss: The loss, summed over all rows. */
ACLNN_FUNCTION aclnnStatus aclnnSparseLightningIndexerGradKLLossGetWorkspaceSize(
    const aclTensor *query, const aclTensor *key, const aclTensor *queryIndex, const aclTensor *keyIndex,
    const aclTensor *weights, const aclTensor *sparseIndices, const aclTensor *softmaxMax,
    const aclTensor *softmaxSum, const aclTensor *queryRope, const aclTensor *keyRope,
    const aclIntArray *actualSeqLengthsQuery, const aclIntArray *actualSeqLengthsKey, double scaleValue,
    char *layout, int64_t sparseMode, int64_t pre_tokens, int64_t next_tokens, bool deterministic,
    const aclTensor *dQueryIndex, const aclTensor *dKeyIndex, const aclTensor *dWeights, const aclTensor *loss,
    uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnSparseLightningIndexerGradKLLoss(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);
