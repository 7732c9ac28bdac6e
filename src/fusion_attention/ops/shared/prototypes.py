"""CANN's C declarations: names and order of the parameters of every aclnnXxxGetWorkspaceSize function.

Spellings, including inconsistent ones between versions, are those of the sources.
"""

from __future__ import annotations

import re
from functools import partial

from fusion_attention.contract import Op, Prototype

PUBLIC = "its public repository, ops-transformer; pages may spell some otherwise"
_PAGES = {
    "aclnnFlashAttentionScoreV2": """
        query key value realShiftOptional dropMaskOptional paddingMaskOptional attenMaskOptional prefixOptional
        qStartIdxOptional kvStartIdxOptional scaleValueOptional keepProbOptional preTokensOptional nextTokensOptional
        headNum inputLayout innerPreciseOptional sparseModeOptional pseTypeOptional
        softmaxMaxOut softmaxSumOut softmaxOutOut attentionOutOut""",
    "aclnnFlashAttentionUnpaddingScoreGradV3": """
        query queryRope keyIn keyInRope value dy pseShiftOptional dropMaskOptional paddingMaskOptional attenMaskOptional
        softmaxMaxOptional softmaxSumOptional softmaxInOptional attentionInOptional prefixOptional
        actualSeqQLenOptional actualSeqKvLenOptional qStartIdxOptional kvStartIdxOptional
        scaleValue keepProb preTokens nextTokens headNum inputLayout innerPrecise sparseMode pseType
        dqOut dqRopeOut dkOut dkRopeOut dvOut dpseOut""",
    "aclnnIncreFlashAttentionV4": """
        query key value pseShift attenMask actualSeqLengths dequantScale1 quantScale1 dequantScale2 quantScale2
        quantOffset2 antiquantScale antiquantOffset blocktable kvPaddingSize
        numHeads scaleValue inputLayout numKeyValueHeads blockSize innerPrecise attentionOut""",
    "aclnnSparseFlashAttentionGrad": """
        query key value sparseIndices dOut out softmaxMax softmaxSum actualSeqLengthsQueryOptional
        actualSeqLengthskvOptional queryRopeOptional keyRopeOptional scaleValue sparseBlockSize layoutOptional
        sparseMode preTokens nextTokens deterministic
        dQueryOut dKeyOut dValueOut dQueryRopeOutOptional dKeyRopeOutOptional""",
    "aclnnSparseLightningIndexerKLLossGrad": """
        q k w sparseIndices attnSoftmaxL1Norm cuSeqLensQOptional cuSeqLensKOptional seqUsedQOptional seqUsedKOptional
        cmpResidualKOptional metadataOptional layoutQ layoutK maskMode cmpRatio dq dk dw softmaxOut""",
    "aclnnDenseLightningIndexerKLLossGrad": """
        q k w attnSoftmaxL1Norm softmaxLse cuSeqLensQOptional cuSeqLensKOptional seqUsedQOptional seqUsedKOptional
        cmpResidualKOptional metadataOptional layoutQ layoutK maskMode cmpRatio dq dk dw softmaxOut""",
    "aclnnDenseLightningIndexerSoftmaxLseV2": """
        queryIndex keyIndex weight cuSeqLensQOptional cuSeqLensKOptional seqUsedQOptional seqUsedKOptional
        cmpResidualKOptional metadataOptional layoutQ layoutK maskMode cmpRatio softmaxLse""",
    "aclnnSparseLightningIndexerGradKLLoss": """
        query key queryIndex keyIndex weights sparseIndices softmaxMax softmaxSum queryRope keyRope
        actualSeqLengthsQuery actualSeqLengthsKey scaleValue layout sparseMode pre_tokens next_tokens deterministic
        dQueryIndex dKeyIndex dWeights loss""",
}
_FUSED = """
    pseShift attenMask actualSeqLengths actualSeqLengthsKv deqScale1 quantScale1 deqScale2 quantScale2 quantOffset2
    antiquantScale antiquantOffset blockTable queryPaddingSize kvPaddingSize"""
_SIDES = """
    keyAntiquantScale keyAntiquantOffset valueAntiquantScale valueAntiquantOffset
    keySharedPrefix valueSharedPrefix actualSharedPrefixLen"""
_ROPES, _QUERY = " queryRope keyRope keyRopeAntiquantScale", " dequantScaleQuery learnableSink"
_SIDE_MODES = "keyAntiquantMode valueAntiquantMode"


def _fused(optional: str, modes: str = "", suffix: str = "Optional") -> str:
    """Parameter names of a version of FusedInferAttentionScore, from its optional inputs and its last attributes."""
    return f"""
        query key value {" ".join(name + suffix for name in optional.split())}
        numHeads scaleValue preTokens nextTokens inputLayout numKeyValueHeads sparseMode innerPrecise blockSize
        antiquantMode softmaxLseFlag {modes} attentionOut softmaxLse"""


_HEADERS = {
    "aclnnFlashAttentionScore": """
        query key value realShiftOptional dropMaskOptional paddingMaskOptional attenMaskOptional prefixOptional
        scaleValue keepProb preTokens nextTokens headNum inputLayout innerPrecise sparseMode
        softmaxMaxOut softmaxSumOut softmaxOutOut attentionOutOut""",
    "aclnnFlashAttentionScoreV3": """
        query key value realShiftOptional dropMaskOptional paddingMaskOptional attenMaskOptional sinkOptional
        prefixOptional qStartIdxOptional kvStartIdxOptional
        scaleValue keepProb preTokens nextTokens headNum inputLayout innerPrecise sparseMode pseType
        softmaxMaxOut softmaxSumOut softmaxOutOut attentionOutOut""",
    "aclnnFlashAttentionScoreV4": """
        query key value realShift dropMask paddingMask attenMask queryRope keyRope dScaleQ dScaleK dScaleV sink prefix
        actualSeqQLen actualSeqKvLen qStartIdx kvStartIdx
        scaleValue keepProb preTokens nextTokens headNum inputLayout innerPrecise sparseMode outDtype pseType
        softmaxOutLayout seed offset softmaxMax softmaxSum softmaxOut attentionOut""",
    "aclnnFlashAttentionScoreGradV4": """
        query key value dy pseShift dropMask paddingMask attenMask softmaxMax softmaxSum softmaxIn attentionIn sinkIn
        queryRope keyRope dScaleQ dScaleK dScaleV dScaleDy dScaleO prefix actualSeqQLen actualSeqKvLen qStartIdx
        kvStartIdx scaleValue keepProb preTokens nextTokens headNum inputLayout softmaxInLayout innerPrecise sparseMode
        pseType seed offset outDtype dq dk dv dqRope dkRope dpse dsink""",
    "aclnnFlashAttentionVarLenScore": """
        query key value realShiftOptional dropMaskOptional paddingMaskOptional attenMaskOptional prefixOptional
        actualSeqQLenOptional actualSeqKvLenOptional
        scaleValue keepProb preTokens nextTokens headNum inputLayout innerPrecise sparseMode
        softmaxMaxOut softmaxSumOut softmaxOutOut attentionOutOut""",
    "aclnnFlashAttentionVarLenScoreV2": """
        query key value realShiftOptional dropMaskOptional paddingMaskOptional attenMaskOptional prefixOptional
        actualSeqQLenOptional actualSeqKvLenOptional qStartIdxOptional kvStartIdxOptional
        scaleValue keepProb preTokens nextTokens headNum inputLayout innerPrecise sparseMode pseType
        softmaxMaxOut softmaxSumOut softmaxOutOut attentionOutOut""",
    "aclnnFlashAttentionVarLenScoreV3": """
        query queryRope key keyRope value realShiftOptional dropMaskOptional paddingMaskOptional attenMaskOptional
        prefixOptional actualSeqQLenOptional actualSeqKvLenOptional qStartIdxOptional kvStartIdxOptional
        scaleValue keepProb preTokens nextTokens headNum inputLayout innerPrecise sparseMode pseType
        softmaxMaxOut softmaxSumOut softmaxOutOut attentionOutOut""",
    "aclnnFlashAttentionVarLenScoreV4": """
        query key value realShiftOptional dropMaskOptional paddingMaskOptional attenMaskOptional prefixOptional
        actualSeqQLenOptional actualSeqKvLenOptional
        scaleValue keepProb preTokens nextTokens headNum inputLayout innerPrecise sparseMode softmaxOutLayout
        softmaxMaxOut softmaxSumOut softmaxOutOut attentionOutOut""",
    "aclnnFlashAttentionVarLenScoreV5": """
        query queryRope key keyRope value realShiftOptional dropMaskOptional paddingMaskOptional attenMaskOptional
        sinkOptional prefixOptional actualSeqQLenOptional actualSeqKvLenOptional qStartIdxOptional kvStartIdxOptional
        scaleValue keepProb preTokens nextTokens headNum inputLayout innerPrecise sparseMode pseType softmaxOutLayout
        softmaxMaxOut softmaxSumOut softmaxOutOut attentionOutOut""",
    "aclnnFlashAttentionScoreGrad": """
        query keyIn value dy pseShiftOptional dropMaskOptional paddingMaskOptional attenMaskOptional
        softmaxMaxOptional softmaxSumOptional softmaxInOptional attentionInOptional prefixOptional
        scaleValue keepProb preTokens nextTokens headNum inputLayout innerPrecise sparseMode
        dqOut dkOut dvOut dpseOut""",
    "aclnnFlashAttentionScoreGradV2": """
        query keyIn value dy pseShiftOptional dropMaskOptional paddingMaskOptional attenMaskOptional
        softmaxMaxOptional softmaxSumOptional softmaxInOptional attentionInOptional prefixOptional
        qStartIdxOptional kvStartIdxOptional
        scaleValue keepProb preTokens nextTokens headNum inputLayout innerPrecise sparseMode pseType
        dqOut dkOut dvOut dpseOut""",
    "aclnnFlashAttentionScoreGradV3": """
        query keyIn value dy pseShiftOptional dropMaskOptional paddingMaskOptional attenMaskOptional
        softmaxMaxOptional softmaxSumOptional softmaxInOptional attentionInOptional sinkInOptional prefixOptional
        qStartIdxOptional kvStartIdxOptional
        scaleValue keepProb preTokens nextTokens headNum inputLayout innerPrecise sparseMode pseType
        dqOut dkOut dvOut dpseOut dsinkOut""",
    "aclnnFlashAttentionUnpaddingScoreGrad": """
        query keyIn value dy pseShiftOptional dropMaskOptional paddingMaskOptional attenMaskOptional
        softmaxMaxOptional softmaxSumOptional softmaxInOptional attentionInOptional prefixOptional
        actualSeqQLenOptional actualSeqKvLenOptional
        scaleValue keepProb preTokens nextTokens headNum inputLayout innerPrecise sparseMode
        dqOut dkOut dvOut dpseOut""",
    "aclnnFlashAttentionUnpaddingScoreGradV2": """
        query keyIn value dy pseShiftOptional dropMaskOptional paddingMaskOptional attenMaskOptional
        softmaxMaxOptional softmaxSumOptional softmaxInOptional attentionInOptional prefixOptional
        actualSeqQLenOptional actualSeqKvLenOptional qStartIdxOptional kvStartIdxOptional
        scaleValue keepProb preTokens nextTokens headNum inputLayout innerPrecise sparseMode pseType
        dqOut dkOut dvOut dpseOut""",
    "aclnnFlashAttentionUnpaddingScoreGradV4": """
        query keyIn value dy pseShiftOptional dropMaskOptional paddingMaskOptional attenMaskOptional
        softmaxMaxOptional softmaxSumOptional softmaxInOptional attentionInOptional prefixOptional
        actualSeqQLenOptional actualSeqKvLenOptional
        scaleValue keepProb preTokens nextTokens headNum inputLayout innerPrecise sparseMode
        dqOut dkOut dvOut dpseOut softmaxInLayout""",
    "aclnnFlashAttentionUnpaddingScoreGradV5": """
        query queryRope keyIn keyInRope value dy pseShiftOptional dropMaskOptional paddingMaskOptional attenMaskOptional
        softmaxMaxOptional softmaxSumOptional softmaxInOptional attentionInOptional sinkInOptional prefixOptional
        actualSeqQLenOptional actualSeqKvLenOptional qStartIdxOptional kvStartIdxOptional
        scaleValue keepProb preTokens nextTokens headNum inputLayout innerPrecise sparseMode pseType softmaxInLayout
        dqOut dqRopeOut dkOut dkRopeOut dvOut dpseOut dsinkOut""",
    "aclnnIncreFlashAttention": """
        query key value pseShift attenMask actualSeqLengths
        numHeads scaleValue inputLayout numKeyValueHeads attentionOut""",
    "aclnnIncreFlashAttentionV2": """
        query key value pseShift attenMask actualSeqLengths dequantScale1 quantScale1 dequantScale2 quantScale2
        quantOffset2 numHeads scaleValue inputLayout numKeyValueHeads attentionOut""",
    "aclnnIncreFlashAttentionV3": """
        query key value pseShift attenMask actualSeqLengths dequantScale1 quantScale1 dequantScale2 quantScale2
        quantOffset2 antiquantScale antiquantOffset blocktable
        numHeads scaleValue inputLayout numKeyValueHeads blockSize innerPrecise attentionOut""",
    "aclnnPromptFlashAttention": """
        query key value pseShift attenMask actualSeqLengths
        numHeads scaleValue preTokens nextTokens inputLayout numKeyValueHeads attentionOut""",
    "aclnnPromptFlashAttentionV2": """
        query key value pseShift attenMask actualSeqLengths actualSeqLengthsKv deqScale1 quantScale1 deqScale2
        quantScale2 quantOffset2
        numHeads scaleValue preTokens nextTokens inputLayout numKeyValueHeads sparseMode attentionOut""",
    "aclnnPromptFlashAttentionV3": """
        query key value pseShift attenMask actualSeqLengths actualSeqLengthsKv deqScale1 quantScale1 deqScale2
        quantScale2 quantOffset2
        numHeads scaleValue preTokens nextTokens inputLayout numKeyValueHeads sparseMode innerPrecise attentionOut""",
    "aclnnFusedInferAttentionScore": _fused(_FUSED, suffix=""),
    "aclnnFusedInferAttentionScoreV2": _fused(_FUSED + _SIDES, _SIDE_MODES),
    "aclnnFusedInferAttentionScoreV3": _fused(_FUSED + _SIDES + _ROPES, _SIDE_MODES),
    "aclnnFusedInferAttentionScoreV4": _fused(_FUSED + _SIDES + _ROPES + _QUERY, f"{_SIDE_MODES} queryQuantMode"),
    "aclnnFusedInferAttentionScoreV5": _fused(
        f"{_FUSED}{_SIDES}{_ROPES}{_QUERY} qStartIdx kvStartIdx", f"{_SIDE_MODES} queryQuantMode pseType"
    ),
    "aclnnSparseFlashAttention": """
        query key value sparseIndices blockTableOptional actualSeqLengthsQueryOptional actualSeqLengthsKvOptional
        queryRopeOptional keyRopeOptional scaleValue sparseBlockSizeOptional layoutQueryOptional layoutKvOptional
        sparseMode preTokens nextTokens attentionMode returnSoftmaxLse attentionOut softmaxMax softmaxSum""",
    "aclnnLightningIndexer": """
        query key weights actualSeqLengthsQueryOptional actualSeqLengthsKeyOptional blockTableOptional
        layoutQueryOptional layoutKeyOptional sparseCount sparseMode preTokens nextTokens returnValues
        sparseIndicesOut sparseValuesOut""",
    "aclnnLightningIndexerV2": """
        q k w cuSeqlensQ cuSeqlensK sequsedQ sequsedK cmpResidualK blockTable outputIdxOffset metadata
        topk maxSeqlenQ layoutQ layoutK maskMode cmpRatio returnValue sparseIndices sparseValues""",
    "aclnnLightningIndexerGrad": """
        query key dy sparseIndices weights actualSeqQLenOptional actualSeqKvLenOptional
        headNum inputLayout sparseMode preTokens nextTokens deterministic dqOut dkOut dweightsOut""",
    "aclnnDenseLightningIndexerGradKLLoss": """
        query key queryIndex keyIndex weight softmaxMax softmaxSum softmaxMaxIndex softmaxSumIndex
        queryRopeOptional keyRopeOptional actualSeqLengthsQueryOptional actualSeqLengthsKeyOptional
        scaleValue layoutOptional sparseMode preTokens nextTokens
        dQueryIndexOut dKeyIndexOut dWeightOut lossOut""",
    "aclnnDenseLightningIndexerSoftmaxLse": """
        queryIndex keyIndex weight actualSeqLengthsQueryOptional actualSeqLengthsKeyOptional layoutOptional
        sparseMode preTokens nextTokens softmaxMaxOut softmaxSumOut""",
}
_SHARED_KEYS = "oriKv cmpKv oriSparseIndices cmpSparseIndices"
_SHARED_LENGTHS = """cuSeqlensQ cuSeqlensOriKv cuSeqlensCmpKv sequsedQ sequsedOriKv sequsedCmpKv cmpResidualKv
    oriTopkLength cmpTopkLength sinks metadata"""
_SHARED_MODES = "cmpRatio oriMaskMode cmpMaskMode oriWinLeft oriWinRight layoutQ layoutKv"
_PAGES |= {
    "aclnnSparseFlashMla": f"""
        q {_SHARED_KEYS} oriBlockTable cmpBlockTable {_SHARED_LENGTHS}
        softmaxScale {_SHARED_MODES} topkValueMode returnSoftmaxLse attnOut softmaxLseOut""",
    "aclnnSparseFlashMlaGrad": f"""
        query dOut out lse {_SHARED_KEYS} {_SHARED_LENGTHS}
        scaleValue {_SHARED_MODES} dQuery dOriKv dCmpKv dSinks oriSoftmaxL1Norm cmpSoftmaxL1Norm""",
    "aclnnCompressor": """
        x wkv wgate stateCacheRef ape stateBlockTable cuSeqlens seqused startPos cmpRatio coff cacheMode
        stateCacheStrideDim0 gradEnabled cmpKv softmaxScore kv""",
    "aclnnCompressorGrad": """
        x wkv wgate dCmpKv softmaxScore kv cuSeqlens seqused startPos cmpRatio coff dX dWkv dWgate dApe""",
    "aclnnSparseFlashMlaSoftmaxL1Norm": """
        q k softmaxLse sparseIndices cuSeqlensQ cuSeqlensK sequsedQ sequsedK cmpResidualK topkLength metadata
        softmaxScale maxSeqlenK cmpRatio maskMode layoutQ layoutK out""",
}
_PAGES |= {
    f"aclnnSparseFlashMla{suffix}Metadata": f"""
        {_SHARED_LENGTHS.removesuffix("sinks metadata")} numHeadsQ numHeadsKv headDim batchSize maxSeqlenQ
        maxSeqlenOriKv maxSeqlenCmpKv oriTopk cmpTopk {_SHARED_MODES} hasOriKv hasCmpKv metaData"""
    for suffix in ("", "Grad")
}
_PAGES["aclnnSparseFlashMlaSoftmaxL1NormMetadata"] = """
    cuSeqlensQ cuSeqlensK sequsedQ sequsedK cmpResidualK topkLength numHeadsQ numHeadsK headDim batchSize maxSeqlenQ
    maxSeqlenK topk layoutQ layoutK maskMode cmpRatio metaData"""
_BLOCKS = "blockSparseMaskOptional attenMaskOptional blockShapeOptional"
_BLOCKS += " actualSeqLengthsOptional actualSeqLengthsKvOptional"
_BLOCK_NUMBERS = "qInputLayout kvInputLayout numKeyValueHeads maskType scaleValue innerPrecise blockSize preTokens"
_BLOCK_NUMBERS += " nextTokens softmaxLseFlag"
_PAGES |= {
    "aclnnBlockSparseAttention": f"""
        query key value {_BLOCKS} blockTableOptional {_BLOCK_NUMBERS} attentionOut softmaxLseOptional""",
    "aclnnBlockSparseAttentionV2": f"""
        query key value {_BLOCKS} blockTableOptional qDequantScale kDequantScale vDequantScale
        {_BLOCK_NUMBERS} attentionOut softmaxLseOptional""",
    "aclnnBlockSparseAttentionGrad": f"""
        dout query key value attentionOut softmaxLse {_BLOCKS} qInputLayout kvInputLayout numKeyValueHeads maskType
        scaleValue preTokens nextTokens dq dk dv""",
}
_HEADERS["aclnnBlockSparseAttentionV3"] = f"""
    query key value {_BLOCKS} blockTableOptional qDequantScaleOptional kDequantScaleOptional vDequantScaleOptional
    pQuantScaleOptional {_BLOCK_NUMBERS} quantMode dstTypeMax attentionOut softmaxLseOptional"""
_LOSS_NUMBERS = "batchSize maxSeqLenQ maxSeqLenK numHeadsQ numHeadsK headDim"
_PAGES |= {
    f"aclnn{name}Metadata": f"""
        cuSeqLensQOptional cuSeqLensKOptional seqUsedQOptional seqUsedKOptional cmpResidualKOptional {_LOSS_NUMBERS}
        {topk} layoutQ layoutK maskMode cmpRatio metadata"""
    for name, topk in (
        ("SparseLightningIndexerKLLossGrad", "topk"),
        ("DenseLightningIndexerKLLossGrad", ""),
        ("DenseLightningIndexerSoftmaxLseV2", ""),
    )
}
# Operators whose lengths are tensors on the device.
_LENGTHS_ON_DEVICE = {
    f"aclnn{name}"
    for name in (
        *("SparseFlashAttention", "SparseFlashAttentionGrad"),
        *("LightningIndexer", "LightningIndexerV2", "LightningIndexerGrad", "Compressor", "CompressorGrad"),
        *(
            f"{name}{suffix}"
            for name in (
                *("SparseLightningIndexerKLLossGrad", "DenseLightningIndexerKLLossGrad"),
                "DenseLightningIndexerSoftmaxLseV2",
            )
            for suffix in ("", "Metadata")
        ),
        *(f"SparseFlashMla{kind}{suffix}" for kind in ("", "Grad", "SoftmaxL1Norm") for suffix in ("", "Metadata")),
    )
}


def _header(name: str) -> str:
    """CANN's header of an operator; the training operators share two headers."""
    if name.startswith("aclnnFlashAttention"):
        return f"aclnn_flash_attention_score{'_grad' if 'Grad' in name else ''}.h"
    words = re.sub(r"([a-z\d])(?=[A-Z])|([A-Z])(?=[A-Z][a-z])", r"\1\2_", name)
    return words.lower() + ".h"


def _prototype(name: str, text: str, source: str) -> Prototype:
    names = tuple(text.split())
    lengths = (
        r"PaddingSize|actualSeq|cuSeq|(?i:seqUsed)|cmpResidual|startPos"
        if name in _LENGTHS_ON_DEVICE
        else r"PaddingSize"
    )
    return Prototype(names, source, _header(name), frozenset(result for result in names if re.search(lengths, result)))


PROTOTYPES = {
    **{name: _prototype(name, names, "this operator's page") for name, names in _PAGES.items()},
    **{name: _prototype(name, names, PUBLIC) for name, names in _HEADERS.items()},
}
# Makes the definition of an operator of CANN; its versions are made with Op.version().
of_cann = partial(Op, source="CANN", prototypes=PROTOTYPES, blank_is_absent=True)
