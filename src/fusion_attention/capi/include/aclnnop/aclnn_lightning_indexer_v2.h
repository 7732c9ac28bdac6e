/* Written from the operators' records by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* Scores of keys that may stand for several tokens each, and per row the keys that score highest.
 *   q: Query rows.
 *   k: Key rows, one head for all query heads.
 *   w: Weight of every query head; scale factors belong into it.
 *   cuSeqlensQ: Ends of packed sequences of rows, a 0 before them: TND alone, needed. Null: absent.
 *   cuSeqlensK: Ends of packed sequences of keys, a 0 before them: TND alone, needed. Null: absent.
 *   sequsedQ: Rows of every sequence that count, the first ones; None: all. Null: absent.
 *   sequsedK: Keys of every sequence that count, the first ones; None: all. Null: absent.
 *   cmpResidualK: Tokens behind those of the last key, of every sequence: its tokens % cmp_ratio. For cmp_ratio
 *       above 1 in mask_mode 3 alone, where it is needed. Null: absent.
 *   blockTable: The pages of every sequence, for keys in layout PA_BBND. Null: absent.
 *   outputIdxOffset: Added to the indices of a row, not to -1: a number for every row, or for every sequence. Null:
 *       absent.
 *   metadata: Without effect: work is not divided before a call. Null: absent.
 *   topk: Keys that a row chooses.
 *   maxSeqlenQ: Without effect.
 *   layoutQ: Axis order of query rows.
 *   layoutK: Axis order of key rows: as the queries', or PA_BBND.
 *   maskMode: 0: rows see all keys; 3: causal, the last row sees the last key.
 *   cmpRatio: Tokens that a key stands for.
 *   returnValue: 1: return the scores of the chosen keys.
 *   sparseIndices: The keys chosen, best first; -1 behind the last, and in rows of no sequence.
 *   sparseValues: Their scores; -inf where an index is -1. */
ACLNN_FUNCTION aclnnStatus aclnnLightningIndexerV2GetWorkspaceSize(
    const aclTensor *q, const aclTensor *k, const aclTensor *w, const aclTensor *cuSeqlensQ,
    const aclTensor *cuSeqlensK, const aclTensor *sequsedQ, const aclTensor *sequsedK, const aclTensor *cmpResidualK,
    const aclTensor *blockTable, const aclTensor *outputIdxOffset, const aclTensor *metadata, int64_t topk,
    int64_t maxSeqlenQ, char *layoutQ, char *layoutK, int64_t maskMode, int64_t cmpRatio, int64_t returnValue,
    const aclTensor *sparseIndices, const aclTensor *sparseValues, uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnLightningIndexerV2(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);
