/* Written from the operators' records by `python -m codegen`. */
#ifndef FUSION_ATTENTION_ACLNN_FUSED_INFER_ATTENTION_SCORE_H
#define FUSION_ATTENTION_ACLNN_FUSED_INFER_ATTENTION_SCORE_H

#include "aclnn/aclnn_base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Attention of prompts and of new tokens over a cache: stacked, packed, listed or paged, of floats or integers.
 *   query: Query rows.
 *   key: Key rows: one tensor, one per item, or pages.
 *   value: Value rows, as the keys lie.
 *   pseShift: Added to the scaled scores. Null: absent.
 *   attenMask: 1 = this key is not seen; sparse_mode 2, 3 and 4 take a 2048 x 2048 triangle. Null: absent.
 *   actualSeqLengths: Query rows of every item; packed rows: cumulative ends. Null: absent.
 *   actualSeqLengthsKv: Keys of every item; packed keys: cumulative ends; pages: lengths always. Null: absent.
 *   deqScale1: Of an int8 query: scale of the integer scores. Null: absent.
 *   quantScale1: Of an int8 query: scale that makes the weights int8. Null: absent.
 *   deqScale2: Of an int8 query: scale of the integer output, which undoes quant_scale1 too. Null: absent.
 *   quantScale2: Scale of int8 output, 1 or N1*Dv elements. Null: absent.
 *   quantOffset2: Offset of int8 output. Null: absent.
 *   antiquantScale: Scales of an int8 cache, keys then values. Null: absent.
 *   antiquantOffset: Added to the integers before scaling. Null: absent.
 *   blockTable: The pages of every item, in order. Null: absent.
 *   queryPaddingSize: Unused slots behind every item's rows, which end there (left padding). Null: absent.
 *   kvPaddingSize: Unused slots behind every item's keys, which end there (left padding). Null: absent.
 *   numHeads: Query heads.
 *   scaleValue: Factor on query . key.
 *   preTokens: Window to the left (modes 0 with a mask, and 4).
 *   nextTokens: Window to the right (modes 0 with a mask, and 4).
 *   inputLayout: Axis order of query, key and value; behind a _ that of the output.
 *   numKeyValueHeads: Key heads; 0: as many as query heads.
 *   sparseMode: 0 mask and window, 1 mask alone, 2 causal from the upper left, 3 to the lower right, 4 window to
 *       the lower right, 9 tree.
 *   innerPrecise: Bit 1: rows that a mask empties are zeros, not the mean of the values. Bit 0 has no effect.
 *   blockSize: Tokens of a page; ignored without a block table.
 *   antiquantMode: Of antiquant_scale: 0 per channel or one number, 1 per token.
 *   softmaxLseFlag: Whether softmax_lse is written.
 *   attentionOut: The output rows.
 *   softmaxLse: max + ln(sum) of every row's scores; +inf where it has no key. Written where asked for. Null:
 *       absent. */
ACL_FUNC_VISIBILITY aclnnStatus aclnnFusedInferAttentionScoreGetWorkspaceSize(
    const aclTensor *query, const aclTensorList *key, const aclTensorList *value, const aclTensor *pseShift,
    const aclTensor *attenMask, const aclIntArray *actualSeqLengths, const aclIntArray *actualSeqLengthsKv,
    const aclTensor *deqScale1, const aclTensor *quantScale1, const aclTensor *deqScale2,
    const aclTensor *quantScale2, const aclTensor *quantOffset2, const aclTensor *antiquantScale,
    const aclTensor *antiquantOffset, const aclTensor *blockTable, const aclTensor *queryPaddingSize,
    const aclTensor *kvPaddingSize, int64_t numHeads, double scaleValue, int64_t preTokens, int64_t nextTokens,
    char *inputLayout, int64_t numKeyValueHeads, int64_t sparseMode, int64_t innerPrecise, int64_t blockSize,
    int64_t antiquantMode, bool softmaxLseFlag, const aclTensor *attentionOut, const aclTensor *softmaxLse,
    uint64_t *workspaceSize, aclOpExecutor **executor);
ACL_FUNC_VISIBILITY aclnnStatus aclnnFusedInferAttentionScore(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);

#ifdef __cplusplus
}
#endif

#endif
