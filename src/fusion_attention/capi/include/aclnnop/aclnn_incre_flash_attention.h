/* Written from the operators' records by `python -m codegen`. */
#ifndef FUSION_ATTENTION_ACLNN_INCRE_FLASH_ATTENTION_H
#define FUSION_ATTENTION_ACLNN_INCRE_FLASH_ATTENTION_H

#include "aclnn/aclnn_base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Attention of one new token per item over its cache.
 *   query: Query rows, one per item.
 *   key: Key rows: one tensor, one per item, or pages.
 *   value: Value rows, as the keys lie.
 *   pseShift: Added to the scaled scores. Null: absent.
 *   attenMask: 1 = this token is not seen. Null: absent.
 *   actualSeqLengths: Tokens of every item in the cache; one number serves all. Null: absent.
 *   numHeads: Query heads.
 *   scaleValue: Factor on query . key.
 *   inputLayout: Axis order of query, the output, and a cache without pages.
 *   numKeyValueHeads: Key heads; 0: as many as query heads.
 *   attentionOut: The output rows. */
ACL_FUNC_VISIBILITY aclnnStatus aclnnIncreFlashAttentionGetWorkspaceSize(
    const aclTensor *query, const aclTensorList *key, const aclTensorList *value, const aclTensor *pseShift,
    const aclTensor *attenMask, const aclIntArray *actualSeqLengths, int64_t numHeads, double scaleValue,
    char *inputLayout, int64_t numKeyValueHeads, const aclTensor *attentionOut, uint64_t *workspaceSize,
    aclOpExecutor **executor);
ACL_FUNC_VISIBILITY aclnnStatus aclnnIncreFlashAttention(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);

#ifdef __cplusplus
}
#endif

#endif
