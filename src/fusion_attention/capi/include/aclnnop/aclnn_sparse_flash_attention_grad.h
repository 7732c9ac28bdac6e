/* Generated from the operator definitions by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* Gradients of SparseFlashAttention, padded or packed.
 *   query: Query rows.
 *   key: Key rows.
 *   value: Value rows; None: values are the first Dv elements of key rows, and dkey is the sum of both gradients.
 *       Null: absent.
 *   sparseIndices: Per row and key head a list of selected blocks, numbered from 0 in each sequence; -1 ends a
 *       list.
 *   dOut: Gradient of the output.
 *   out: The forward's output.
 *   softmaxMax: Row maxima that the forward returned.
 *   softmaxSum: Row sums that the forward returned.
 *   actualSeqLengthsQueryOptional: Query rows of every sequence; TND: cumulative ends, required. Null: absent.
 *   actualSeqLengthskvOptional: Keys of every sequence; TND: cumulative ends, required. Null: absent.
 *   queryRopeOptional: Rope part of the query rows. Null: absent.
 *   keyRopeOptional: Rope part of the key rows. Null: absent.
 *   scaleValue: Factor on query . key.
 *   sparseBlockSize: Tokens of a selected block.
 *   layoutOptional: Axis order of query rows.
 *   sparseMode: 0: all keys are visible; 3: causal, the last row sees the last key.
 *   preTokens: Without effect.
 *   nextTokens: Without effect.
 *   deterministic: Accepted; results are always reproducible on the CPU.
 *   dQueryOut: Gradient of query.
 *   dKeyOut: Gradient of key.
 *   dValueOut: Gradient of value.
 *   dQueryRopeOutOptional: Gradient of query_rope.
 *   dKeyRopeOutOptional: Gradient of key_rope. */
ACLNN_FUNCTION aclnnStatus aclnnSparseFlashAttentionGradGetWorkspaceSize(
    const aclTensor *query, const aclTensor *key, const aclTensor *value, const aclTensor *sparseIndices,
    const aclTensor *dOut, const aclTensor *out, const aclTensor *softmaxMax, const aclTensor *softmaxSum,
    const aclTensor *actualSeqLengthsQueryOptional, const aclTensor *actualSeqLengthskvOptional,
    const aclTensor *queryRopeOptional, const aclTensor *keyRopeOptional, double scaleValue, int64_t sparseBlockSize,
    char *layoutOptional, int64_t sparseMode, int64_t preTokens, int64_t nextTokens, bool deterministic,
    const aclTensor *dQueryOut, const aclTensor *dKeyOut, const aclTensor *dValueOut,
    const aclTensor *dQueryRopeOutOptional, const aclTensor *dKeyRopeOutOptional, uint64_t *workspaceSize,
    aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnSparseFlashAttentionGrad(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);
