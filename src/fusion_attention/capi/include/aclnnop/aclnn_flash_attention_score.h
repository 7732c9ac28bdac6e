/* Generated from the operator definitions by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* Attention for training, forward, padded layouts.
 *   query: Query rows.
 *   key: Key rows; N1 is a multiple of N2.
 *   value: Value rows.
 *   realShiftOptional: Bias added to the scores: [B or 1, N1, S1 or 1, S2], or only its last 1024 rows; TND: its
 *       last 1024 rows, or the blocks of all sequences, concatenated. pse_type 2 and 3: slopes, float32 [B, N1] or
 *       [N1]. Null: absent.
 *   dropMaskOptional: One bit per score, 1 = kept, least significant bit first. Null: absent.
 *   paddingMaskOptional: Reserved. Null: absent.
 *   attenMaskOptional: 1 removes a score; sparse_mode determines its shape. Null: absent.
 *   prefixOptional: Number of leading keys of each sequence that all rows see (modes 5 and 6). Null: absent.
 *   scaleValue: Factor on query . key; the default is 1.0, not 1 / sqrt(D).
 *   keepProb: Probability that dropout keeps a weight.
 *   preTokens: Visible tokens before the diagonal (modes 0 and 4).
 *   nextTokens: Visible tokens behind the diagonal (modes 0, 4, 7, 8).
 *   headNum: Query heads.
 *   inputLayout: Axis order of query, key, value and the output.
 *   innerPrecise: 2: rows without visible keys return zeros.
 *   sparseMode: Selects how mask, window and prefix determine the visible keys (docs/sparse_modes.md).
 *   softmaxMaxOut: Row maxima of the scores, eight equal lanes.
 *   softmaxSumOut: Row sums of exp(score - max), eight equal lanes.
 *   softmaxOutOut: Reserved: empty.
 *   attentionOutOut: The output rows. */
ACLNN_FUNCTION aclnnStatus aclnnFlashAttentionScoreGetWorkspaceSize(
    const aclTensor *query, const aclTensor *key, const aclTensor *value, const aclTensor *realShiftOptional,
    const aclTensor *dropMaskOptional, const aclTensor *paddingMaskOptional, const aclTensor *attenMaskOptional,
    const aclIntArray *prefixOptional, double scaleValue, double keepProb, int64_t preTokens, int64_t nextTokens,
    int64_t headNum, char *inputLayout, int64_t innerPrecise, int64_t sparseMode, const aclTensor *softmaxMaxOut,
    const aclTensor *softmaxSumOut, const aclTensor *softmaxOutOut, const aclTensor *attentionOutOut,
    uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnFlashAttentionScore(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);

/* FlashAttentionScore with pse_type and start indices.
 *   qStartIdxOptional: Position of the first query row in its sequence (element 0 is read); None: 0. Null: absent.
 *   kvStartIdxOptional: Position of the first key in its sequence (element 0 is read); None: 0. Null: absent.
 *   scaleValueOptional: Factor on query . key; the default is 1.0, not 1 / sqrt(D).
 *   keepProbOptional: Probability that dropout keeps a weight.
 *   preTokensOptional: Visible tokens before the diagonal (modes 0 and 4).
 *   nextTokensOptional: Visible tokens behind the diagonal (modes 0, 4, 7, 8).
 *   innerPreciseOptional: 2: rows without visible keys return zeros.
 *   sparseModeOptional: Selects how mask, window and prefix determine the visible keys (docs/sparse_modes.md).
 *   pseTypeOptional: 1: scale * (qk + pse); 0: scale * qk + pse; 2 and 3: pse holds slopes, and slope * distance,
 *       or slope * sqrt(distance), is subtracted, with distance = |key + kv_start_idx - row - q_start_idx|. */
ACLNN_FUNCTION aclnnStatus aclnnFlashAttentionScoreV2GetWorkspaceSize(
    const aclTensor *query, const aclTensor *key, const aclTensor *value, const aclTensor *realShiftOptional,
    const aclTensor *dropMaskOptional, const aclTensor *paddingMaskOptional, const aclTensor *attenMaskOptional,
    const aclIntArray *prefixOptional, const aclIntArray *qStartIdxOptional, const aclIntArray *kvStartIdxOptional,
    double scaleValueOptional, double keepProbOptional, int64_t preTokensOptional, int64_t nextTokensOptional,
    int64_t headNum, char *inputLayout, int64_t innerPreciseOptional, int64_t sparseModeOptional,
    int64_t pseTypeOptional, const aclTensor *softmaxMaxOut, const aclTensor *softmaxSumOut,
    const aclTensor *softmaxOutOut, const aclTensor *attentionOutOut, uint64_t *workspaceSize,
    aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnFlashAttentionScoreV2(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);

/* FlashAttentionScoreV2 with sinks.
 *   sinkOptional: One more logit per query head in every denominator. Null: absent.
 *   pseType: 1: scale * (qk + pse); 0: scale * qk + pse; 2 and 3: pse holds slopes, and slope * distance, or slope
 *       * sqrt(distance), is subtracted, with distance = |key + kv_start_idx - row - q_start_idx|. */
ACLNN_FUNCTION aclnnStatus aclnnFlashAttentionScoreV3GetWorkspaceSize(
    const aclTensor *query, const aclTensor *key, const aclTensor *value, const aclTensor *realShiftOptional,
    const aclTensor *dropMaskOptional, const aclTensor *paddingMaskOptional, const aclTensor *attenMaskOptional,
    const aclTensor *sinkOptional, const aclIntArray *prefixOptional, const aclIntArray *qStartIdxOptional,
    const aclIntArray *kvStartIdxOptional, double scaleValue, double keepProb, int64_t preTokens, int64_t nextTokens,
    int64_t headNum, char *inputLayout, int64_t innerPrecise, int64_t sparseMode, int64_t pseType,
    const aclTensor *softmaxMaxOut, const aclTensor *softmaxSumOut, const aclTensor *softmaxOutOut,
    const aclTensor *attentionOutOut, uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnFlashAttentionScoreV3(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);

/* FlashAttentionScoreV3 and VarLenScoreV5 in one, with drawn dropout.
 *   realShift: Bias added to the scores: [B or 1, N1, S1 or 1, S2], or only its last 1024 rows; TND: its last 1024
 *       rows, or the blocks of all sequences, concatenated. pse_type 2 and 3: slopes, float32 [B, N1] or [N1].
 *       Null: absent.
 *   dropMask: One bit per score, 1 = kept, least significant bit first. Null: absent.
 *   paddingMask: Reserved. Null: absent.
 *   attenMask: 1 removes a score; sparse_mode determines its shape. Null: absent.
 *   queryRope: Rope part of the query rows. Null: absent.
 *   keyRope: Rope part of the key rows. Null: absent.
 *   dScaleQ: Scales of q in fp8 (950 only): not computed here. Null: absent.
 *   dScaleK: Scales of k in fp8 (950 only): not computed here. Null: absent.
 *   dScaleV: Scales of v in fp8 (950 only): not computed here. Null: absent.
 *   sink: One more logit per query head in every denominator. Null: absent.
 *   prefix: Number of leading keys of each sequence that all rows see (modes 5 and 6). Null: absent.
 *   actualSeqQLen: TND: cumulative end of every sequence's query rows. Null: absent.
 *   actualSeqKvLen: TND: cumulative end of every sequence's keys. Null: absent.
 *   qStartIdx: Position of the first query row in its sequence (element 0 is read); None: 0. Null: absent.
 *   kvStartIdx: Position of the first key in its sequence (element 0 is read); None: 0. Null: absent.
 *   outDtype: Without effect: the dtype of the output of fp8 tensors.
 *   softmaxOutLayout: Order of packed statistics: "": [N1, q_len, 8] of each sequence, concatenated; otherwise [T1,
 *       N1, 8].
 *   seed: Seed of dropout if keep_prob is below 1 and there is no drop mask; 0 is a seed too.
 *   offset: Offset of drawn dropout.
 *   softmaxMax: Row maxima of the scores, eight equal lanes. TND: the [N1, q_len, 8] of all sequences,
 *       concatenated; [T1, N1, 8] only if softmax_layout is not empty.
 *   softmaxSum: Row sums of exp(score - max), eight equal lanes. TND: the [N1, q_len, 8] of all sequences,
 *       concatenated; [T1, N1, 8] only if softmax_layout is not empty.
 *   softmaxOut: Reserved: empty.
 *   attentionOut: The output rows. */
ACLNN_FUNCTION aclnnStatus aclnnFlashAttentionScoreV4GetWorkspaceSize(
    const aclTensor *query, const aclTensor *key, const aclTensor *value, const aclTensor *realShift,
    const aclTensor *dropMask, const aclTensor *paddingMask, const aclTensor *attenMask, const aclTensor *queryRope,
    const aclTensor *keyRope, const aclTensor *dScaleQ, const aclTensor *dScaleK, const aclTensor *dScaleV,
    const aclTensor *sink, const aclIntArray *prefix, const aclIntArray *actualSeqQLen,
    const aclIntArray *actualSeqKvLen, const aclIntArray *qStartIdx, const aclIntArray *kvStartIdx,
    double scaleValue, double keepProb, int64_t preTokens, int64_t nextTokens, int64_t headNum, char *inputLayout,
    int64_t innerPrecise, int64_t sparseMode, int64_t outDtype, int64_t pseType, char *softmaxOutLayout,
    int64_t seed, int64_t offset, const aclTensor *softmaxMax, const aclTensor *softmaxSum,
    const aclTensor *softmaxOut, const aclTensor *attentionOut, uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnFlashAttentionScoreV4(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);

/* Attention for training, forward, packed sequences.
 *   actualSeqQLenOptional: TND: cumulative end of every sequence's query rows. Null: absent.
 *   actualSeqKvLenOptional: TND: cumulative end of every sequence's keys. Null: absent.
 *   softmaxMaxOut: Row maxima of the scores, eight equal lanes. TND: the [N1, q_len, 8] of all sequences,
 *       concatenated; [T1, N1, 8] only if softmax_layout is not empty.
 *   softmaxSumOut: Row sums of exp(score - max), eight equal lanes. TND: the [N1, q_len, 8] of all sequences,
 *       concatenated; [T1, N1, 8] only if softmax_layout is not empty. */
ACLNN_FUNCTION aclnnStatus aclnnFlashAttentionVarLenScoreGetWorkspaceSize(
    const aclTensor *query, const aclTensor *key, const aclTensor *value, const aclTensor *realShiftOptional,
    const aclTensor *dropMaskOptional, const aclTensor *paddingMaskOptional, const aclTensor *attenMaskOptional,
    const aclIntArray *prefixOptional, const aclIntArray *actualSeqQLenOptional,
    const aclIntArray *actualSeqKvLenOptional, double scaleValue, double keepProb, int64_t preTokens,
    int64_t nextTokens, int64_t headNum, char *inputLayout, int64_t innerPrecise, int64_t sparseMode,
    const aclTensor *softmaxMaxOut, const aclTensor *softmaxSumOut, const aclTensor *softmaxOutOut,
    const aclTensor *attentionOutOut, uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnFlashAttentionVarLenScore(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);

/* VarLenScore with pse_type and start indices. */
ACLNN_FUNCTION aclnnStatus aclnnFlashAttentionVarLenScoreV2GetWorkspaceSize(
    const aclTensor *query, const aclTensor *key, const aclTensor *value, const aclTensor *realShiftOptional,
    const aclTensor *dropMaskOptional, const aclTensor *paddingMaskOptional, const aclTensor *attenMaskOptional,
    const aclIntArray *prefixOptional, const aclIntArray *actualSeqQLenOptional,
    const aclIntArray *actualSeqKvLenOptional, const aclIntArray *qStartIdxOptional,
    const aclIntArray *kvStartIdxOptional, double scaleValue, double keepProb, int64_t preTokens, int64_t nextTokens,
    int64_t headNum, char *inputLayout, int64_t innerPrecise, int64_t sparseMode, int64_t pseType,
    const aclTensor *softmaxMaxOut, const aclTensor *softmaxSumOut, const aclTensor *softmaxOutOut,
    const aclTensor *attentionOutOut, uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnFlashAttentionVarLenScoreV2(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);

/* VarLenScoreV2 with rope parts of query and key. */
ACLNN_FUNCTION aclnnStatus aclnnFlashAttentionVarLenScoreV3GetWorkspaceSize(
    const aclTensor *query, const aclTensor *queryRope, const aclTensor *key, const aclTensor *keyRope,
    const aclTensor *value, const aclTensor *realShiftOptional, const aclTensor *dropMaskOptional,
    const aclTensor *paddingMaskOptional, const aclTensor *attenMaskOptional, const aclIntArray *prefixOptional,
    const aclIntArray *actualSeqQLenOptional, const aclIntArray *actualSeqKvLenOptional,
    const aclIntArray *qStartIdxOptional, const aclIntArray *kvStartIdxOptional, double scaleValue, double keepProb,
    int64_t preTokens, int64_t nextTokens, int64_t headNum, char *inputLayout, int64_t innerPrecise,
    int64_t sparseMode, int64_t pseType, const aclTensor *softmaxMaxOut, const aclTensor *softmaxSumOut,
    const aclTensor *softmaxOutOut, const aclTensor *attentionOutOut, uint64_t *workspaceSize,
    aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnFlashAttentionVarLenScoreV3(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);

/* VarLenScore with softmax_layout, the order of statistics. */
ACLNN_FUNCTION aclnnStatus aclnnFlashAttentionVarLenScoreV4GetWorkspaceSize(
    const aclTensor *query, const aclTensor *key, const aclTensor *value, const aclTensor *realShiftOptional,
    const aclTensor *dropMaskOptional, const aclTensor *paddingMaskOptional, const aclTensor *attenMaskOptional,
    const aclIntArray *prefixOptional, const aclIntArray *actualSeqQLenOptional,
    const aclIntArray *actualSeqKvLenOptional, double scaleValue, double keepProb, int64_t preTokens,
    int64_t nextTokens, int64_t headNum, char *inputLayout, int64_t innerPrecise, int64_t sparseMode,
    char *softmaxOutLayout, const aclTensor *softmaxMaxOut, const aclTensor *softmaxSumOut,
    const aclTensor *softmaxOutOut, const aclTensor *attentionOutOut, uint64_t *workspaceSize,
    aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnFlashAttentionVarLenScoreV4(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);

/* VarLenScoreV3 with sinks and softmax_layout. */
ACLNN_FUNCTION aclnnStatus aclnnFlashAttentionVarLenScoreV5GetWorkspaceSize(
    const aclTensor *query, const aclTensor *queryRope, const aclTensor *key, const aclTensor *keyRope,
    const aclTensor *value, const aclTensor *realShiftOptional, const aclTensor *dropMaskOptional,
    const aclTensor *paddingMaskOptional, const aclTensor *attenMaskOptional, const aclTensor *sinkOptional,
    const aclIntArray *prefixOptional, const aclIntArray *actualSeqQLenOptional,
    const aclIntArray *actualSeqKvLenOptional, const aclIntArray *qStartIdxOptional,
    const aclIntArray *kvStartIdxOptional, double scaleValue, double keepProb, int64_t preTokens, int64_t nextTokens,
    int64_t headNum, char *inputLayout, int64_t innerPrecise, int64_t sparseMode, int64_t pseType,
    char *softmaxOutLayout, const aclTensor *softmaxMaxOut, const aclTensor *softmaxSumOut,
    const aclTensor *softmaxOutOut, const aclTensor *attentionOutOut, uint64_t *workspaceSize,
    aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnFlashAttentionVarLenScoreV5(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);
