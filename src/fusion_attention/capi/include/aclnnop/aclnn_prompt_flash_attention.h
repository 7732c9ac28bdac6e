/* Generated from the operator definitions by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* Softmax attention of prompts.
 *   query: Query rows.
 *   key: Key rows.
 *   value: Value rows.
 *   pseShift: Added to the scaled scores: [B or 1, N1, S1 or 1, S2], in the query's dtype. Null: absent.
 *   attenMask: 1 hides a key from a row: [S1, S2], [B or 1, S1, S2] or [B or 1, 1, S1, S2]; sparse_mode 2, 3 and 4
 *       take a 2048 x 2048 triangle, torch.ones(2048, 2048, dtype=torch.bool).triu(1); mode 9 a tree mask, [B, S1,
 *       S1]. Null: absent.
 *   actualSeqLengths: Query rows of every sequence (one number serves all); packed rows: cumulative ends. None:
 *       all. Null: absent.
 *   numHeads: Query heads.
 *   scaleValue: Factor on query . key; the default is 1.0, not 1 / sqrt(D).
 *   preTokens: Visible tokens before the diagonal (mode 0 with a mask, and 4).
 *   nextTokens: Visible tokens behind the diagonal (mode 0 with a mask, and 4).
 *   inputLayout: Axis order of query, key and value; that of the output follows a _ if it differs.
 *   numKeyValueHeads: Key heads; 0: as many as query heads.
 *   attentionOut: The output rows: int8 with quant_scale2, otherwise the dtype of query; for an int8 query that of
 *       query_rope, or float16. Rows without visible keys are zeros; if the mask alone hides all keys, the mean of
 *       V. */
ACLNN_FUNCTION aclnnStatus aclnnPromptFlashAttentionGetWorkspaceSize(
    const aclTensor *query, const aclTensor *key, const aclTensor *value, const aclTensor *pseShift,
    const aclTensor *attenMask, const aclIntArray *actualSeqLengths, int64_t numHeads, double scaleValue,
    int64_t preTokens, int64_t nextTokens, char *inputLayout, int64_t numKeyValueHeads,
    const aclTensor *attentionOut, uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnPromptFlashAttention(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);
