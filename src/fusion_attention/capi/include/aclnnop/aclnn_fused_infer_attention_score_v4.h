/* Written from the operators' records by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* FusedInferAttentionScoreV3 with a scale per query row, and sinks.
 *   query: Query rows.
 *   key: Key rows: one tensor, one per item, or pages [blocks, block_size, N2*D], [blocks, N2, block_size, D] or
 *       [blocks, N2, D/d0, block_size, d0] with d0 of 32 bytes. Of the query's dtype, int8, or int32 that holds
 *       eight integers of four bits, the first one lowest.
 *   value: Value rows, as the keys lie.
 *   pseShiftOptional: Added to the scaled scores: [B or 1, N1, S1 or 1, S2], in the query's dtype. Null: absent.
 *   attenMaskOptional: 1 = this key is not seen: [S1, S2], [B or 1, S1, S2] or [B or 1, 1, S1, S2]; sparse_mode 2,
 *       3 and 4 take a 2048 x 2048 triangle, torch.ones(2048, 2048, dtype=torch.bool).triu(1); trees [B, S1, S1].
 *       Null: absent.
 *   actualSeqLengthsOptional: Query rows of every item (one number serves all); packed rows: cumulative ends. None:
 *       all. Null: absent.
 *   actualSeqLengthsKvOptional: Keys of every item (one number serves all); packed keys: cumulative ends; pages:
 *       lengths, always, and needed. None: all. Null: absent.
 *   deqScale1Optional: Of an int8 query: scale of the integer scores. Null: absent.
 *   quantScale1Optional: Of an int8 query: scale that makes the weights int8. Null: absent.
 *   deqScale2Optional: Of an int8 query: scale of the integer output, which undoes quant_scale1 too. Null: absent.
 *   quantScale2Optional: Scale of int8 output, 1 or N1*Dv elements. Null: absent.
 *   quantOffset2Optional: Offset of int8 output, as quant_scale2. Null: absent.
 *   antiquantScaleOptional: Scales of integers, keys then values: [2], [2, N2*D] or (antiquant_mode 1) [2, B, S2].
 *       Null: absent.
 *   antiquantOffsetOptional: Added to the integers before scaling; as antiquant_scale. Null: absent.
 *   blockTableOptional: The pages of every item, in order. Null: absent.
 *   queryPaddingSizeOptional: Unused slots behind every item's rows, which end there (left padding). Null: absent.
 *   kvPaddingSizeOptional: Unused slots behind every item's keys, which end there (left padding). Null: absent.
 *   keyAntiquantScaleOptional: Scales of integer keys, by their mode 0: one number or [N2*D], 1: [B, S2], 2: [N2],
 *       3: [B, N2, S2], 4: [blocks, block_size], 5: [blocks, N2, block_size]. Null: absent.
 *   keyAntiquantOffsetOptional: Added to integer keys before scaling. Null: absent.
 *   valueAntiquantScaleOptional: Scales of integer values, by their mode 0: one number or [N2*D], 1: [B, S2], 2:
 *       [N2], 3: [B, N2, S2], 4: [blocks, block_size], 5: [blocks, N2, block_size]. Null: absent.
 *   valueAntiquantOffsetOptional: Added to integer values before scaling. Null: absent.
 *   keySharedPrefixOptional: Keys in front of every item's own. Null: absent.
 *   valueSharedPrefixOptional: Values in front of every item's own. Null: absent.
 *   actualSharedPrefixLenOptional: Keys of the shared prefix that count, one number; None: all. Null: absent.
 *   queryRopeOptional: Rope part of the query rows. Null: absent.
 *   keyRopeOptional: Rope part of the key rows, as the keys lie. Null: absent.
 *   keyRopeAntiquantScaleOptional: Reserved. Null: absent.
 *   dequantScaleQueryOptional: Scale of an int8 query, per row and head. query_rope comes divided by it and by the
 *       key's scale. Null: absent.
 *   learnableSinkOptional: One more logit per query head, without a value. Null: absent.
 *   numHeads: Query heads.
 *   scaleValue: Factor on query . key; 1.0 unless said, not 1 / sqrt(D).
 *   preTokens: Window to the left (modes 0 with a mask, and 4).
 *   nextTokens: Window to the right (modes 0 with a mask, and 4).
 *   inputLayout: Axis order of query, key and value; behind a _ that of the output.
 *   numKeyValueHeads: Key heads; 0: as many as query heads.
 *   sparseMode: 0 mask and window, 1 mask alone, 2 causal from the upper left, 3 to the lower right, 4 window to
 *       the lower right, 9 tree. One-token queries outside packed layouts see every key that the mask leaves.
 *   innerPrecise: Bit 1: rows that a mask empties are zeros, not the mean of the values. Bit 0 has no effect.
 *   blockSize: Tokens of a page; ignored without a block table.
 *   antiquantMode: Of antiquant_scale: 0 per channel or one number, 1 per token.
 *   softmaxLseFlag: Whether softmax_lse is written.
 *   keyAntiquantMode: Of key_antiquant_scale: 0 per channel or one number, 1 per token, 2 per head, 3 per token and
 *       head, 4 and 5 as 1 and 3 in pages.
 *   valueAntiquantMode: Of value_antiquant_scale: 0 per channel or one number, 1 per token, 2 per head, 3 per token
 *       and head, 4 and 5 as 1 and 3 in pages.
 *   queryQuantMode: 3: an int8 query with a scale per row and head (rope parts beside it); else 0.
 *   attentionOut: The output rows: int8 beside quant_scale2, float16 of other int8 rows. Zeros where a row sees no
 *       key, the mean of the values where the mask alone hides all.
 *   softmaxLse: max + ln(sum) of every row's scores; +inf where it has no key. Written where asked for. Null:
 *       absent. */
ACLNN_FUNCTION aclnnStatus aclnnFusedInferAttentionScoreV4GetWorkspaceSize(
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
    const aclIntArray *actualSharedPrefixLenOptional, const aclTensor *queryRopeOptional,
    const aclTensor *keyRopeOptional, const aclTensor *keyRopeAntiquantScaleOptional,
    const aclTensor *dequantScaleQueryOptional, const aclTensor *learnableSinkOptional, int64_t numHeads,
    double scaleValue, int64_t preTokens, int64_t nextTokens, char *inputLayout, int64_t numKeyValueHeads,
    int64_t sparseMode, int64_t innerPrecise, int64_t blockSize, int64_t antiquantMode, bool softmaxLseFlag,
    int64_t keyAntiquantMode, int64_t valueAntiquantMode, int64_t queryQuantMode, const aclTensor *attentionOut,
    const aclTensor *softmaxLse, uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnFusedInferAttentionScoreV4(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);
