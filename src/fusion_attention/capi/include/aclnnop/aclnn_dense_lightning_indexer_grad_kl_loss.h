/* Generated from the operator definitions by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* Kullback-Leibler divergence of the indexer's distribution over all keys from the attention's, and its gradients.
 *   query: Query rows.
 *   key: Key rows.
 *   queryIndex: Query rows of the indexer.
 *   keyIndex: Key rows of the indexer, one head for all of its query heads.
 *   weight: Weight of every head of the indexer, in its query's dtype or float32; a scale of the scores is
 *       multiplied into it.
 *   softmaxMax: Row maxima that the forward returned.
 *   softmaxSum: Row sums that the forward returned.
 *   softmaxMaxIndex: Row maxima of the indexer's scores, from npu_dense_lightning_indexer_softmax_lse.
 *   softmaxSumIndex: Row sums of exp(score - max) of the indexer's scores.
 *   queryRopeOptional: Rope part of the query rows. Null: absent.
 *   keyRopeOptional: Rope part of the key rows. Null: absent.
 *   actualSeqLengthsQueryOptional: Query rows of every sequence; TND: cumulative ends, required. Null: absent.
 *   actualSeqLengthsKeyOptional: Keys of every sequence; TND: cumulative ends, required. Null: absent.
 *   scaleValue: Factor on query . key.
 *   layoutOptional: Axis order of query rows.
 *   sparseMode: 0: all keys are visible; 3: causal, the last row sees the last key.
 *   preTokens: Without effect.
 *   nextTokens: Without effect.
 *   dQueryIndexOut: Gradient of query_index.
 *   dKeyIndexOut: Gradient of key_index.
 *   dWeightOut: Gradient of weights.
 *   lossOut: The loss, summed over all rows. */
ACLNN_FUNCTION aclnnStatus aclnnDenseLightningIndexerGradKLLossGetWorkspaceSize(
    const aclTensor *query, const aclTensor *key, const aclTensor *queryIndex, const aclTensor *keyIndex,
    const aclTensor *weight, const aclTensor *softmaxMax, const aclTensor *softmaxSum,
    const aclTensor *softmaxMaxIndex, const aclTensor *softmaxSumIndex, const aclTensor *queryRopeOptional,
    const aclTensor *keyRopeOptional, const aclIntArray *actualSeqLengthsQueryOptional,
    const aclIntArray *actualSeqLengthsKeyOptional, double scaleValue, char *layoutOptional, int64_t sparseMode,
    int64_t preTokens, int64_t nextTokens, const aclTensor *dQueryIndexOut, const aclTensor *dKeyIndexOut,
    const aclTensor *dWeightOut, const aclTensor *lossOut, uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnDenseLightningIndexerGradKLLoss(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);
