/* Generated from the operator definitions by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* FusedInferAttentionScore with separate scales of keys and of values, and a shared prefix.
 *   pseShiftOptional: Added to the scaled scores: [B or 1, N1, S1 or 1, S2], in the query's dtype. Null: absent.
 *   attenMaskOptional: 1 hides a key from a row: [S1, S2], [B or 1, S1, S2] or [B or 1, 1, S1, S2]; sparse_mode 2,
 *       3 and 4 take a 2048 x 2048 triangle, torch.ones(2048, 2048, dtype=torch.bool).triu(1); mode 9 a tree mask,
 *       [B, S1, S1]. Null: absent.
 *   actualSeqLengthsOptional: Query rows of every sequence (one number serves all); packed rows: cumulative ends.
 *       None: all. Null: absent.
 *   actualSeqLengthsKvOptional: Keys of every sequence (one number serves all); packed keys: cumulative ends;
 *       pages: lengths. None: all. Null: absent.
 *   deqScale1Optional: With an int8 query: factor on the integer scores. Null: absent.
 *   quantScale1Optional: With an int8 query: factor on the weights before they are rounded to int8. Null: absent.
 *   deqScale2Optional: With an int8 query: factor on the integer output; it includes 1 / quant_scale1. Null:
 *       absent.
 *   quantScale2Optional: Scale of int8 output, 1 or N1*Dv elements. Null: absent.
 *   quantOffset2Optional: Offset of int8 output, in the shape of quant_scale2. Null: absent.
 *   antiquantScaleOptional: Scales of integers, keys then values: [2], [2, N2*D] or (antiquant_mode 1) [2, B, S2].
 *       Null: absent.
 *   antiquantOffsetOptional: Added to the integers before scaling; shape of antiquant_scale. Null: absent.
 *   blockTableOptional: The pages of every sequence, in order. Null: absent.
 *   queryPaddingSizeOptional: One number: unused rows of query behind the last row of every sequence. Null: absent.
 *   kvPaddingSizeOptional: One number: unused tokens of key behind the last key of every sequence. Null: absent.
 *   keyAntiquantScaleOptional: Scales of integer keys, by mode: 0: one number or [N2*D], 1: [B, S2], 2: [N2], 3:
 *       [B, N2, S2], 4: [blocks, block_size], 5: [blocks, N2, block_size]. Null: absent.
 *   keyAntiquantOffsetOptional: Added to integer keys before scaling. Null: absent.
 *   valueAntiquantScaleOptional: Scales of integer values, by mode: 0: one number or [N2*D], 1: [B, S2], 2: [N2],
 *       3: [B, N2, S2], 4: [blocks, block_size], 5: [blocks, N2, block_size]. Null: absent.
 *   valueAntiquantOffsetOptional: Added to integer values before scaling. Null: absent.
 *   keySharedPrefixOptional: Keys of a prefix that all sequences share. Null: absent.
 *   valueSharedPrefixOptional: Values of a prefix that all sequences share. Null: absent.
 *   actualSharedPrefixLenOptional: One number: used keys of the shared prefix; None: all. Null: absent.
 *   keyAntiquantMode: Kind of key_antiquant_scale: 0 per channel or one number, 1 per token, 2 per head, 3 per
 *       token and head, 4 and 5 as 1 and 3 but paged.
 *   valueAntiquantMode: Kind of value_antiquant_scale: 0 per channel or one number, 1 per token, 2 per head, 3 per
 *       token and head, 4 and 5 as 1 and 3 but paged.
 * The other parameters are explained in aclnn_fused_infer_attention_score.h. */
ACLNN_FUNCTION aclnnStatus aclnnFusedInferAttentionScoreV2GetWorkspaceSize(
    const aclTensor *query, const aclTensorList *key, const aclTensorList *value, const aclTensor *pseShiftOptional,
    const aclTensor *attenMaskOptional, const aclIntArray *actualSeqLengthsOptional,
    const aclIntArray *actualSeqLengthsKvOptional, const aclTensor *deqScale1Optional,
    const aclTensor *quantScale1Optional, const aclTensor *deqScale2Optional, const aclTensor *quantScale2Optional,
    const aclTensor *quantOffset2Optional, const aclTensor *antiquantScaleOptional,
    const aclTensor *antiquantOffsetOptional, const aclTensor *blockTableOptional,
    const aclTensor *queryPaddingSizeOptional, const aclTensor *kvPaddingSizeOptional,
    const aclTensor *keyAntiquantScaleOptional, const aclTensor *keyAntiquantOffsetOptional,
    const aclTensor *valueAntiquantScaleOptional, const aclTensor *valueAntiquantOffsetOptional,
    const aclTensor *keySharedPrefixOptional, const aclTensor *valueSharedPrefixOptional,
    const aclIntArray *actualSharedPrefixLenOptional, int64_t numHeads, double scaleValue, int64_t preTokens,
    int64_t nextTokens, char *inputLayout, int64_t numKeyValueHeads, int64_t sparseMode, int64_t innerPrecise,
    int64_t blockSize, int64_t antiquantMode, bool softmaxLseFlag, int64_t keyAntiquantMode,
    int64_t valueAntiquantMode, const aclTensor *attentionOut, const aclTensor *softmaxLse, uint64_t *workspaceSize,
    aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnFusedInferAttentionScoreV2(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);
