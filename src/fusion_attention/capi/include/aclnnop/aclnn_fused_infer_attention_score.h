/* Written from the operators' records by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* Attention of prompts and of new tokens over a cache: stacked, packed, listed or paged, of floats or integers.
 *   query: Query rows.
 *   key: Key rows: one tensor, one per item, or pages [blocks, block_size, N2*D], [blocks, N2, block_size, D] or
 *       [blocks, N2, D/d0, block_size, d0] with d0 of 32 bytes. Of the query's dtype, int8, or int32 that holds
 *       eight integers of four bits, the first one lowest.
 *   value: Value rows, as the keys lie.
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
 *   antiquantScale: Scales of integers, keys then values: [2], [2, N2*D] or (antiquant_mode 1) [2, B, S2]. Null:
 *       absent.
 *   antiquantOffset: Added to the integers before scaling; as antiquant_scale. Null: absent.
 *   blockTable: The pages of every item, in order. Null: absent.
 *   queryPaddingSize: Unused slots behind every item's rows, which end there (left padding). Null: absent.
 *   kvPaddingSize: Unused slots behind every item's keys, which end there (left padding). Null: absent.
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
 *   attentionOut: The output rows: int8 beside quant_scale2, float16 of other int8 rows. Zeros where a row sees no
 *       key, the mean of the values where the mask alone hides all.
 *   softmaxLse: max + ln(sum) of every row's scores; +inf where it has no key. Written where asked for. Null:
 *       absent. */
ACLNN_FUNCTION aclnnStatus aclnnFusedInferAttentionScoreGetWorkspaceSize(
    const aclTensor *query, const aclTensorList *key, const aclTensorList *value, const aclTensor *pseShift,
    const aclTensor *attenMask, const aclIntArray *actualSeqLengths, const aclIntArray *actualSeqLengthsKv,
    const aclTensor *deqScale1, const aclTensor *quantScale1, const aclTensor *deqScale2,
    const aclTensor *quantScale2, const aclTensor *quantOffset2, const aclTensor *antiquantScale,
    const aclTensor *antiquantOffset, const aclTensor *blockTable, const aclTensor *queryPaddingSize,
    const aclTensor *kvPaddingSize, int64_t numHeads, double scaleValue, int64_t preTokens, int64_t nextTokens,
    char *inputLayout, int64_t numKeyValueHeads, int64_t sparseMode, int64_t innerPrecise, int64_t blockSize,
    int64_t antiquantMode, bool softmaxLseFlag, const aclTensor *attentionOut, const aclTensor *softmaxLse,
    uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnFusedInferAttentionScore(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);
