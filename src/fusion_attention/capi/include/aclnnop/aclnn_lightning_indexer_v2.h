/* Generated from the operator definitions by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* Selects the keys with the highest scores for each row; a key may stand for several tokens.
 *   q: Query rows.
 *   k: Key rows, one head for all query heads.
 *   w: Weight of every query head; a scale of the scores is multiplied into it.
 *   cuSeqlensQ: 0, then the cumulative ends of the sequences of rows: required in layout TND, None in other
 *       layouts. Null: absent.
 *   cuSeqlensK: 0, then the cumulative ends of the sequences of keys: required in layout TND, None in other
 *       layouts. Null: absent.
 *   sequsedQ: Number of leading rows of each sequence that are used; None: all. Null: absent.
 *   sequsedK: Number of leading keys of each sequence that are used; None: all. Null: absent.
 *   cmpResidualK: Tokens of every sequence behind those of its last key: its tokens % cmp_ratio. Required if
 *       cmp_ratio is above 1 and mask_mode 3, otherwise None. Null: absent.
 *   blockTable: The pages of every sequence, for keys in layout PA_BBND. Null: absent.
 *   outputIdxOffset: Added to the indices of a row except -1: a number for every row, or for every sequence. Null:
 *       absent.
 *   metadata: Without effect: back ends here divide the work themselves. Null: absent.
 *   topk: Number of keys that a row selects.
 *   maxSeqlenQ: Without effect.
 *   layoutQ: Axis order of query rows.
 *   layoutK: Axis order of keys: layout_q, or PA_BBND.
 *   maskMode: 0: all keys are visible; 3: causal, the last row sees the last key.
 *   cmpRatio: Tokens that a key stands for.
 *   returnValue: 1: return the scores of the selected keys.
 *   sparseIndices: The selected keys by descending score, then -1; -1 in rows of no sequence.
 *   sparseValues: The scores of the selected keys; -inf where an index is -1. */
ACLNN_FUNCTION aclnnStatus aclnnLightningIndexerV2GetWorkspaceSize(
    const aclTensor *q, const aclTensor *k, const aclTensor *w, const aclTensor *cuSeqlensQ,
    const aclTensor *cuSeqlensK, const aclTensor *sequsedQ, const aclTensor *sequsedK, const aclTensor *cmpResidualK,
    const aclTensor *blockTable, const aclTensor *outputIdxOffset, const aclTensor *metadata, int64_t topk,
    int64_t maxSeqlenQ, char *layoutQ, char *layoutK, int64_t maskMode, int64_t cmpRatio, int64_t returnValue,
    const aclTensor *sparseIndices, const aclTensor *sparseValues, uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnLightningIndexerV2(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);
