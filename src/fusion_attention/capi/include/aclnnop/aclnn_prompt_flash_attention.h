/* Written from the operators' records by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* Attention of prompts.
 *   query: Query rows.
 *   key: Key rows.
 *   value: Value rows.
 *   pseShift: Added to the scaled scores: [B or 1, N1, S1 or 1, S2], in the query's dtype. Null: absent.
 *   attenMask: 1 = this key is not seen: [S1, S2], [B or 1, S1, S2] or [B or 1, 1, S1, S2]; sparse_mode 2, 3 and 4
 *       take a 2048 x 2048 triangle, torch.ones(2048, 2048, dtype=torch.bool).triu(1); trees [B, S1, S1]. Null:
 *       absent.
 *   actualSeqLengths: Query rows of every item (one number serves all); packed rows: cumulative ends. None: all.
 *       Null: absent.
 *   numHeads: Query heads.
 *   scaleValue: Factor on query . key; 1.0 unless said, not 1 / sqrt(D).
 *   preTokens: Window to the left (modes 0 with a mask, and 4).
 *   nextTokens: Window to the right (modes 0 with a mask, and 4).
 *   inputLayout: Axis order of query, key and value; behind a _ that of the output.
 *   numKeyValueHeads: Key heads; 0: as many as query heads.
 *   attentionOut: The output rows: int8 beside quant_scale2, float16 of other int8 rows. Zeros where a row sees no
 *       key, the mean of the values where the mask alone hides all. */
ACLNN_FUNCTION aclnnStatus aclnnPromptFlashAttentionGetWorkspaceSize(
    const aclTensor *query, const aclTensor *key, const aclTensor *value, const aclTensor *pseShift,
    const aclTensor *attenMask, const aclIntArray *actualSeqLengths, int64_t numHeads, double scaleValue,
    int64_t preTokens, int64_t nextTokens, char *inputLayout, int64_t numKeyValueHeads,
    const aclTensor *attentionOut, uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnPromptFlashAttention(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);
