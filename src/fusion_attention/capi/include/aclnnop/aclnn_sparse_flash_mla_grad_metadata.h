/* Generated from the operator definitions by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* Metadata of SparseFlashMlaGrad: zeros, because back ends here divide the work themselves.
 *   cuSeqlensQ: 0, then the cumulative ends of the sequences of query: required in layout TND, None in other
 *       layouts. Null: absent.
 *   cuSeqlensOriKv: 0, then the cumulative ends of the sequences of key: required in layout TND, None in other
 *       layouts. Null: absent.
 *   cuSeqlensCmpKv: 0, then the cumulative ends of the sequences of key_compressed: required in layout TND, None in
 *       other layouts. Null: absent.
 *   sequsedQ: Number of used rows of query in each sequence; None: all. Required if paged. Null: absent.
 *   sequsedOriKv: Number of used rows of key in each sequence; None: all. Required if paged. Null: absent.
 *   sequsedCmpKv: Number of used rows of key_compressed in each sequence; None: all. Required if paged. Null:
 *       absent.
 *   cmpResidualKv: Tokens of every sequence behind those of its last compressed key. Null: absent.
 *   oriTopkLength: Number of entries of every list in ori_sparse_indices; None: a list ends at its first -1. Null:
 *       absent.
 *   cmpTopkLength: Number of entries of every list (950 only): not computed here. Null: absent.
 *   numHeadsQ: Without effect.
 *   numHeadsKv: Without effect.
 *   headDim: Without effect.
 *   batchSize: Without effect.
 *   maxSeqlenQ: Without effect.
 *   maxSeqlenOriKv: Without effect.
 *   maxSeqlenCmpKv: Without effect.
 *   oriTopk: Without effect.
 *   cmpTopk: Without effect.
 *   cmpRatio: Without effect.
 *   oriMaskMode: Without effect.
 *   cmpMaskMode: Without effect.
 *   oriWinLeft: Without effect.
 *   oriWinRight: Without effect.
 *   layoutQ: Without effect.
 *   layoutKv: Without effect.
 *   hasOriKv: Without effect.
 *   hasCmpKv: Without effect.
 *   metaData: Zeros. */
ACLNN_FUNCTION aclnnStatus aclnnSparseFlashMlaGradMetadataGetWorkspaceSize(
    const aclTensor *cuSeqlensQ, const aclTensor *cuSeqlensOriKv, const aclTensor *cuSeqlensCmpKv,
    const aclTensor *sequsedQ, const aclTensor *sequsedOriKv, const aclTensor *sequsedCmpKv,
    const aclTensor *cmpResidualKv, const aclTensor *oriTopkLength, const aclTensor *cmpTopkLength,
    int64_t numHeadsQ, int64_t numHeadsKv, int64_t headDim, int64_t batchSize, int64_t maxSeqlenQ,
    int64_t maxSeqlenOriKv, int64_t maxSeqlenCmpKv, int64_t oriTopk, int64_t cmpTopk, int64_t cmpRatio,
    int64_t oriMaskMode, int64_t cmpMaskMode, int64_t oriWinLeft, int64_t oriWinRight, char *layoutQ, char *layoutKv,
    bool hasOriKv, bool hasCmpKv, const aclTensor *metaData, uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnSparseFlashMlaGradMetadata(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);
