/* Written from the operators' records by `python -m codegen`. */
#ifndef FUSION_ATTENTION_ACLNN_PROMPT_FLASH_ATTENTION_H
#define FUSION_ATTENTION_ACLNN_PROMPT_FLASH_ATTENTION_H

#include "aclnn/aclnn_base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Attention of prompts.
 *   query: Query rows.
 *   key: Key rows.
 *   value: Value rows.
 *   pseShift: Added to the scaled scores. Null: absent.
 *   attenMask: 1 = this key is not seen; sparse_mode 2, 3 and 4 take a 2048 x 2048 triangle. Null: absent.
 *   actualSeqLengths: Query rows of every item; packed rows: cumulative ends. Null: absent.
 *   numHeads: Query heads.
 *   scaleValue: Factor on query . key.
 *   preTokens: Window to the left (modes 0 with a mask, and 4).
 *   nextTokens: Window to the right (modes 0 with a mask, and 4).
 *   inputLayout: Axis order of query, key and value; behind a _ that of the output.
 *   numKeyValueHeads: Key heads; 0: as many as query heads.
 *   attentionOut: The output rows. */
ACL_FUNC_VISIBILITY aclnnStatus aclnnPromptFlashAttentionGetWorkspaceSize(
    const aclTensor *query, const aclTensor *key, const aclTensor *value, const aclTensor *pseShift,
    const aclTensor *attenMask, const aclIntArray *actualSeqLengths, int64_t numHeads, double scaleValue,
    int64_t preTokens, int64_t nextTokens, char *inputLayout, int64_t numKeyValueHeads,
    const aclTensor *attentionOut, uint64_t *workspaceSize, aclOpExecutor **executor);
ACL_FUNC_VISIBILITY aclnnStatus aclnnPromptFlashAttention(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);

#ifdef __cplusplus
}
#endif

#endif
