/* Generated from the operator definitions by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* Softmax attention of one new token per sequence to the keys in its cache.
 *   query: Query rows, one per sequence; several are causal, as the last rows of a prompt.
 *   key: Key rows: one tensor, one per sequence, or pages [blocks, block_size, N2*D] or [blocks, N2, block_size,
 *       D].
 *   value: Value rows, in the form of key.
 *   pseShift: Added to the scaled scores: [B or 1, N1, S1, S2]. Null: absent.
 *   attenMask: 1 hides a token of the cache: [B, S2], [B, 1, S2] or [B, 1, 1, S2]. Null: absent.
 *   actualSeqLengths: Tokens of every sequence in the cache; one number serves all; None: the whole cache. Null:
 *       absent.
 *   numHeads: Query heads.
 *   scaleValue: Factor on query . key; the default is 1.0, not 1 / sqrt(D).
 *   inputLayout: Axis order of query, output, and a cache without pages.
 *   numKeyValueHeads: Key heads; 0: as many as query heads.
 *   attentionOut: The output rows: zeros if a sequence is empty, the mean of V if the mask hides all. int8 beside
 *       quant_scale2. */
ACLNN_FUNCTION aclnnStatus aclnnIncreFlashAttentionGetWorkspaceSize(
    const aclTensor *query, const aclTensorList *key, const aclTensorList *value, const aclTensor *pseShift,
    const aclTensor *attenMask, const aclIntArray *actualSeqLengths, int64_t numHeads, double scaleValue,
    char *inputLayout, int64_t numKeyValueHeads, const aclTensor *attentionOut, uint64_t *workspaceSize,
    aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnIncreFlashAttention(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);
