/* Generated from the operator definitions by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* Softmax attention of prompts and of new tokens to the keys of a cache: padded, packed, a list of tensors, or
 * pages; floats or integers.
 *   query: Query rows.
 *   key: Key rows: one tensor, one per sequence, or pages [blocks, block_size, N2*D], [blocks, N2, block_size, D]
 *       or [blocks, N2, D/d0, block_size, d0] with d0 of 32 bytes. Dtype of query, int8, or int32, each of which is
 *       eight integers of four bits, the first in the lowest bits.
 *   value: Value rows, in the form of key.
 *   pseShift: Added to the scaled scores: [B or 1, N1, S1 or 1, S2], in the query's dtype. Null: absent.
 *   attenMask: 1 hides a key from a row: [S1, S2], [B or 1, S1, S2] or [B or 1, 1, S1, S2]; sparse_mode 2, 3 and 4
 *       take a 2048 x 2048 triangle, torch.ones(2048, 2048, dtype=torch.bool).triu(1); mode 9 a tree mask, [B, S1,
 *       S1]. Null: absent.
 *   actualSeqLengths: Query rows of every sequence (one number serves all); packed rows: cumulative ends. None:
 *       all. Null: absent.
 *   actualSeqLengthsKv: Keys of every sequence (one number serves all); packed keys: cumulative ends; pages:
 *       lengths. None: all. Null: absent.
 *   deqScale1: With an int8 query: factor on the integer scores. Null: absent.
 *   quantScale1: With an int8 query: factor on the weights before they are rounded to int8. Null: absent.
 *   deqScale2: With an int8 query: factor on the integer output; it includes 1 / quant_scale1. Null: absent.
 *   quantScale2: Scale of int8 output, 1 or N1*Dv elements. Null: absent.
 *   quantOffset2: Offset of int8 output, in the shape of quant_scale2. Null: absent.
 *   antiquantScale: Scales of integers, keys then values: [2], [2, N2*D] or (antiquant_mode 1) [2, B, S2]. Null:
 *       absent.
 *   antiquantOffset: Added to the integers before scaling; shape of antiquant_scale. Null: absent.
 *   blockTable: The pages of every sequence, in order. Null: absent.
 *   queryPaddingSize: One number: unused rows of query behind the last row of every sequence. Null: absent.
 *   kvPaddingSize: One number: unused tokens of key behind the last key of every sequence. Null: absent.
 *   numHeads: Query heads.
 *   scaleValue: Factor on query . key; the default is 1.0, not 1 / sqrt(D).
 *   preTokens: Visible tokens before the diagonal (mode 0 with a mask, and 4).
 *   nextTokens: Visible tokens behind the diagonal (mode 0 with a mask, and 4).
 *   inputLayout: Axis order of query, key and value; that of the output follows a _ if it differs.
 *   numKeyValueHeads: Key heads; 0: as many as query heads.
 *   sparseMode: 0 mask and window, 1 mask alone, 2 causal from the upper left, 3 to the lower right, 4 window to
 *       the lower right, 9 tree. One-token queries in padded layouts see every key that the mask leaves.
 *   innerPrecise: Bit 1: rows whose keys the mask hides return zeros, not the mean of V. Bit 0 has no effect.
 *   blockSize: Tokens of a page; ignored without a block table.
 *   antiquantMode: Kind of antiquant_scale: 0 per channel or one number, 1 per token.
 *   softmaxLseFlag: Compute softmax_lse.
 *   attentionOut: The output rows: int8 with quant_scale2, otherwise the dtype of query; for an int8 query that of
 *       query_rope, or float16. Rows without visible keys are zeros; if the mask alone hides all keys, the mean of
 *       V.
 *   softmaxLse: max + ln(sum) of every row's scores, +inf in rows without visible keys; written if softmax_lse_flag
 *       is set. Null: absent. */
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
