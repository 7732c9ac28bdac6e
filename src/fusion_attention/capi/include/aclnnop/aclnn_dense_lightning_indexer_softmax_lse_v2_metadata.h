/* Generated from the operator definitions by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* Metadata of DenseLightningIndexerSoftmaxLseV2: zeros, because back ends here divide the work themselves.
 *   cuSeqLensQOptional: 0, then the cumulative ends of the sequences of rows: required in layout TND, None in other
 *       layouts. Null: absent.
 *   cuSeqLensKOptional: 0, then the cumulative ends of the sequences of keys: required in layout TND, None in other
 *       layouts. Null: absent.
 *   seqUsedQOptional: Number of leading rows of each sequence that are used; None: all. Null: absent.
 *   seqUsedKOptional: Number of leading keys of each sequence that are used; None: all. Null: absent.
 *   cmpResidualKOptional: Tokens of every sequence behind those of its last key: its tokens % cmp_ratio. Required
 *       if cmp_ratio is above 1 and mask_mode 3, otherwise None. Null: absent.
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
