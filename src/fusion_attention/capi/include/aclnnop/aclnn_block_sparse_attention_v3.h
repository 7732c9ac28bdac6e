/* Generated from the operator definitions by `python -m codegen`. */
#pragma once
#include "aclnn/aclnn_base.h"

/* BlockSparseAttentionV2 with quant_mode, dst_type_max and p_quant_scale.
 *   qDequantScaleOptional: Scales of query in fp8 (950 only): not computed here. Null: absent.
 *   kDequantScaleOptional: Scales of key in fp8 (950 only): not computed here. Null: absent.
 *   vDequantScaleOptional: Scales of value in fp8 (950 only): not computed here. Null: absent.
 *   pQuantScaleOptional: Reserved. Null: absent.
 *   quantMode: 0: floats. 1 to 3, fp8 and fp4 (950 only), are not computed here.
 *   dstTypeMax: Without effect: it is for fp4.
 * The other parameters are explained in aclnn_block_sparse_attention.h. */
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
