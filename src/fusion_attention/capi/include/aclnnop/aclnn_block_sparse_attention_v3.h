/* Written from the operators' records by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* BlockSparseAttentionV2 with kinds of quantisation.
 *   query: Query rows.
 *   key: Key rows; N1 is a multiple of N2.
 *   value: Value rows.
 *   blockSparseMaskOptional: Nonzero: the rows of this block see the keys of this block. [B, N1, ceil(S1 / X),
 *       ceil(S2 / Y)], S1 and S2 of the longest sequence; blocks are counted from each sequence's first token.
 *       None: all keys are visible. Null: absent.
 *   attenMaskOptional: Reserved. Null: absent.
 *   blockShapeOptional: [X, Y], rows and keys of a block; None: [128, 128]. Null: absent.
 *   actualSeqLengthsOptional: Query rows of every sequence; TND: needed. Null: absent.
 *   actualSeqLengthsKvOptional: Keys of every sequence; TND: needed. Null: absent.
 *   blockTableOptional: Reserved. Null: absent.
 *   qDequantScaleOptional: Scales of query in fp8 (950 only): not computed here. Null: absent.
 *   kDequantScaleOptional: Scales of key in fp8 (950 only): not computed here. Null: absent.
 *   vDequantScaleOptional: Scales of value in fp8 (950 only): not computed here. Null: absent.
 *   pQuantScaleOptional: Reserved. Null: absent.
 *   qInputLayout: Axis order of query rows.
 *   kvInputLayout: Axis order of key rows: as the queries'.
 *   numKeyValueHeads: Key heads.
 *   maskType: 0: no mask beside the blocks.
 *   scaleValue: Factor on query . key; no value stands for 1 / sqrt(D).
 *   innerPrecise: Without effect: the softmax is in float32.
 *   blockSize: Without effect.
 *   preTokens: Without effect: no window is defined beside the blocks.
 *   nextTokens: Without effect: no window is defined beside the blocks.
 *   softmaxLseFlag: 1: return softmax_lse.
 *   quantMode: 0: floats. 1 to 3, fp8 and fp4 (950 only), are not computed here.
 *   dstTypeMax: Without effect: it is of fp4.
 *   attentionOut: The output rows.
 *   softmaxLseOptional: log(sum(exp(s))) of every row and head; -inf in a row that sees no key. */
ACLNN_FUNCTION aclnnStatus aclnnBlockSparseAttentionV3GetWorkspaceSize(
    const aclTensor *query, const aclTensor *key, const aclTensor *value, const aclTensor *blockSparseMaskOptional,
    const aclTensor *attenMaskOptional, const aclIntArray *blockShapeOptional,
    const aclIntArray *actualSeqLengthsOptional, const aclIntArray *actualSeqLengthsKvOptional,
    const aclTensor *blockTableOptional, const aclTensor *qDequantScaleOptional,
    const aclTensor *kDequantScaleOptional, const aclTensor *vDequantScaleOptional,
    const aclTensor *pQuantScaleOptional, char *qInputLayout, char *kvInputLayout, int64_t numKeyValueHeads,
    int64_t maskType, double scaleValue, int64_t innerPrecise, int64_t blockSize, int64_t preTokens,
    int64_t nextTokens, int64_t softmaxLseFlag, int64_t quantMode, double dstTypeMax, const aclTensor *attentionOut,
    const aclTensor *softmaxLseOptional, uint64_t *workspaceSize, aclOpExecutor **executor);
ACLNN_FUNCTION aclnnStatus aclnnBlockSparseAttentionV3(
    void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, const aclrtStream stream);
