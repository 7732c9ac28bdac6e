/* Generated from the operator definitions by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* Gradients of SparseFlashMla, from its output and its softmax_lse.
 *   query: Query rows.
 *   dOut: Gradient of the output.
 *   out: The forward's output.
 *   lse: As the forward returned it.
 *   oriKv: Keys, which are also the values; required. Null: absent.
 *   cmpKv: Compressed keys: key e stands for the tokens e * ratio to e * ratio + ratio - 1. Null: absent.
 *   oriSparseIndices: The keys that every row reads; -1 ends a list. Only without cmp_kv (a 950 form). Null:
 *       absent.
 *   cmpSparseIndices: Per row and key head a list of compressed keys, ended by -1; None: all visible ones. Null:
 *       absent.
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
 *   sinks: One more logit per query head in every denominator. Null: absent.
 *   metadata: Without effect: back ends here divide the work themselves. Null: absent.
 *   scaleValue: Factor on q . key; the default is 1.0.
 *   cmpRatio: Tokens that a compressed key stands for.
 *   oriMaskMode: 0: all keys; 3: causal; 4: a window.
 *   cmpMaskMode: 3: a row sees the first (position + 1) // cmp_ratio compressed keys.
 *   oriWinLeft: Visible keys before the diagonal, in ori_mask_mode 4; -1: all.
 *   oriWinRight: Visible keys behind the diagonal, in ori_mask_mode 4; -1: all.
 *   layoutQ: Axis order of query rows.
 *   layoutKv: Axis order of keys: the layout of queries, or PA_BBND.
 *   dQuery: Gradient of the query rows.
 *   dOriKv: Gradient of ori_kv, as keys and as values.
 *   dCmpKv: Gradient of cmp_kv.
 *   dSinks: Gradient of sinks.
 *   oriSoftmaxL1Norm: Probability of each entry of ori_sparse_indices, a mean over heads; 0 if it is not read.
 *   cmpSoftmaxL1Norm: Probability of each entry of cmp_sparse_indices, a mean over heads; 0 if it is not read. */
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
