/* Written from the operators' records by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* The log-sum-exp of an indexer's scores over all keys of a row.
 *   weight: Weight of every head; scale factors belong into it.
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
 *   softmaxLse: log(sum(exp(I))); -inf where a row sees no key.
 * Its other parameters: aclnn_dense_lightning_indexer_softmax_lse.h. */
ACLNN_FUNCTION aclnnStatus aclnnDenseLightningIndexerSoftmaxLseV2GetWorkspaceSize(
    const aclTensor *queryIndex, const aclTensor *keyIndex, const aclTensor *weight,
    const aclTensor *cuSeqLensQOptional, const aclTensor *cuSeqLensKOptional, const aclTensor *seqUsedQOptional,
    const aclTensor *seqUsedKOptional, const aclTensor *cmpResidualKOptional, const aclTensor *metadataOptional,
    char *layoutQ, char *layoutK, int64_t maskMode, int64_t cmpRatio, const aclTensor *softmaxLse,
    uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnDenseLightningIndexerSoftmaxLseV2(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);
