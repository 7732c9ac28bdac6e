/* Generated from the operator definitions by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* Projects rows to keys and gates, and pools every window of cmp_ratio rows to one compressed key.
 *   x: Rows [B, S, H], or packed [T, H] with cu_seqlens.
 *   wkv: Projection to keys, [coff * D, H].
 *   wgate: Projection to gates, [coff * D, H].
 *   stateCacheRef: Keys and gates of earlier rows, in blocks [blocks, rows, 2 * coff * D]; written in place.
 *   ape: Bias of gates by position in the window, [cmp_ratio, coff * D].
 *   stateBlockTable: Blocks of state_cache: [B, blocks of a sequence] in cache_mode 1, where rows of block 0 are
 *       not stored; [B] in cache_mode 2. None: no rows are stored. Null: absent.
 *   cuSeqlens: Packed rows: 0, then the cumulative ends of the sequences. Null: absent.
 *   seqused: Number of used rows of each sequence; None: all. Null: absent.
 *   startPos: Position of the first row of every sequence; None: 0. Null: absent.
 *   cmpRatio: Rows of a window.
 *   coff: 2: windows overlap: rows have 2 * D channels, and the first D are for the next window; 1: they do not.
 *   cacheMode: 1: a page table of blocks; 2: one block per sequence, used as a ring.
 *   stateCacheStrideDim0: Without effect: strides are those of the tensor.
 *   gradEnabled: Write softmax_score and kv, which the gradient reads.
 *   cmpKv: [B, ceil(S / cmp_ratio), D], zeros behind the windows of each sequence; or packed [min(T, T // cmp_ratio
 *       + B), D], zeros behind the windows of all.
 *   softmaxScore: Weights of the rows of windows, [B, ceil(S / cmp_ratio), coff * cmp_ratio, D], or packed as
 *       cmp_kv; with coff 2 rows of the previous window and of the window alternate.
 *   kv: Rows of windows, [B, ceil(S / cmp_ratio), coff * cmp_ratio, D], or packed as cmp_kv; with coff 2 rows of
 *       the previous window and of the window alternate. */
ACLNN_FUNCTION aclnnStatus aclnnCompressorGetWorkspaceSize(
    const aclTensor *x, const aclTensor *wkv, const aclTensor *wgate, const aclTensor *stateCacheRef,
    const aclTensor *ape, const aclTensor *stateBlockTable, const aclTensor *cuSeqlens, const aclTensor *seqused,
    const aclTensor *startPos, int64_t cmpRatio, int64_t coff, int64_t cacheMode, int64_t stateCacheStrideDim0,
    bool gradEnabled, const aclTensor *cmpKv, const aclTensor *softmaxScore, const aclTensor *kv,
    uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnCompressor(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);
