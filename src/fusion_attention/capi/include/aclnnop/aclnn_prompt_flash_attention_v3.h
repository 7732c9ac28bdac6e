/* Written from the operators' records by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* PromptFlashAttentionV2 with pse_shift, inner_precise and packed rows.
 *   query: Query rows.
 *   key: Key rows.
 *   value: Value rows.
 *   pseShift: Added to the scaled scores: [B or 1, N1, S1 or 1, S2], in the query's dtype. Null: absent.
 *   attenMask: 1 = this key is not seen: [S1, S2], [B or 1, S1, S2] or [B or 1, 1, S1, S2]; sparse_mode 2, 3 and 4
 *       take a 2048 x 2048 triangle, torch.ones(2048, 2048, dtype=torch.bool).triu(1); trees [B, S1, S1]. Null:
 *       absent.
 *   actualSeqLengths: Query rows of every item (one number serves all); packed rows: cumulative ends. None: all.
 *       Null: absent.
 *   actualSeqLengthsKv: Keys of every item (one number serves all); packed keys: cumulative ends; pages: lengths,
 *       always, and needed. None: all. Null: absent.
 *   deqScale1: Of an int8 query: scale of the integer scores. Null: absent.
 *   quantScale1: Of an int8 query: scale that makes the weights int8. Null: absent.
 *   deqScale2: Of an int8 query: scale of the integer output, which undoes quant_scale1 too. Null: absent.
 *   quantScale2: Scale of int8 output, 1 or N1*Dv elements. Null: absent.
 *   quantOffset2: Offset of int8 output, as quant_scale2. Null: absent.
 *   numHeads: Query heads.
 *   scaleValue: Factor on query . key; 1.0 unless said, not 1 / sqrt(D).
 *   preTokens: Window to the left (modes 0 with a mask, and 4).
 *   nextTokens: Window to the right (modes 0 with a mask, and 4).
 *   inputLayout: Axis order of query, key and value; behind a _ that of the output.
 *   numKeyValueHeads: Key heads; 0: as many as query heads.
 *   sparseMode: 0 mask and window, 1 mask alone, 2 causal from the upper left, 3 to the lower right, 4 window to
 *       the lower right.
 *   innerPrecise: Bit 1: rows that a mask empties are zeros, not the mean of the values. Bit 0 has no effect.
 *   attentionOut: The output rows: int8 beside quant_scale2, float16 of other int8 rows. Zeros where a row sees no
 *       key, the mean of the values where the mask alone hides all. */
ACLNN_FUNCTION aclnnStatus aclnnPromptFlashAttentionV3GetWorkspaceSize(
    const aclTensor *query, const aclTensor *key, const aclTensor *value, const aclTensor *pseShift,
    const aclTensor *attenMask, const aclIntArray *actualSeqLengths, const aclIntArray *actualSeqLengthsKv,
    const aclTensor *deqScale1, const aclTensor *quantScale1, const aclTensor *deqScale2,
    const aclTensor *quantScale2, const aclTensor *quantOffset2, int64_t numHeads, double scaleValue,
    int64_t preTokens, int64_t nextTokens, char *inputLayout, int64_t numKeyValueHeads, int64_t sparseMode,
    int64_t innerPrecise, const aclTensor *attentionOut, uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnPromptFlashAttentionV3(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);
