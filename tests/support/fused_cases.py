"""Defines the test cases of fused inference attention, in a group for each feature."""

from support.fused import FusedCase

PADDED = ("BSH", "BSND", "BNSD", "BNSD_BSND", "BSH_BNSD", "BSND_BNSD", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD")
PACKED = ("TND", "NTD", "NTD_TND", "TND_NTD")
PAGES = ("rows", "heads", "pieces")
LAYOUTS = [
    *(FusedCase(layout=layout, mode=mode) for layout in PADDED for mode in (0, 3)),
    *(FusedCase(layout=layout, rest=rest) for layout in PACKED for rest in (0, 2)),
    FusedCase(layout="NSD", q_len=(4,), kv_len=(7,), rest=1),
    *(FusedCase(dtype=dtype, layout="TND", mode=3) for dtype in ("bfloat16", "float32")),
    *(FusedCase(dim=d, dim_v=v, layout="BNSD", dtype="bfloat16") for d, v in ((192, 128), (24, 8), (128, 128))),
    *(FusedCase(heads_q=n, heads_kv=1, q_len=(1, 2), dtype="float32") for n in (1, 3, 65)),
]
LENGTHS = [
    FusedCase(q_len=(0, 3, 0), kv_len=(4, 0, 0)),
    FusedCase(layout="TND", q_len=(0, 3, 0, 5), kv_len=(4, 0, 0, 9), mode=3),
    FusedCase(layout="TND", q_len=(4, 1), kv_len=(2, 9), mode=3),  # more rows than keys
    FusedCase(rows=8, slots=12, mode=3),
    FusedCase(kv_len=(0, 0), out="tensor", offsets=True),
    FusedCase(kv_len=(0, 0), store="rows"),
    FusedCase(layout="TND", q_len=(0, 0), kv_len=(3, 0)),
    FusedCase(layout="BNSD", q_len=(70, 3), kv_len=(90, 1030), mode=3, dim=64, dim_v=64, dtype="bfloat16"),
]
MODES = [
    *(FusedCase(mode=m, q_len=(6, 2), kv_len=(4, 9), dtype="float32") for m in (2, 3)),
    *(FusedCase(mode=4, pre=p, next=n, q_len=(6, 2), kv_len=(4, 9)) for p, n in ((1, 0), (2, -1), (-1, 3), (0, 2))),
    *(FusedCase(mask=True, mode=m, pre=2, next=1, dtype="float32") for m in (0, 1)),
    *(FusedCase(mask=True, blank=True, precise=p, next=1) for p in (0, 2)),
    FusedCase(mask=True, blank=True, store="rows", dtype="bfloat16"),
    FusedCase(mode=9, q_len=(3, 3), kv_len=(9, 3), rope=8),
    FusedCase(mode=9, layout="TND", q_len=(3, 1, 4), kv_len=(9, 1, 7), rope=8, store="heads"),
    *(FusedCase(q_len=(1, 1), mode=m, pre=1, next=0) for m in (0, 2, 3, 4)),
    *(FusedCase(q_len=(1, 1), layout="TND", mode=m, pre=2, next=0, store="rows") for m in (3, 4)),
    FusedCase(q_len=(1, 1), mask=True, store="heads", layout="BNSD"),
    *(FusedCase(pse=kind, dtype=d) for kind, d in (("batch", "float16"), ("shared", "float32"), ("row", "bfloat16"))),
    FusedCase(pse="batch", mask=True, mode=1, prefix=3),
    *(FusedCase(sink=True, layout=layout, mode=3, q_len=(6, 2), kv_len=(4, 9)) for layout in ("TND", "BSND")),
    FusedCase(sink=True, blank=True, mask=True, dtype="float32"),
]
CACHES = [
    *(FusedCase(layout=x, store=s, mode=3) for x in ("BSH", "BSND", "BNSD", "TND", "NTD") for s in PAGES),
    *(FusedCase(layout=x, store="list", mode=3) for x in ("BSH", "BSND", "BNSD")),
    *(FusedCase(left=left, rows=7, slots=12, mode=3, layout=x) for left, x in (((1, 2), "BSND"), ((0, 0), "BNSD"))),
    FusedCase(left=(2, 1), rows=7, slots=12, mask=True, pse="batch", pre=0, next=0),
    FusedCase(left=(3, 5), rows=7, slots=12),  # item 1 does not fit
    *(FusedCase(prefix=5, mode=m, pre=2, next=1, mask=m < 2, layout="BNSD") for m in range(5)),
    FusedCase(prefix=4, q_len=(1, 1), kv_len=(0, 6), layout="BSH"),
    FusedCase(prefix=4, store="list", mode=3),
    FusedCase(prefix=300, q_len=(1,) * 3, kv_len=(700, 1, 90), dim=64, dim_v=64, dtype="bfloat16"),
    FusedCase(rope=8, mode=3),
    FusedCase(rope=64, dim=128, dim_v=128, layout="TND", heads_kv=4, mode=3, dtype="bfloat16"),
    *(
        FusedCase(rope=16, dim=64, dim_v=64, layout=x, heads_q=8, heads_kv=1, store=s, mode=m, shares=shares, q_len=q)
        for x, s, m, shares, q in (
            ("TND_NTD", "heads", 3, True, (3, 1)),
            ("BSND_NBSD", "pieces", 0, True, (1, 1)),
            ("BNSD_NBSD", "heads", 0, False, (1, 1)),
            ("BSND", "pieces", 3, True, (2, 2)),
        )
    ),
]
INTEGERS = [
    *(FusedCase(keys=k, values=k, offsets=o, mode=3) for k in ("tensor", "channel", "token") for o in (False, True)),
    *(FusedCase(keys=k, values=k, joint=True, offsets=True) for k in ("tensor", "channel", "token")),
    *(FusedCase(keys=k, values=k, q_len=(1, 1), layout="BNSD") for k in ("head", "token_head")),
    *(FusedCase(keys="channel", values="token", bits=b, dim=32, dim_v=32, q_len=(1, 1)) for b in (4, 8)),
    *(FusedCase(keys=k, values=k, bits=4, layout="BSH", q_len=(1, 1)) for k in ("channel", "token", "token_head")),
    *(FusedCase(keys=k, values=k, store=s, q_len=(1, 1)) for k in ("pages", "pages_head") for s in ("rows", "heads")),
    FusedCase(keys="token", values="token", store="rows", layout="BSH", offsets=True, dtype="bfloat16"),
    *(
        FusedCase(keys=k, values=k, store="pieces", layout=x, dim=64, dim_v=64, dtype="bfloat16", q_len=q, mode=m)
        for k, x, q, m in (
            ("channel", "BSND", (1, 1), 0),
            ("token", "BNSD", (4, 4), 3),
            ("channel", "TND", (4, 1), 3),
            ("token", "BSH", (1, 1), 0),
        )
    ),
    FusedCase(keys="channel", values="channel", prefix=3, offsets=True),
    FusedCase(keys="channel", values="channel", mask=True, blank=True, store="rows", out="channel", offsets=True),
    *(
        FusedCase(full=True, layout=x, dim=32, dim_v=32, mask=mask, pse=pse, blank=mask, mode=m)
        for x, mask, pse, m in (("BSH", False, "", 3), ("BNSD", True, "batch", 0), ("BNSD_BSND", False, "", 2))
    ),
    FusedCase(full=True, dim=64, dim_v=64, q_len=(130, 4), kv_len=(1100, 3), mode=3, layout="BNSD"),
    *(FusedCase(full=True, dim=32, dim_v=32, out=kind, offsets=True) for kind in ("tensor", "channel")),
    *(FusedCase(full=True, dim=32, dim_v=32, factor=factor) for factor in (3.0, 200.0)),
    *(
        FusedCase(latent=True, rope=16, dim=64, dim_v=64, heads_q=8, heads_kv=1, dtype="bfloat16", layout=x, store=s,
                  shares=True, q_len=q, mode=m)
        for x, s, q, m in (
            ("BSND", "pieces", (1, 1), 0),
            ("TND", "pieces", (3, 2), 3),
            ("BNSD_NBSD", "pieces", (2, 2), 3),
            ("BSH", "stack", (2, 2), 0),
        )
    ),
    *(FusedCase(out=kind, offsets=o, layout=x) for kind in ("tensor", "channel") for o, x in ((0, "BSH"), (1, "BNSD"))),
    FusedCase(out="channel", offsets=True, dim=24, dim_v=8, layout="TND_NTD", rest=1),
]  # fmt: skip
# Calls of PromptFlashAttention, which returns no log-sum-exp.
PROMPTS = [FusedCase(layout="SH", q_len=(3, 0, 4), kv_len=(3, 0, 4), dtype=dtype) for dtype in ("float16", "float32")]
# Decode calls with the options of IncreFlashAttention.
DECODES = [
    *(FusedCase(q_len=(1, 1), layout=x, store=s) for x, s in zip(PADDED[:3], ("stack", "list", "heads"), strict=True)),
    FusedCase(q_len=(1, 1), mask=True, blank=True, pse="batch"),
    FusedCase(q_len=(1, 1), left=(0, 2), slots=12),
    *(FusedCase(q_len=(1, 1), keys=k, values=k, joint=True, offsets=True) for k in ("tensor", "channel")),
    FusedCase(q_len=(1, 1), out="channel", offsets=True, kv_len=(0, 700), dtype="bfloat16"),
]
CASES = [*LAYOUTS, *LENGTHS, *MODES, *CACHES, *INTEGERS, *DECODES]
