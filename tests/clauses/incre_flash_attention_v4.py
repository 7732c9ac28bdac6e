"""Table of the page of aclnnIncreFlashAttentionV4 for Atlas A2; inference cards support less."""

import torch

from clauses.checks import INVALID, NULL, RUN_TIME, Check, Page, computes, forbids, refuses, repeats
from clauses.dtype_abbreviations import BF, BOOL, F32, F64, I8, I16, I32, I64, U8, H
from clauses.incre_flash_attention_v4_formula import PROTOTYPE, base, formula
from clauses.values import drawn, fractal, gapped, ints, to, zeros

LAYOUTS = ("BSH", "BNSD", "BSND")
MASKS = ((2, 9), (2, 1, 9), (2, 1, 1, 9))
OPTIONAL = (
    *("pseShift", "attenMask", "dequantScale1", "quantScale1", "dequantScale2", "quantScale2", "quantOffset2"),
    *("antiquantScale", "antiquantOffset", "blocktable", "kvPaddingSize"),
)
DTYPES = {"attenMask": BOOL, "blocktable": I32, "kvPaddingSize": I64, "pseShift": H} | dict.fromkeys(
    ("antiquantScale", "antiquantOffset"), H
)
PAGES = (*({"layout": layout, "pages": "BSH"} for layout in LAYOUTS), {"layout": "BNSD", "pages": "BNSD"})
# Shapes of antiquantScale and antiquantOffset for 2 key heads of 16 elements.
CHANNELS = ((2,), (2, 32), (2, 2, 16), (2, 2, 1, 16))
# Shapes of quantScale2 and quantOffset2 for 4 query heads of 16 elements.
OUT_CHANNELS = ((1,), (64,), (1, 1, 64), (1, 4, 1, 16), (4, 16), (1, 1, 4, 16))


def masked(*shape: int, d: torch.dtype) -> Check:
    """Makes a check with a mask that hides every third token."""
    return computes(attenMask=lambda old: (torch.arange(shape[-1]) % 3 == 1).expand(shape).contiguous().to(d))


def narrow(layout: str = "BNSD", **over: object) -> dict[str, object]:
    """Returns changes for int8 output."""
    return {"layout": layout, "attentionOut": to(I8), "quantScale2": zeros(1), **over}


def scales(name: str) -> dict[str, object]:
    """Returns changes that pass scales or offsets with gaps; the scales that an offset needs have no gaps."""
    like = {"antiquantOffset": "antiquantScale", "quantOffset2": "quantScale2"}.get(name)
    shape, d = ((64,), F32) if "2" in name else ((2, 32), H)
    beside = {like: drawn(*shape, d=d)} if like else {}
    return beside | {name: lambda old: gapped(torch.ones(shape, dtype=d))}


def scale(*shape: int, d: torch.dtype = F32) -> object:
    """Returns positive scales, one of which is large enough to saturate int8."""
    return lambda old: (torch.arange(int(torch.Size(shape).numel())) * 8 + 5.0).reshape(shape).to(d)


CLAUSES = {
    # ---------------------------------------------------------------------------------------------- layouts, dtypes
    "inputLayout is BSH, BNSD or BSND, for FLOAT16 and BFLOAT16, with and without actualSeqLengths.": [
        *(computes(layout=x, dtype=d) for x in LAYOUTS for d in (H, BF)),
        *(computes(layout=x, dtype=d, actualSeqLengths=[4, 9]) for x in LAYOUTS for d in (H, BF)),
        *(computes(layout=x, N2=4, numKeyValueHeads=n) for x in LAYOUTS for n in (0, 4)),
    ],
    "There is no other inputLayout.": [
        *(forbids("inputLayout", inputLayout=x) for x in ("SBH", "TND", "BNSD_BSND", "bsh", "")),
    ],
    "query is FLOAT16 or BFLOAT16.": [
        refuses(INVALID, "query", dtype=F32),
        refuses(INVALID, "query", dtype=F64),
        refuses(INVALID, "query key", query=to(I8)),
        refuses(INVALID, "query key", query=to(F32)),
    ],
    "query, key and value may not all be INT8.": [
        refuses(INVALID, "query", dtype=I8, antiquantScale=None),
    ],
    "key and value are FLOAT16, BFLOAT16 or INT8, of one dtype.": [
        *(computes(layout=x, dtype=d, cache=I8) for x in LAYOUTS for d in (H, BF)),
        refuses(INVALID, "key value", key=to(F32), value=to(F32)),
        refuses(INVALID, "key value", key=to(F64), value=to(F64)),
        refuses(INVALID, "key value", key=to(BF), value=to(BF)),
        refuses(INVALID, "key value", value=to(BF)),
        refuses(INVALID, "key value", value=to(I8)),
        refuses(INVALID, "key value", key=to(U8), value=to(U8)),
    ],
    "attentionOut is FLOAT16 or BFLOAT16, as query, or INT8.": [
        refuses(INVALID, "attentionOut", attentionOut=to(F32)),
        refuses(INVALID, "attentionOut", attentionOut=to(BF)),
        refuses(INVALID, "attentionOut", attentionOut=to(U8)),
        refuses(INVALID, "attentionOut", dtype=BF, attentionOut=to(H)),
    ],
    "attentionOut has the shape of query.": [
        forbids("attentionOut", attentionOut=zeros(2, 4, 1, 8, d=H)),
        forbids("attentionOut", attentionOut=zeros(2, 1, 4, 16, d=H)),
        forbids("attentionOut", attentionOut=zeros(2, 4, 16, d=H)),
    ],
    "Tensors are ND.": [
        *(refuses(INVALID, name, **{name: fractal}) for name in ("query", "key", "value", "attentionOut")),
        refuses(INVALID, "pseShift", pseShift=lambda old: fractal(drawn(2, 4, 1, 9, d=H)(old))),
        refuses(INVALID, "attenMask", attenMask=lambda old: fractal(zeros(2, 9, d=BOOL)(old))),
        refuses(INVALID, "blocktable", page=16, blocktable=fractal),
        refuses(INVALID, "antiquantScale", cache=I8, antiquantScale=fractal),
        refuses(INVALID, "antiquantOffset", cache=I8, antiquantOffset=lambda old: fractal(drawn(2, d=H)(old))),
        refuses(INVALID, "quantScale2", **narrow(quantScale2=lambda old: fractal(scale(1)(old)))),
        refuses(INVALID, "kvPaddingSize", actualSeqLengths=[4, 5], kvPaddingSize=lambda old: fractal(ints(1)(old))),
    ],
    "query, key, value, attentionOut and inputLayout are not null.": [
        *(refuses(NULL, name, **{name: None}) for name in ("query", "key", "value", "attentionOut", "inputLayout")),
    ],
    **RUN_TIME,
    "An empty tensor stands for no tensor.": [
        *(computes(**{name: zeros(0, d=DTYPES.get(name, F32))}) for name in OPTIONAL),
        computes(kvPaddingSize=zeros(d=I64)),
        computes(kvPaddingSize=zeros(0, d=I64), actualSeqLengths=[4, 9]),
        computes(kvPaddingSize=zeros(d=I64), actualSeqLengths=[4, 9]),
        computes(kvPaddingSize=zeros(0, d=I64), page=16),
    ],
    # ------------------------------------------------------------------------------------------ bias, mask, lengths
    "pseShift has the dtype of query.": [
        computes(pseShift=drawn(2, 4, 1, 9, d=H)),
        computes(dtype=BF, pseShift=drawn(2, 4, 1, 9, d=BF)),
        refuses(INVALID, "pseShift", pseShift=drawn(2, 4, 1, 9, d=BF)),
        refuses(INVALID, "pseShift", pseShift=drawn(2, 4, 1, 9, d=F32)),
        refuses(INVALID, "pseShift", dtype=BF, pseShift=drawn(2, 4, 1, 9, d=H)),
    ],
    "pseShift is (B, N, 1, S) or (1, N, 1, S).": [
        *(computes(layout=x, pseShift=drawn(b, 4, 1, 9, d=H)) for x in LAYOUTS for b in (1, 2)),
        *(
            forbids("pseShift", pseShift=drawn(*shape, d=H))
            for shape in ((2, 1, 1, 9), (2, 2, 1, 9), (3, 4, 1, 9), (4, 1, 9), (2, 4, 9), (9,), (2, 4, 1, 8))
        ),
    ],
    "attenMask is BOOL, INT8 or UINT8, of (B, S), (B, 1, S) or (B, 1, 1, S); 1 hides a token.": [
        *(masked(*shape, d=d) for shape in MASKS for d in (BOOL, I8, U8)),
        *(refuses(INVALID, "attenMask", attenMask=zeros(2, 9, d=d)) for d in (H, F32, I32)),
    ],
    "attenMask has no other shape.": [
        *(
            forbids("attenMask", attenMask=zeros(*shape, d=BOOL))
            for shape in ((1, 9), (3, 9), (2, 4, 1, 9), (2, 2, 9), (9,), (2, 8), (2, 1, 8), (2, 1, 1, 8))
        ),
    ],
    "actualSeqLengths says how many tokens of S count, per item.": [
        computes(actualSeqLengths=[1, 9]),
        computes(actualSeqLengths=[3]),
        computes(actualSeqLengths=[0, 9]),
        computes(actualSeqLengths=[5, 2], attenMask=zeros(2, 9, d=BOOL), pseShift=drawn(1, 4, 1, 9, d=H)),
        *(forbids("actualSeqLengths", actualSeqLengths=n) for n in ([10, 9], [9, 10], [-1, 9], [10])),
        forbids("actualSeqLengths", B=3, actualSeqLengths=[9, 9]),
    ],
    # --------------------------------------------------------------------------------------------------------- sizes
    "S of query is 1.": [*(forbids("query", layout=x, Sq=2) for x in LAYOUTS)],
    "B is at most 65536, N 256, D 512.": [
        computes(B=65536, N=1, N2=1, S=1),
        forbids("query", B=65537, N=1, N2=1, S=1),
        computes(B=1, N=256, N2=4, S=2),
        forbids("query numHeads", B=1, N=257, N2=257, S=2),
        computes(D=512),
        forbids("query", D=513),
        forbids("query", D=528),
        *(computes(layout=x, B=1, N=256, N2=256, S=1, D=32) for x in LAYOUTS),
    ],
    "numHeads is N of query, a multiple of numKeyValueHeads, at most 64 times as many.": [
        *(forbids("numHeads query", numHeads=n) for n in (2, 3, 8, 0, -4)),
        *(forbids("numKeyValueHeads key", numKeyValueHeads=n) for n in (3, 8, 1, -1)),
        computes(N=64, N2=1),
        forbids("numKeyValueHeads", N=65, N2=1),
        forbids("numKeyValueHeads", N=130, N2=2),
        computes(N=6, N2=3),
    ],
    "numKeyValueHeads 0 stands for numHeads.": [
        computes(N2=4, numKeyValueHeads=0),
        forbids("key numKeyValueHeads", N2=2, numKeyValueHeads=0),
    ],
    "Tensors of key and value have one shape, with N, D and B that fit query.": [
        forbids("value", value=lambda old: [old[0][:, :, :8].contiguous()]),
        forbids("value", value=lambda old: [old[0][..., :8].contiguous()]),
        forbids("value", value=lambda old: old * 2),
        *(
            forbids("key", key=lambda old, s=s: [torch.zeros(s).half()], value=lambda old, s=s: [torch.zeros(s).half()])
            for s in ((2, 1, 9, 16), (3, 2, 9, 16), (2, 2, 9, 8), (2, 9, 32))
        ),
    ],
    "Keys and values may be lists of B tensors of batch 1, at most 256, that differ in S alone.": [
        *(computes(layout=x, listed=(3, 9)) for x in LAYOUTS),
        computes(listed=(3, 9), actualSeqLengths=[2, 8]),
        computes(listed=(3, 9), attenMask=zeros(2, 9, d=BOOL)),
        computes(B=256, N=1, N2=1, listed=(2,) * 256),
        forbids("key", B=257, N=1, N2=1, listed=(2,) * 257),
        forbids("key", B=3, listed=(3, 9)),
        *(
            forbids("key value", listed=(3, 9), key=change, value=change)
            for change in (
                lambda old: [old[0], old[1][..., :8].contiguous()],
                lambda old: [old[0], old[1][:, :1].contiguous()],
                lambda old: [old[0].repeat(2, 1, 1, 1), old[1].repeat(2, 1, 1, 1)],
            )
        ),
    ],
    # --------------------------------------------------------------------------------------------------------- cache
    "antiquantScale is (2), (2, H), (2, N, D) or (2, N, 1, D) of key heads, in the dtype of query.": [
        *(computes(dtype=d, cache=I8, antiquantScale=drawn(*shape, d=d)) for shape in CHANNELS for d in (H, BF)),
        *(computes(layout=x, cache=I8, antiquantScale=drawn(2, 32, d=H)) for x in LAYOUTS),
        forbids("antiquantScale", cache=I8, antiquantScale=None),
        *(
            forbids("antiquantScale", cache=I8, antiquantScale=drawn(*shape, d=H))
            for shape in ((1,), (2, 16), (32,), (2, 64), (2, 4, 16), (2, 2, 16, 1))
        ),
        forbids("antiquantScale", cache=I8, antiquantScale=to(BF)),
        forbids("antiquantScale", cache=I8, antiquantScale=to(F32)),
        forbids("antiquantScale", antiquantScale=drawn(2, d=H)),
    ],
    "antiquantOffset goes with antiquantScale, in its shape and dtype, and is added before scaling.": [
        *(
            computes(dtype=d, cache=I8, antiquantScale=drawn(*shape, d=d), antiquantOffset=drawn(*shape, d=d))
            for shape in CHANNELS
            for d in (H, BF)
        ),
        forbids("antiquantOffset", cache=I8, antiquantOffset=drawn(2, 32, d=H)),
        forbids("antiquantOffset", cache=I8, antiquantOffset=drawn(2, d=BF)),
        forbids("antiquantOffset", antiquantOffset=drawn(2, d=H)),
    ],
    "dequantScale1, quantScale1 and dequantScale2 stay null: they belong to an INT8 query.": [
        *(
            forbids(name, **{name: zeros(1, d=d)})
            for name in ("dequantScale1", "dequantScale2", "quantScale1")
            for d in ((F32, BF) if name == "quantScale1" else (F32, torch.uint64))
        ),
        *(forbids(name, **narrow(**{name: zeros(1)})) for name in ("dequantScale1", "dequantScale2", "quantScale1")),
        *(forbids(name, **{name: zeros(1, d=H)}) for name in ("dequantScale1", "dequantScale2", "quantScale1")),
    ],
    # ------------------------------------------------------------------------------------------------------ int8 output
    "INT8 output needs quantScale2: one number, or N * D of them in any of the shapes of the layouts.": [
        *(computes(**narrow(quantScale2=scale(*shape))) for shape in OUT_CHANNELS),
        *(computes(**narrow(x, quantScale2=scale(64))) for x in LAYOUTS),
        computes(**narrow(quantScale2=scale(4, 16), B=1, N=4)),
        forbids("quantScale2", **narrow(quantScale2=None)),
        forbids("quantScale2", **narrow(quantScale2=zeros(0))),
        *(forbids("quantScale2", **narrow(quantScale2=scale(*shape))) for shape in ((2,), (16,), (63,), (128,))),
        forbids("quantScale2", quantScale2=scale(1)),
    ],
    "N of quantScale2's N * D: numKeyValueHeads by the table, H of the output by the constraints: H (ruling 16).": [
        forbids("quantScale2", **narrow(quantScale2=scale(32))),
        computes(**narrow(quantScale2=scale(64))),
    ],
    "quantScale2 is FLOAT32, beside a BFLOAT16 query also BFLOAT16.": [
        *(computes(**narrow(dtype=BF, quantScale2=scale(*shape, d=BF))) for shape in ((1,), (64,))),
        computes(**narrow(dtype=BF, quantScale2=scale(64))),
        forbids("quantScale2", **narrow(quantScale2=scale(1, d=BF))),
        forbids("quantScale2", **narrow(quantScale2=scale(1, d=H))),
        forbids("quantScale2", **narrow(quantScale2=scale(1, d=F64))),
    ],
    "quantOffset2 is optional, in the shape and dtype of quantScale2.": [
        *(computes(**narrow(quantScale2=scale(*shape), quantOffset2=drawn(*shape))) for shape in OUT_CHANNELS),
        computes(**narrow(dtype=BF, quantScale2=scale(64, d=BF), quantOffset2=drawn(64, d=BF))),
        computes(**narrow(quantScale2=scale(1), quantOffset2=lambda old: torch.tensor([-200.0]))),
        forbids("quantOffset2", **narrow(quantOffset2=drawn(64))),
        forbids("quantOffset2", **narrow(dtype=BF, quantOffset2=drawn(1, d=BF))),
        forbids("quantOffset2 quantScale2", quantOffset2=drawn(1)),
    ],
    # --------------------------------------------------------------------------------------------------------- pages
    "With blocktable, keys and values lie in blocks: (blocknum, blocksize, H), beside BNSD also by heads.": [
        *(computes(page=16, dtype=d, **form) for form in PAGES for d in (H, BF)),
        *(computes(page=32, cache=I8, **form) for form in PAGES),
        *(forbids("key", page=16, layout=x, pages="BNSD") for x in ("BSH", "BSND")),
        forbids("value", page=16, value=lambda old: [old[0][:3].contiguous()]),
    ],
    "blockSize is not 0, at most 512, a multiple of 16, of 32 for INT8.": [
        *(computes(page=n) for n in (16, 48, 128, 512)),
        *(computes(page=n, cache=I8) for n in (64, 512)),
        *(forbids("blockSize", page=n) for n in (8, 24, 100, 528)),
        *(forbids("blockSize", page=n, cache=I8) for n in (16, 48)),
        forbids("blockSize", page=16, blockSize=0),
        forbids("blockSize key", page=16, blockSize=32),
    ],
    "Without blocktable blockSize has no effect.": [*(computes(blockSize=n) for n in (1, 16, 24, 1024))],
    "blocktable needs actualSeqLengths.": [
        forbids("actualSeqLengths", page=16, actualSeqLengths=None),
        forbids("actualSeqLengths", page=16, actualSeqLengths=[]),
    ],
    "blocktable is INT32 and 2-D, a row per item, with columns for the longest of them.": [
        forbids("blocktable", page=16, blocktable=lambda old: old[0]),
        forbids("blocktable", page=16, blocktable=lambda old: old[None]),
        forbids("blocktable", page=16, blocktable=lambda old: old[:1]),
        forbids("blocktable", page=16, blocktable=lambda old: torch.cat([old, old])),
        forbids("blocktable", page=16, blocktable=lambda old: old[:, :1].contiguous()),
        *(forbids("blocktable", page=16, blocktable=to(d)) for d in (F32, I16)),
        computes(page=16, tokens=(3, 3), blocktable=lambda old: torch.cat([old, old], 1)),
    ],
    "blocktable names blocks that exist.": [
        forbids("blocktable", page=16, blocktable=lambda old: old + 1),
        forbids("blocktable", page=16, blocktable=lambda old: torch.full_like(old, -1)),
    ],
    "blocknum is at least the number of blocks that all items fill.": [
        forbids(
            "key",
            page=16,
            key=lambda old: [old[0][:3].contiguous()],
            value=lambda old: [old[0][:3].contiguous()],
            blocktable=torch.zeros_like,
        ),
    ],
    "Beside blocktable, attenMask and pseShift have a column for every token of its columns.": [
        computes(page=16, attenMask=zeros(2, 32, d=BOOL)),
        computes(page=16, pseShift=drawn(2, 4, 1, 32, d=H)),
        forbids("attenMask", page=16, tokens=(3, 18), attenMask=zeros(2, 31, d=BOOL)),
        forbids("pseShift", page=16, tokens=(3, 18), pseShift=zeros(2, 4, 1, 31, d=H)),
    ],
    "Blocks (blocknum, blocksize, H) have numKvHeads * D of at most 64K; by heads they may be wider.": [
        forbids("key", page=16, B=1, N=256, N2=256, D=512, tokens=(16,)),
        computes(page=16, B=1, N=256, N2=256, D=512, tokens=(16,), pages="BNSD"),
    ],
    # -------------------------------------------------------------------------------------------- other statements
    "Tensors are contiguous.": [
        *(forbids(name, **{name: gapped}) for name in ("query", "attentionOut")),
        *(forbids(f"{name} query", **{name: gapped}) for name in ("key", "value")),
        forbids("attenMask", attenMask=lambda old: torch.zeros(2, 18, dtype=BOOL)[:, ::2]),
        forbids("pseShift", pseShift=lambda old: torch.zeros(2, 4, 1, 18, dtype=H)[..., ::2]),
        forbids("blocktable", page=16, blocktable=gapped),
        *(forbids(name, cache=I8, **scales(name)) for name in ("antiquantScale", "antiquantOffset")),
        *(forbids(name, **narrow(quantScale2=scale(64)) | scales(name)) for name in ("quantScale2", "quantOffset2")),
    ],
    "kvPaddingSize, INT64, is how many slots behind every item stay unused.": [
        *(computes(layout=x, actualSeqLengths=[3, 6], kvPaddingSize=ints(2)) for x in LAYOUTS),
        computes(actualSeqLengths=[4, 9], kvPaddingSize=ints(0)),
        computes(actualSeqLengths=[4, 9], kvPaddingSize=ints(1)),
        computes(actualSeqLengths=[4, 9], kvPaddingSize=ints(-3)),
        computes(
            actualSeqLengths=[3, 6],
            kvPaddingSize=ints(2),
            attenMask=lambda old: (torch.arange(9) % 2 == 0).expand(2, 9).contiguous(),
            pseShift=drawn(2, 4, 1, 9, d=H),
        ),
        forbids("kvPaddingSize", actualSeqLengths=[3, 6], kvPaddingSize=zeros(1)),
        forbids("kvPaddingSize", actualSeqLengths=[3, 6], kvPaddingSize=ints(1, 1)),
    ],
    "kvPaddingSize INT32 is taken too (ruling 28).": [
        computes(actualSeqLengths=[3, 6], kvPaddingSize=ints(2, d=I32)),
    ],
    "innerPrecise is 0 or 1.": [
        computes(innerPrecise=0),
        computes(innerPrecise=1),
        *(forbids("innerPrecise", innerPrecise=n) for n in (2, -1)),
    ],
    "attentionOut = Softmax(scaleValue Q K^T) V, for long items and many heads.": [
        *(computes(B=1, S=500, N=16, N2=4, D=128, scaleValue=128**-0.5, dtype=d) for d in (H, BF)),
        computes(B=3, page=128, tokens=(300, 1, 129), N=8, N2=2, D=64, dtype=BF),
        computes(B=2, page=128, tokens=(300, 129), N=8, N2=2, D=64, cache=I8, pages="BNSD"),
        *(computes(scaleValue=s) for s in (0.0, 1.0, -0.5, 3.0)),
        repeats(B=3, S=700, N=8, N2=2),
    ],
}

PAGE = Page("aclnnIncreFlashAttentionV4", PROTOTYPE, base, formula, CLAUSES)
