/* Written from the operators' records by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* Gradients of SparseFlashMla, from its output and its softmax_lse.
 *   query: Query rows.
 *   dOut: Gradient of the output.
 *   out: The forward's output.
 *   lse: As the forward returned it.
 *   oriKv: Key rows, also values; needed. Null: absent.
 *   cmpKv: Compressed key rows: row e stands for the tokens e * ratio to e * ratio + ratio - 1. Null: absent.
 *   oriSparseIndices: Per row the keys that it reads, packed to the front; -1 ends a list. Without cmp_kv alone
 *       (950 only). Null: absent.
 *   cmpSparseIndices: Per row and key head the compressed keys that it reads, packed to the front; -1 ends a list.
 *       None: all that it sees. Null: absent.
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
 *   sinks: One more logit per query head in every denominator. Null: absent.
 *   metadata: Without effect: no work is divided before a call. Null: absent.
 *   scaleValue: Factor on q . key; 1 unless it is said.
 *   cmpRatio: Tokens that a compressed key stands for.
 *   oriMaskMode: 0: all keys; 3: causal; 4: a window.
 *   cmpMaskMode: 3: the compressed keys of closed groups, (position + 1) // cmp_ratio.
 *   oriWinLeft: Keys before the row's own, in mode 4; -1: all.
 *   oriWinRight: Keys behind the row's own, in mode 4; -1: all.
 *   layoutQ: Axis order of query rows.
 *   layoutKv: Axis order of key rows: as the queries', or PA_BBND.
 *   dQuery: Gradient of the query rows.
 *   dOriKv: Gradient of ori_kv, as keys and as values.
 *   dCmpKv: Gradient of cmp_kv.
 *   dSinks: Gradient of sinks.
 *   oriSoftmaxL1Norm: Mean over heads of the probabilities of ori_sparse_indices' entries; 0 of those that are not
 *       read.
 *   cmpSoftmaxL1Norm: Mean over heads of the probabilities of cmp_sparse_indices' entries; 0 of those that are not
 *       read. */
ACLNN_FUNCTION aclnnStatus aclnnSparseFlashMlaGradGetWorkspaceSize(
    const aclTensor *query, const aclTensor *dOut, const aclTensor *out, const aclTensor *lse,
    const aclTensor *oriKv, const aclTensor *cmpKv, const aclTensor *oriSparseIndices,
    const aclTensor *cmpSparseIndices, const aclTensor *cuSeqlensQ, const aclTensor *cuSeqlensOriKv,
    const aclTensor *cuSeqlensCmpKv, const aclTensor *sequsedQ, const aclTensor *sequsedOriKv,
    const aclTensor *sequsedCmpKv, const aclTensor *cmpResidualKv, const aclTensor *oriTopkLength,
    const aclTensor *cmpTopkLength, const aclTensor *sinks, const aclTensor *metadata, double scaleValue,
    int64_t cmpRatio, int64_t oriMaskMode, int64_t cmpMaskMode, int64_t oriWinLeft, int64_t oriWinRight,
    char *layoutQ, char *layoutKv, const aclTensor *dQuery, const aclTensor *dOriKv, const aclTensor *dCmpKv,
    const aclTensor *dSinks, const aclTensor *oriSoftmaxL1Norm, const aclTensor *cmpSoftmaxL1Norm,
    uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnSparseFlashMlaGrad(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);
