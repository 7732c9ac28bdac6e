/* Written from the operators' records by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* Metadata of SparseFlashMlaSoftmaxL1Norm: zeros, for no work is divided here.
 *   cuSeqlensQ: Cumulative lengths of q, a 0 before them; TND alone: needed. Null: absent.
 *   cuSeqlensK: Cumulative lengths of k, a 0 before them; TND alone: needed. Null: absent.
 *   sequsedQ: Lengths of q's sequences. Null: absent.
 *   sequsedK: Lengths of k's sequences. Null: absent.
 *   cmpResidualK: Tokens behind those of the last compressed key, of every sequence. Null: absent.
 *   topkLength: Entries of every row's list; None: up to its first -1. Null: absent.
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
