/* Written from the operators' records by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* The gradients that bring the indexer's distribution over selected keys nearer to a given target.
 *   q: Query rows of the indexer.
 *   k: Key rows of the indexer, one head for all of its query heads.
 *   w: Weight of every head; scale factors belong into it.
 *   sparseIndices: The keys that every row selects, for all heads, packed to the front; -1 ends a list.
 *   attnSoftmaxL1Norm: How much of the attention's softmax every key takes, a mean over heads, of
 *       sparse_flash_mla_grad or sparse_flash_mla_softmax_l1_norm.
 *   cuSeqLensQOptional: Ends of packed sequences of rows, a 0 before them: TND alone, needed. Null: absent.
 *   cuSeqLensKOptional: Ends of packed sequences of keys, a 0 before them: TND alone, needed. Null: absent.
 *   seqUsedQOptional: Rows of every sequence that count, the first ones; None: all. Null: absent.
 *   seqUsedKOptional: Keys of every sequence that count, the first ones; None: all. Null: absent.
 *   cmpResidualKOptional: Tokens behind those of the last key, of every sequence: its tokens % cmp_ratio. For
 *       cmp_ratio above 1 in mask_mode 3 alone, where it is needed. Null: absent.
 *   metadataOptional: Without effect: work is not divided before a call. Null: absent.
 *   layoutQ: Axis order of query rows.
 *   layoutK: Axis order of key rows: as the queries'.
 *   maskMode: 0: rows see all keys; 3: causal, the last row sees the last key.
 *   cmpRatio: Tokens that a key stands for.
 *   dq: Gradient of q.
 *   dk: Gradient of k.
 *   dw: Gradient of w.
 *   softmaxOut: y of the target's elements; 0 where a row does not read them. */
ACLNN_FUNCTION aclnnStatus aclnnSparseLightningIndexerKLLossGradGetWorkspaceSize(
    const aclTensor *q, const aclTensor *k, const aclTensor *w, const aclTensor *sparseIndices,
    const aclTensor *attnSoftmaxL1Norm, const aclTensor *cuSeqLensQOptional, const aclTensor *cuSeqLensKOptional,
    const aclTensor *seqUsedQOptional, const aclTensor *seqUsedKOptional, const aclTensor *cmpResidualKOptional,
    const aclTensor *metadataOptional, char *layoutQ, char *layoutK, int64_t maskMode, int64_t cmpRatio,
    const aclTensor *dq, const aclTensor *dk, const aclTensor *dw, const aclTensor *softmaxOut,
    uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnSparseLightningIndexerKLLossGrad(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);
