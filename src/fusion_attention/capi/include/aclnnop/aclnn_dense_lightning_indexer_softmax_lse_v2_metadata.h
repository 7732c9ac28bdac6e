/* Written from the operators' records by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* Metadata of DenseLightningIndexerSoftmaxLseV2: zeros, for no work is divided here.
 *   cuSeqLensQOptional: Ends of packed sequences of rows, a 0 before them: TND alone, needed. Null: absent.
 *   cuSeqLensKOptional: Ends of packed sequences of keys, a 0 before them: TND alone, needed. Null: absent.
 *   seqUsedQOptional: Rows of every sequence that count, the first ones; None: all. Null: absent.
 *   seqUsedKOptional: Keys of every sequence that count, the first ones; None: all. Null: absent.
 *   cmpResidualKOptional: Tokens behind those of the last key, of every sequence: its tokens % cmp_ratio. For
 *       cmp_ratio above 1 in mask_mode 3 alone, where it is needed. Null: absent.
 *   batchSize: Without effect.
 *   maxSeqLenQ: Without effect.
 *   maxSeqLenK: Without effect.
 *   numHeadsQ: Without effect.
 *   numHeadsK: Without effect.
 *   headDim: Without effect.
 *   layoutQ: Without effect.
 *   layoutK: Without effect.
 *   maskMode: Without effect.
 *   cmpRatio: Without effect.
 *   metadata: Zeros. */
ACLNN_FUNCTION aclnnStatus aclnnDenseLightningIndexerSoftmaxLseV2MetadataGetWorkspaceSize(
    const aclTensor *cuSeqLensQOptional, const aclTensor *cuSeqLensKOptional, const aclTensor *seqUsedQOptional,
    const aclTensor *seqUsedKOptional, const aclTensor *cmpResidualKOptional, int64_t batchSize, int64_t maxSeqLenQ,
    int64_t maxSeqLenK, int64_t numHeadsQ, int64_t numHeadsK, int64_t headDim, char *layoutQ, char *layoutK,
    int64_t maskMode, int64_t cmpRatio, const aclTensor *metadata, uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnDenseLightningIndexerSoftmaxLseV2Metadata(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);
