/* Generated from the operator definitions by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* Gradients of the values that LightningIndexer returned, for padded or packed keys.
 *   query: Query rows.
 *   key: Key rows, one head for all query heads.
 *   dy: Gradient of the values.
 *   sparseIndices: The forward's indices.
 *   weights: Weight of every query head, in the query's dtype or float32; a scale of the scores is multiplied into
 *       it.
 *   actualSeqQLenOptional: Query rows of every sequence; TND: cumulative ends, required. Null: absent.
 *   actualSeqKvLenOptional: Keys of every sequence; TND: cumulative ends, required. Null: absent.
 *   headNum: Query heads.
 *   inputLayout: Axis order of query rows.
 *   sparseMode: 0: all keys are visible; 3: causal, the last row sees the last key.
 *   preTokens: Without effect.
 *   nextTokens: Without effect.
 *   deterministic: Accepted; results are always reproducible on the CPU.
 *   dqOut: Gradient of query.
 *   dkOut: Gradient of key.
 *   dweightsOut: Gradient of weights. */
ACLNN_FUNCTION aclnnStatus aclnnLightningIndexerGradGetWorkspaceSize(
    const aclTensor *query, const aclTensor *key, const aclTensor *dy, const aclTensor *sparseIndices,
    const aclTensor *weights, const aclTensor *actualSeqQLenOptional, const aclTensor *actualSeqKvLenOptional,
    int64_t headNum, char *inputLayout, int64_t sparseMode, int64_t preTokens, int64_t nextTokens,
    bool deterministic, const aclTensor *dqOut, const aclTensor *dkOut, const aclTensor *dweightsOut,
    uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnLightningIndexerGrad(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);
