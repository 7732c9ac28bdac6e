/* Generated from the operator definitions by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* Gradients of the Kullback-Leibler divergence of the indexer's distribution over all keys from a target.
 *   q: Query rows of the indexer.
 *   k: Key rows of the indexer, one head for all of its query heads.
 *   w: Weight of every head; a scale of the scores is multiplied into it.
 *   attnSoftmaxL1Norm: The attention's probability of every key, a mean over heads, from sparse_flash_mla_grad or
 *       sparse_flash_mla_softmax_l1_norm.
 *   softmaxLse: log(sum(exp(I))) of the indexer's scores, from dense_lightning_indexer_softmax_lse.
 *   cuSeqLensQOptional: 0, then the cumulative ends of the sequences of rows: required in layout TND, None in other
 *       layouts. Null: absent.
 *   cuSeqLensKOptional: 0, then the cumulative ends of the sequences of keys: required in layout TND, None in other
 *       layouts. Null: absent.
 *   seqUsedQOptional: Number of leading rows of each sequence that are used; None: all. Null: absent.
 *   seqUsedKOptional: Number of leading keys of each sequence that are used; None: all. Null: absent.
 *   cmpResidualKOptional: Tokens of every sequence behind those of its last key: its tokens % cmp_ratio. Required
 *       if cmp_ratio is above 1 and mask_mode 3, otherwise None. Null: absent.
 *   metadataOptional: Without effect: back ends here divide the work themselves. Null: absent.
 *   layoutQ: Axis order of query rows.
 *   layoutK: Axis order of keys; it must be layout_q.
 *   maskMode: 0: all keys are visible; 3: causal, the last row sees the last key.
 *   cmpRatio: Tokens that a key stands for.
 *   dq: Gradient of q.
 *   dk: Gradient of k.
 *   dw: Gradient of w.
 *   softmaxOut: y for every element of the target; 0 for those that a row does not read. */
ACLNN_FUNCTION aclnnStatus aclnnDenseLightningIndexerKLLossGradGetWorkspaceSize(
    const aclTensor *q, const aclTensor *k, const aclTensor *w, const aclTensor *attnSoftmaxL1Norm,
    const aclTensor *softmaxLse, const aclTensor *cuSeqLensQOptional, const aclTensor *cuSeqLensKOptional,
    const aclTensor *seqUsedQOptional, const aclTensor *seqUsedKOptional, const aclTensor *cmpResidualKOptional,
    const aclTensor *metadataOptional, char *layoutQ, char *layoutK, int64_t maskMode, int64_t cmpRatio,
    const aclTensor *dq, const aclTensor *dk, const aclTensor *dw, const aclTensor *softmaxOut,
    uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnDenseLightningIndexerKLLossGrad(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);
