/* Generated from the operator definitions by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* Gradients of FlashAttentionScore.
 *   query: Query rows.
 *   keyIn: Key rows; N1 is a multiple of N2.
 *   value: Value rows.
 *   dy: Gradient of the output.
 *   pseShiftOptional: Bias added to the scores: [B or 1, N1, S1 or 1, S2], or only its last 1024 rows; TND: its
 *       last 1024 rows, or the blocks of all sequences, concatenated. pse_type 2 and 3: slopes, float32 [B, N1] or
 *       [N1]. Null: absent.
 *   dropMaskOptional: One bit per score, 1 = kept, least significant bit first. Null: absent.
 *   paddingMaskOptional: Reserved. Null: absent.
 *   attenMaskOptional: 1 removes a score; sparse_mode determines its shape. Null: absent.
 *   softmaxMaxOptional: Row maxima that the forward returned.
 *   softmaxSumOptional: Row sums that the forward returned.
 *   softmaxInOptional: Reserved. Null: absent.
 *   attentionInOptional: The forward's output.
 *   prefixOptional: Number of leading keys of each sequence that all rows see (modes 5 and 6). Null: absent.
 *   scaleValue: Factor on query . key; the default is 1.0, not 1 / sqrt(D).
 *   keepProb: Probability that dropout keeps a weight.
 *   preTokens: Visible tokens before the diagonal (modes 0 and 4).
 *   nextTokens: Visible tokens behind the diagonal (modes 0, 4, 7, 8).
 *   headNum: Query heads.
 *   inputLayout: Axis order of query, key, value and the output.
 *   innerPrecise: 2: rows without visible keys return zeros.
 *   sparseMode: Selects how mask, window and prefix determine the visible keys (docs/sparse_modes.md).
 *   dqOut: Gradient of query.
 *   dkOut: Gradient of key.
 *   dvOut: Gradient of value.
 *   dpseOut: Gradient of pse, in its shape. */
ACLNN_FUNCTION aclnnStatus aclnnFlashAttentionScoreGradGetWorkspaceSize(
    const aclTensor *query, const aclTensor *keyIn, const aclTensor *value, const aclTensor *dy,
    const aclTensor *pseShiftOptional, const aclTensor *dropMaskOptional, const aclTensor *paddingMaskOptional,
    const aclTensor *attenMaskOptional, const aclTensor *softmaxMaxOptional, const aclTensor *softmaxSumOptional,
    const aclTensor *softmaxInOptional, const aclTensor *attentionInOptional, const aclIntArray *prefixOptional,
    double scaleValue, double keepProb, int64_t preTokens, int64_t nextTokens, int64_t headNum, char *inputLayout,
    int64_t innerPrecise, int64_t sparseMode, const aclTensor *dqOut, const aclTensor *dkOut, const aclTensor *dvOut,
    const aclTensor *dpseOut, uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnFlashAttentionScoreGrad(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);

/* FlashAttentionScoreGrad with pse_type and start indices.
 *   qStartIdxOptional: Position of the first query row in its sequence (element 0 is read); None: 0. Null: absent.
 *   kvStartIdxOptional: Position of the first key in its sequence (element 0 is read); None: 0. Null: absent.
 *   pseType: 1: scale * (qk + pse); 0: scale * qk + pse; 2 and 3: pse holds slopes, and slope * distance, or slope
 *       * sqrt(distance), is subtracted, with distance = |key + kv_start_idx - row - q_start_idx|. */
ACLNN_FUNCTION aclnnStatus aclnnFlashAttentionScoreGradV2GetWorkspaceSize(
    const aclTensor *query, const aclTensor *keyIn, const aclTensor *value, const aclTensor *dy,
    const aclTensor *pseShiftOptional, const aclTensor *dropMaskOptional, const aclTensor *paddingMaskOptional,
    const aclTensor *attenMaskOptional, const aclTensor *softmaxMaxOptional, const aclTensor *softmaxSumOptional,
    const aclTensor *softmaxInOptional, const aclTensor *attentionInOptional, const aclIntArray *prefixOptional,
    const aclIntArray *qStartIdxOptional, const aclIntArray *kvStartIdxOptional, double scaleValue, double keepProb,
    int64_t preTokens, int64_t nextTokens, int64_t headNum, char *inputLayout, int64_t innerPrecise,
    int64_t sparseMode, int64_t pseType, const aclTensor *dqOut, const aclTensor *dkOut, const aclTensor *dvOut,
    const aclTensor *dpseOut, uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnFlashAttentionScoreGradV2(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);

/* FlashAttentionScoreGradV2 with sinks.
 *   sinkInOptional: One more logit per query head in every denominator. Null: absent.
 *   dsinkOut: Gradient of sink. */
ACLNN_FUNCTION aclnnStatus aclnnFlashAttentionScoreGradV3GetWorkspaceSize(
    const aclTensor *query, const aclTensor *keyIn, const aclTensor *value, const aclTensor *dy,
    const aclTensor *pseShiftOptional, const aclTensor *dropMaskOptional, const aclTensor *paddingMaskOptional,
    const aclTensor *attenMaskOptional, const aclTensor *softmaxMaxOptional, const aclTensor *softmaxSumOptional,
    const aclTensor *softmaxInOptional, const aclTensor *attentionInOptional, const aclTensor *sinkInOptional,
    const aclIntArray *prefixOptional, const aclIntArray *qStartIdxOptional, const aclIntArray *kvStartIdxOptional,
    double scaleValue, double keepProb, int64_t preTokens, int64_t nextTokens, int64_t headNum, char *inputLayout,
    int64_t innerPrecise, int64_t sparseMode, int64_t pseType, const aclTensor *dqOut, const aclTensor *dkOut,
    const aclTensor *dvOut, const aclTensor *dpseOut, const aclTensor *dsinkOut, uint64_t *workspaceSize,
    aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnFlashAttentionScoreGradV3(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);

/* Gradients of FlashAttentionScoreV4.
 *   key: Key rows; N1 is a multiple of N2.
 *   pseShift: Bias added to the scores: [B or 1, N1, S1 or 1, S2], or only its last 1024 rows; TND: its last 1024
 *       rows, or the blocks of all sequences, concatenated. pse_type 2 and 3: slopes, float32 [B, N1] or [N1].
 *       Null: absent.
 *   dropMask: One bit per score, 1 = kept, least significant bit first. Null: absent.
 *   paddingMask: Reserved. Null: absent.
 *   attenMask: 1 removes a score; sparse_mode determines its shape. Null: absent.
 *   softmaxMax: Row maxima that the forward returned. TND: the [N1, q_len, 8] of all sequences, concatenated; [T1,
 *       N1, 8] only if softmax_layout is not empty.
 *   softmaxSum: Row sums that the forward returned. TND: the [N1, q_len, 8] of all sequences, concatenated; [T1,
 *       N1, 8] only if softmax_layout is not empty.
 *   softmaxIn: Reserved. Null: absent.
 *   attentionIn: The forward's output.
 *   sinkIn: One more logit per query head in every denominator. Null: absent.
 *   queryRope: Rope part of the query rows. Null: absent.
 *   keyRope: Rope part of the key rows. Null: absent.
 *   dScaleQ: Scales of q in fp8 (950 only): not computed here. Null: absent.
 *   dScaleK: Scales of k in fp8 (950 only): not computed here. Null: absent.
 *   dScaleV: Scales of v in fp8 (950 only): not computed here. Null: absent.
 *   dScaleDy: Scales of dy in fp8 (950 only): not computed here. Null: absent.
 *   dScaleO: Scales of o in fp8 (950 only): not computed here. Null: absent.
 *   prefix: Number of leading keys of each sequence that all rows see (modes 5 and 6). Null: absent.
 *   actualSeqQLen: TND: cumulative end of every sequence's query rows. Null: absent.
 *   actualSeqKvLen: TND: cumulative end of every sequence's keys. Null: absent.
 *   qStartIdx: Position of the first query row in its sequence (element 0 is read); None: 0. Null: absent.
 *   kvStartIdx: Position of the first key in its sequence (element 0 is read); None: 0. Null: absent.
 *   softmaxInLayout: Order of packed statistics: "": [N1, q_len, 8] of each sequence, concatenated; otherwise [T1,
 *       N1, 8].
 *   seed: Seed of dropout if keep_prob is below 1 and there is no drop mask; 0 is a seed too.
 *   offset: Offset of drawn dropout.
 *   outDtype: Without effect: the dtype of the output of fp8 tensors.
 *   dq: Gradient of query.
 *   dk: Gradient of key.
 *   dv: Gradient of value.
 *   dqRope: Gradient of query_rope.
 *   dkRope: Gradient of key_rope.
 *   dpse: Gradient of pse, in its shape.
 *   dsink: Gradient of sink. */
ACLNN_FUNCTION aclnnStatus aclnnFlashAttentionScoreGradV4GetWorkspaceSize(
    const aclTensor *query, const aclTensor *key, const aclTensor *value, const aclTensor *dy,
    const aclTensor *pseShift, const aclTensor *dropMask, const aclTensor *paddingMask, const aclTensor *attenMask,
    const aclTensor *softmaxMax, const aclTensor *softmaxSum, const aclTensor *softmaxIn,
    const aclTensor *attentionIn, const aclTensor *sinkIn, const aclTensor *queryRope, const aclTensor *keyRope,
    const aclTensor *dScaleQ, const aclTensor *dScaleK, const aclTensor *dScaleV, const aclTensor *dScaleDy,
    const aclTensor *dScaleO, const aclIntArray *prefix, const aclIntArray *actualSeqQLen,
    const aclIntArray *actualSeqKvLen, const aclIntArray *qStartIdx, const aclIntArray *kvStartIdx,
    double scaleValue, double keepProb, int64_t preTokens, int64_t nextTokens, int64_t headNum, char *inputLayout,
    char *softmaxInLayout, int64_t innerPrecise, int64_t sparseMode, int64_t pseType, int64_t seed, int64_t offset,
    int64_t outDtype, const aclTensor *dq, const aclTensor *dk, const aclTensor *dv, const aclTensor *dqRope,
    const aclTensor *dkRope, const aclTensor *dpse, const aclTensor *dsink, uint64_t *workspaceSize,
    aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnFlashAttentionScoreGradV4(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);

/* Gradients of FlashAttentionVarLenScore.
 *   softmaxMaxOptional: Row maxima that the forward returned. TND: the [N1, q_len, 8] of all sequences,
 *       concatenated; [T1, N1, 8] only if softmax_layout is not empty.
 *   softmaxSumOptional: Row sums that the forward returned. TND: the [N1, q_len, 8] of all sequences, concatenated;
 *       [T1, N1, 8] only if softmax_layout is not empty.
 *   actualSeqQLenOptional: TND: cumulative end of every sequence's query rows. Null: absent.
 *   actualSeqKvLenOptional: TND: cumulative end of every sequence's keys. Null: absent. */
ACLNN_FUNCTION aclnnStatus aclnnFlashAttentionUnpaddingScoreGradGetWorkspaceSize(
    const aclTensor *query, const aclTensor *keyIn, const aclTensor *value, const aclTensor *dy,
    const aclTensor *pseShiftOptional, const aclTensor *dropMaskOptional, const aclTensor *paddingMaskOptional,
    const aclTensor *attenMaskOptional, const aclTensor *softmaxMaxOptional, const aclTensor *softmaxSumOptional,
    const aclTensor *softmaxInOptional, const aclTensor *attentionInOptional, const aclIntArray *prefixOptional,
    const aclIntArray *actualSeqQLenOptional, const aclIntArray *actualSeqKvLenOptional, double scaleValue,
    double keepProb, int64_t preTokens, int64_t nextTokens, int64_t headNum, char *inputLayout, int64_t innerPrecise,
    int64_t sparseMode, const aclTensor *dqOut, const aclTensor *dkOut, const aclTensor *dvOut,
    const aclTensor *dpseOut, uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnFlashAttentionUnpaddingScoreGrad(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);

/* UnpaddingScoreGrad with pse_type and start indices. */
ACLNN_FUNCTION aclnnStatus aclnnFlashAttentionUnpaddingScoreGradV2GetWorkspaceSize(
    const aclTensor *query, const aclTensor *keyIn, const aclTensor *value, const aclTensor *dy,
    const aclTensor *pseShiftOptional, const aclTensor *dropMaskOptional, const aclTensor *paddingMaskOptional,
    const aclTensor *attenMaskOptional, const aclTensor *softmaxMaxOptional, const aclTensor *softmaxSumOptional,
    const aclTensor *softmaxInOptional, const aclTensor *attentionInOptional, const aclIntArray *prefixOptional,
    const aclIntArray *actualSeqQLenOptional, const aclIntArray *actualSeqKvLenOptional,
    const aclIntArray *qStartIdxOptional, const aclIntArray *kvStartIdxOptional, double scaleValue, double keepProb,
    int64_t preTokens, int64_t nextTokens, int64_t headNum, char *inputLayout, int64_t innerPrecise,
    int64_t sparseMode, int64_t pseType, const aclTensor *dqOut, const aclTensor *dkOut, const aclTensor *dvOut,
    const aclTensor *dpseOut, uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnFlashAttentionUnpaddingScoreGradV2(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);

/* UnpaddingScoreGradV2 with rope parts of query and key.
 *   keyInRope: Rope part of the key rows. Null: absent.
 *   dqRopeOut: Gradient of query_rope.
 *   dkRopeOut: Gradient of key_rope. */
ACLNN_FUNCTION aclnnStatus aclnnFlashAttentionUnpaddingScoreGradV3GetWorkspaceSize(
    const aclTensor *query, const aclTensor *queryRope, const aclTensor *keyIn, const aclTensor *keyInRope,
    const aclTensor *value, const aclTensor *dy, const aclTensor *pseShiftOptional,
    const aclTensor *dropMaskOptional, const aclTensor *paddingMaskOptional, const aclTensor *attenMaskOptional,
    const aclTensor *softmaxMaxOptional, const aclTensor *softmaxSumOptional, const aclTensor *softmaxInOptional,
    const aclTensor *attentionInOptional, const aclIntArray *prefixOptional,
    const aclIntArray *actualSeqQLenOptional, const aclIntArray *actualSeqKvLenOptional,
    const aclIntArray *qStartIdxOptional, const aclIntArray *kvStartIdxOptional, double scaleValue, double keepProb,
    int64_t preTokens, int64_t nextTokens, int64_t headNum, char *inputLayout, int64_t innerPrecise,
    int64_t sparseMode, int64_t pseType, const aclTensor *dqOut, const aclTensor *dqRopeOut, const aclTensor *dkOut,
    const aclTensor *dkRopeOut, const aclTensor *dvOut, const aclTensor *dpseOut, uint64_t *workspaceSize,
    aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnFlashAttentionUnpaddingScoreGradV3(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);

/* UnpaddingScoreGrad with softmax_layout, the order of statistics. */
ACLNN_FUNCTION aclnnStatus aclnnFlashAttentionUnpaddingScoreGradV4GetWorkspaceSize(
    const aclTensor *query, const aclTensor *keyIn, const aclTensor *value, const aclTensor *dy,
    const aclTensor *pseShiftOptional, const aclTensor *dropMaskOptional, const aclTensor *paddingMaskOptional,
    const aclTensor *attenMaskOptional, const aclTensor *softmaxMaxOptional, const aclTensor *softmaxSumOptional,
    const aclTensor *softmaxInOptional, const aclTensor *attentionInOptional, const aclIntArray *prefixOptional,
    const aclIntArray *actualSeqQLenOptional, const aclIntArray *actualSeqKvLenOptional, double scaleValue,
    double keepProb, int64_t preTokens, int64_t nextTokens, int64_t headNum, char *inputLayout, int64_t innerPrecise,
    int64_t sparseMode, const aclTensor *dqOut, const aclTensor *dkOut, const aclTensor *dvOut,
    const aclTensor *dpseOut, char *softmaxInLayout, uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnFlashAttentionUnpaddingScoreGradV4(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);

/* UnpaddingScoreGradV3 with sinks and softmax_layout. */
ACLNN_FUNCTION aclnnStatus aclnnFlashAttentionUnpaddingScoreGradV5GetWorkspaceSize(
    const aclTensor *query, const aclTensor *queryRope, const aclTensor *keyIn, const aclTensor *keyInRope,
    const aclTensor *value, const aclTensor *dy, const aclTensor *pseShiftOptional,
    const aclTensor *dropMaskOptional, const aclTensor *paddingMaskOptional, const aclTensor *attenMaskOptional,
    const aclTensor *softmaxMaxOptional, const aclTensor *softmaxSumOptional, const aclTensor *softmaxInOptional,
    const aclTensor *attentionInOptional, const aclTensor *sinkInOptional, const aclIntArray *prefixOptional,
    const aclIntArray *actualSeqQLenOptional, const aclIntArray *actualSeqKvLenOptional,
    const aclIntArray *qStartIdxOptional, const aclIntArray *kvStartIdxOptional, double scaleValue, double keepProb,
    int64_t preTokens, int64_t nextTokens, int64_t headNum, char *inputLayout, int64_t innerPrecise,
    int64_t sparseMode, int64_t pseType, char *softmaxInLayout, const aclTensor *dqOut, const aclTensor *dqRopeOut,
    const aclTensor *dkOut, const aclTensor *dkRopeOut, const aclTensor *dvOut, const aclTensor *dpseOut,
    const aclTensor *dsinkOut, uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnFlashAttentionUnpaddingScoreGradV5(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);
