/* Generated from the operator definitions by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* Probabilities of compressed keys in SparseFlashMla's softmax, a mean over heads.
 *   q: Query rows.
 *   k: Compressed key rows.
 *   softmaxLse: softmax_lse that the forward returned, over both sources and the sink.
 *   sparseIndices: Per row and key head a list of compressed keys, ended by -1; None: all visible ones. Null:
 *       absent.
 *   cuSeqlensQ: 0, then the cumulative ends of the sequences of q: required in layout TND, None in other layouts.
 *       Null: absent.
 *   cuSeqlensK: 0, then the cumulative ends of the sequences of k: required in layout TND, None in other layouts.
 *       Null: absent.
 *   sequsedQ: Number of used rows of q in each sequence; None: all. Null: absent.
 *   sequsedK: Number of used rows of k in each sequence; None: all. Null: absent.
 *   cmpResidualK: Tokens of every sequence behind those of its last compressed key. Null: absent.
 *   topkLength: Number of entries of every list; None: a list ends at its first -1. Null: absent.
 *   metadata: Without effect: back ends here divide the work themselves. Null: absent.
 *   softmaxScale: Factor on q . key; the default is 1.0.
 *   maxSeqlenK: Columns of the result for packed rows without lists: at least the keys of the longest sequence.
 *   cmpRatio: Tokens that a compressed key stands for.
 *   maskMode: 0: all compressed keys are visible; 3: the first (position + 1) // cmp_ratio.
 *   layoutQ: Axis order of query rows.
 *   layoutK: Axis order of keys; it must be layout_q.
 *   out: A column for each entry of a list, or without lists for each compressed key; 0 if it is not read. */
ACLNN_FUNCTION aclnnStatus aclnnSparseFlashMlaSoftmaxL1NormGetWorkspaceSize(
    const aclTensor *q, const aclTensor *k, const aclTensor *softmaxLse, const aclTensor *sparseIndices,
    const aclTensor *cuSeqlensQ, const aclTensor *cuSeqlensK, const aclTensor *sequsedQ, const aclTensor *sequsedK,
    const aclTensor *cmpResidualK, const aclTensor *topkLength, const aclTensor *metadata, double softmaxScale,
    int64_t maxSeqlenK, int64_t cmpRatio, int64_t maskMode, char *layoutQ, char *layoutK, const aclTensor *out,
    uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnSparseFlashMlaSoftmaxL1Norm(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);
