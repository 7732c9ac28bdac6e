/* Written from the operators' records by `python -m codegen`. */
#ifndef FUSION_ATTENTION_ACLNN_INCRE_FLASH_ATTENTION_V4_H
#define FUSION_ATTENTION_ACLNN_INCRE_FLASH_ATTENTION_V4_H

#include "aclnn/aclnn_base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* IncreFlashAttentionV3 with left padding.
 *   query: Query rows, one per item.
 *   key: Key rows: one tensor, one per item, or pages.
 *   value: Value rows, as the keys lie.
 *   pseShift: Added to the scaled scores. Null: absent.
 *   attenMask: 1 = this token is not seen. Null: absent.
 *   actualSeqLengths: Tokens of every item in the cache; one number serves all. Null: absent.
 *   dequantScale1: Of an int8 query: reserved. Null: absent.
 *   quantScale1: Of an int8 query: reserved. Null: absent.
 *   dequantScale2: Of an int8 query: reserved. Null: absent.
 *   quantScale2: Scale of int8 output, 1 or N1*D elements. Null: absent.
 *   quantOffset2: Offset of int8 output. Null: absent.
 *   antiquantScale: Scales of an int8 cache, keys then values. Null: absent.
 *   antiquantOffset: Added to the integers before scaling. Null: absent.
 *   blocktable: The pages of every item, in order. Null: absent.
 *   kvPaddingSize: Unused slots behind every item, which ends there (left padding). Null: absent.
 *   numHeads: Query heads.
 *   scaleValue: Factor on query . key.
 *   inputLayout: Axis order of query, the output, and a cache without pages.
 *   numKeyValueHeads: Key heads; 0: as many as query heads.
 *   blockSize: Tokens of a page; ignored without a block table.
 *   innerPrecise: 0 or 1; both compute in float32.
 *   attentionOut: The output rows. */
ACL_FUNC_VISIBILITY aclnnStatus aclnnIncreFlashAttentionV4GetWorkspaceSize(
    const aclTensor *query, const aclTensorList *key, const aclTensorList *value, const aclTensor *pseShift,
    const aclTensor *attenMask, const aclIntArray *actualSeqLengths, const aclTensor *dequantScale1,
    const aclTensor *quantScale1, const aclTensor *dequantScale2, const aclTensor *quantScale2,
    const aclTensor *quantOffset2, const aclTensor *antiquantScale, const aclTensor *antiquantOffset,
    const aclTensor *blocktable, const aclTensor *kvPaddingSize, int64_t numHeads, double scaleValue,
    char *inputLayout, int64_t numKeyValueHeads, int64_t blockSize, int64_t innerPrecise,
    const aclTensor *attentionOut, uint64_t *workspaceSize, aclOpExecutor **executor);
ACL_FUNC_VISIBILITY aclnnStatus aclnnIncreFlashAttentionV4(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);

#ifdef __cplusplus
}
#endif

#endif
