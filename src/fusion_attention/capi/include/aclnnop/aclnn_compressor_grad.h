/* Generated from the operator definitions by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* Gradients of Compressor, from the rows that it saved.
 *   x: Rows [B, S, H], or packed [T, H] with cu_seqlens.
 *   wkv: Projection to keys, [coff * D, H].
 *   wgate: Projection to gates, [coff * D, H].
 *   dCmpKv: Gradient of cmp_kv.
 *   softmaxScore: softmax_score of the forward.
 *   kv: kv of the forward.
 *   cuSeqlens: Packed rows: 0, then the cumulative ends of the sequences. Null: absent.
 *   seqused: Number of used rows of each sequence; None: all. Null: absent.
 *   startPos: Position of the first row of every sequence; None: 0. Null: absent.
 *   cmpRatio: Rows of a window.
 *   coff: 2: windows overlap: rows have 2 * D channels, and the first D are for the next window; 1: they do not.
 *   dX: Gradient of x, in its shape.
 *   dWkv: Gradient of wkv, in its shape.
 *   dWgate: Gradient of wgate, in its shape.
 *   dApe: Gradient of ape, [cmp_ratio, coff * D]. */
ACLNN_FUNCTION aclnnStatus aclnnCompressorGradGetWorkspaceSize(
    const aclTensor *x, const aclTensor *wkv, const aclTensor *wgate, const aclTensor *dCmpKv,
    const aclTensor *softmaxScore, const aclTensor *kv, const aclTensor *cuSeqlens, const aclTensor *seqused,
    const aclTensor *startPos, int64_t cmpRatio, int64_t coff, const aclTensor *dX, const aclTensor *dWkv,
    const aclTensor *dWgate, const aclTensor *dApe, uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnCompressorGrad(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);
