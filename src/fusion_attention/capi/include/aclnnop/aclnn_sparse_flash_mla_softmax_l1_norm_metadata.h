/* Generated from the operator definitions by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* Metadata of SparseFlashMlaSoftmaxL1Norm: zeros, because back ends here divide the work themselves.
 *   cuSeqlensQ: 0, then the cumulative ends of the sequences of q: required in layout TND, None in other layouts.
 *       Null: absent.
 *   cuSeqlensK: 0, then the cumulative ends of the sequences of k: required in layout TND, None in other layouts.
 *       Null: absent.
 *   sequsedQ: Number of used rows of q in each sequence; None: all. Null: absent.
 *   sequsedK: Number of used rows of k in each sequence; None: all. Null: absent.
 *   cmpResidualK: Tokens of every sequence behind those of its last compressed key. Null: absent.
 *   topkLength: Number of entries of every list; None: a list ends at its first -1. Null: absent.
 *   numHeadsQ: Without effect.
 *   numHeadsK: Without effect.
 *   headDim: Without effect.
 *   batchSize: Without effect.
 *   maxSeqlenQ: Without effect.
 *   maxSeqlenK: Without effect.
 *   topk: Without effect.
 *   layoutQ: Without effect.
 *   layoutK: Without effect.
 *   maskMode: Without effect.
 *   cmpRatio: Without effect.
 *   metaData: Zeros. */
ACLNN_FUNCTION aclnnStatus aclnnSparseFlashMlaSoftmaxL1NormMetadataGetWorkspaceSize(
    const aclTensor *cuSeqlensQ, const aclTensor *cuSeqlensK, const aclTensor *sequsedQ, const aclTensor *sequsedK,
    const aclTensor *cmpResidualK, const aclTensor *topkLength, int64_t numHeadsQ, int64_t numHeadsK,
    int64_t headDim, int64_t batchSize, int64_t maxSeqlenQ, int64_t maxSeqlenK, int64_t topk, char *layoutQ,
    char *layoutK, int64_t maskMode, int64_t cmpRatio, const aclTensor *metaData, uint64_t *workspaceSize,
    aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnSparseFlashMlaSoftmaxL1NormMetadata(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);
