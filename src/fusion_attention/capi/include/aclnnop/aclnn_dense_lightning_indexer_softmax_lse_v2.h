/* Generated from the operator definitions by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* The log-sum-exp of an indexer's scores over all keys of a row.
 *   weight: Weight of every head; a scale of the scores is multiplied into it.
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
 *   softmaxLse: log(sum(exp(I))); -inf in rows without visible keys.
 * The other parameters are explained in aclnn_dense_lightning_indexer_softmax_lse.h. */
ACLNN_FUNCTION aclnnStatus aclnnDenseLightningIndexerSoftmaxLseV2GetWorkspaceSize(
    const aclTensor *queryIndex, const aclTensor *keyIndex, const aclTensor *weight,
    const aclTensor *cuSeqLensQOptional, const aclTensor *cuSeqLensKOptional, const aclTensor *seqUsedQOptional,
    const aclTensor *seqUsedKOptional, const aclTensor *cmpResidualKOptional, const aclTensor *metadataOptional,
    char *layoutQ, char *layoutK, int64_t maskMode, int64_t cmpRatio, const aclTensor *softmaxLse,
    uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnDenseLightningIndexerSoftmaxLseV2(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);
