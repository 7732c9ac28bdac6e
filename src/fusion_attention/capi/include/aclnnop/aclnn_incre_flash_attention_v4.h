/* Written from the operators' records by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* IncreFlashAttentionV3 with left padding.
 *   query: Query rows, one per item; more see the cache as the last rows of a prompt do.
 *   key: Key rows: one tensor, one per item, or pages [blocks, block_size, N2*D] or [blocks, N2, block_size, D].
 *   value: Value rows, as the keys lie.
 *   pseShift: Added to the scaled scores: [B or 1, N1, S1, S2]. Null: absent.
 *   attenMask: 1 = this token is not seen: [B, S2], [B, 1, S2] or [B, 1, 1, S2]. Null: absent.
 *   actualSeqLengths: Tokens of every item in the cache; one number serves all; None: the whole cache. Null:
 *       absent.
 *   dequantScale1: Of an int8 query: reserved. Null: absent.
 *   quantScale1: Of an int8 query: reserved. Null: absent.
 *   dequantScale2: Of an int8 query: reserved. Null: absent.
 *   quantScale2: Scale of int8 output, 1 or N1*D elements; halves round to even (one scale) or away from zero.
 *       Null: absent.
 *   quantOffset2: Offset of int8 output, as quant_scale2. Null: absent.
 *   antiquantScale: Scales of an int8 cache, keys then values: [2], [2, N2, 1, D], [2, N2, D] or [2, N2*D]. Null:
 *       absent.
 *   antiquantOffset: Added to the integers before scaling; as antiquant_scale. Null: absent.
 *   blocktable: The pages of every item, in order. Null: absent.
 *   kvPaddingSize: Unused slots behind every item, which ends there (left padding). Null: absent.
 *   numHeads: Query heads.
 *   scaleValue: Factor on query . key; 1.0 unless said, not 1 / sqrt(D).
 *   inputLayout: Axis order of query, the output, and a cache without pages.
 *   numKeyValueHeads: Key heads; 0: as many as query heads.
 *   blockSize: Tokens of a page; ignored without a block table.
 *   innerPrecise: 0 or 1; both compute in float32.
 *   attentionOut: The output rows: zeros without tokens, the mean of the values where all are masked. int8 beside
 *       quant_scale2. */
ACLNN_FUNCTION aclnnStatus aclnnIncreFlashAttentionV4GetWorkspaceSize(
    const aclTensor *query, const aclTensorList *key, const aclTensorList *value, const aclTensor *pseShift,
    const aclTensor *attenMask, const aclIntArray *actualSeqLengths, const aclTensor *dequantScale1,
    const aclTensor *quantScale1, const aclTensor *dequantScale2, const aclTensor *quantScale2,
    const aclTensor *quantOffset2, const aclTensor *antiquantScale, const aclTensor *antiquantOffset,
    const aclTensor *blocktable, const aclTensor *kvPaddingSize, int64_t numHeads, double scaleValue,
    char *inputLayout, int64_t numKeyValueHeads, int64_t blockSize, int64_t innerPrecise,
    const aclTensor *attentionOut, uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnIncreFlashAttentionV4(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);
