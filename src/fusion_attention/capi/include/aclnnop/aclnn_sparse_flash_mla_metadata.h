/* Written from the operators' records by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* Metadata of SparseFlashMla: zeros, for no work is divided here.
 *   cuSeqlensQ: Cumulative lengths of query rows, a 0 before them: TND alone, where they are needed. Null: absent.
 *   cuSeqlensOriKv: Cumulative lengths of key rows, a 0 before them: TND alone, where they are needed. Null:
 *       absent.
 *   cuSeqlensCmpKv: Cumulative lengths of key_compressed rows, a 0 before them: TND alone, where they are needed.
 *       Null: absent.
 *   sequsedQ: Lengths of query rows; pages: needed. Null: absent.
 *   sequsedOriKv: Lengths of key rows; pages: needed. Null: absent.
 *   sequsedCmpKv: Lengths of key_compressed rows; pages: needed. Null: absent.
 *   cmpResidualKv: Tokens behind those of the last compressed key, of every sequence. Null: absent.
 *   oriTopkLength: Entries of every row's list in ori_sparse_indices; None: up to its first -1. Null: absent.
 *   cmpTopkLength: Entries of every row's list (950 only): not computed here. Null: absent.
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
ACLNN_FUNCTION aclnnStatus aclnnSparseFlashMlaMetadataGetWorkspaceSize(
    const aclTensor *cuSeqlensQ, const aclTensor *cuSeqlensOriKv, const aclTensor *cuSeqlensCmpKv,
    const aclTensor *sequsedQ, const aclTensor *sequsedOriKv, const aclTensor *sequsedCmpKv,
    const aclTensor *cmpResidualKv, const aclTensor *oriTopkLength, const aclTensor *cmpTopkLength,
    int64_t numHeadsQ, int64_t numHeadsKv, int64_t headDim, int64_t batchSize, int64_t maxSeqlenQ,
    int64_t maxSeqlenOriKv, int64_t maxSeqlenCmpKv, int64_t oriTopk, int64_t cmpTopk, int64_t cmpRatio,
    int64_t oriMaskMode, int64_t cmpMaskMode, int64_t oriWinLeft, int64_t oriWinRight, char *layoutQ, char *layoutKv,
    bool hasOriKv, bool hasCmpKv, const aclTensor *metaData, uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnSparseFlashMlaMetadata(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);
