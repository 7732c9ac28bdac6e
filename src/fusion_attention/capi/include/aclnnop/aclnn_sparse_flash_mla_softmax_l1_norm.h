/* Written from the operators' records by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* Probabilities of compressed keys in SparseFlashMla's softmax, a mean over heads.
 *   q: Query rows.
 *   k: Compressed key rows.
 *   softmaxLse: As the forward returned it: of both sources and the sink.
 *   sparseIndices: Per row and key head the compressed keys that it reads, packed to the front; -1 ends a list.
 *       None: all that it sees. Null: absent.
 *   cuSeqlensQ: Cumulative lengths of q, a 0 before them; TND alone: needed. Null: absent.
 *   cuSeqlensK: Cumulative lengths of k, a 0 before them; TND alone: needed. Null: absent.
 *   sequsedQ: Lengths of q's sequences. Null: absent.
 *   sequsedK: Lengths of k's sequences. Null: absent.
 *   cmpResidualK: Tokens behind those of the last compressed key, of every sequence. Null: absent.
 *   topkLength: Entries of every row's list; None: up to its first -1. Null: absent.
 *   metadata: Without effect: no work is divided before a call. Null: absent.
 *   softmaxScale: Factor on q . key; 1 unless it is said.
 *   maxSeqlenK: Columns of packed rows without lists: the longest sequence's keys, or more.
 *   cmpRatio: Tokens that a compressed key stands for.
 *   maskMode: 0: all compressed keys; 3: those of closed groups.
 *   layoutQ: Axis order of query rows.
 *   layoutK: Axis order of key rows: the queries'.
 *   out: A column for each entry of a list, or for each compressed key; 0 of those that are not read. */
ACLNN_FUNCTION aclnnStatus aclnnSparseFlashMlaSoftmaxL1NormGetWorkspaceSize(
    const aclTensor *q, const aclTensor *k, const aclTensor *softmaxLse, const aclTensor *sparseIndices,
    const aclTensor *cuSeqlensQ, const aclTensor *cuSeqlensK, const aclTensor *sequsedQ, const aclTensor *sequsedK,
    const aclTensor *cmpResidualK, const aclTensor *topkLength, const aclTensor *metadata, double softmaxScale,
    int64_t maxSeqlenK, int64_t cmpRatio, int64_t maskMode, char *layoutQ, char *layoutK, const aclTensor *out,
    uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnSparseFlashMlaSoftmaxL1Norm(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);
