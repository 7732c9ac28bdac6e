"""Defines the test cases of decode: every layout x dtype x store, and a group for each feature."""

from fusion_attention.testing.decode import DecodeCase

LAYOUTS = ("BSH", "BNSD", "BSND")
DTYPES = ("float16", "bfloat16", "float32")
STORES = ("stack", "list", "pages")
CASES = [
    *(DecodeCase(layout=layout, dtype=d) for layout in LAYOUTS for d in DTYPES),
    *(DecodeCase(layout=layout, store=store) for layout in LAYOUTS for store in ("list", "pages")),
    *(DecodeCase(layout="BNSD", store="headed", page_size=s, dtype="bfloat16") for s in (16, 48, 512)),
    *(DecodeCase(heads_q=8, heads_kv=n, dtype="float32", store="pages") for n in (1, 8)),
    DecodeCase(heads_q=64, heads_kv=1, dim=8),
    *(DecodeCase(dim=d, layout="BSND", store="pages", dtype="bfloat16") for d in (1, 33, 64, 128)),
    *(DecodeCase(kv_len=(0, 7, 0, 1), store=store) for store in STORES),
    DecodeCase(kv_len=(0, 24), out="tensor", offsets=True),
    *(
        DecodeCase(layout=layout, integers=kind, offsets=o, store=store)
        for layout, kind, o, store in (
            ("BSH", "tensor", False, "stack"),
            ("BSH", "channel", True, "pages"),
            ("BNSD", "channel", False, "headed"),
            ("BSND", "tensor", True, "list"),
            ("BSND", "channel", True, "stack"),
        )
    ),
    *(DecodeCase(mask=True, store=store, dtype="float32") for store in STORES),
    *(DecodeCase(pse=kind, layout="BNSD", dtype=d) for kind in ("batch", "shared") for d in DTYPES),
    DecodeCase(mask=True, pse="batch", store="pages", integers="channel", offsets=True, dtype="bfloat16"),
    DecodeCase(blank=True),
    DecodeCase(blank=True, store="pages", integers="tensor"),
    DecodeCase(padding=2, layout="BNSD"),
    DecodeCase(padding=0, mask=True, pse="shared", integers="channel"),
    DecodeCase(padding=10, kv_len=(21, 5)),  # item 0 does not fit: empty
    *(
        DecodeCase(out=kind, offsets=o, layout=layout)
        for kind in ("tensor", "channel")
        for o in (False, True)
        for layout in LAYOUTS[:2]
    ),
    DecodeCase(out="channel", integers="channel", store="pages", offsets=True, dtype="bfloat16", blank=True),
    *(DecodeCase(rows=3, store=store, layout="BSND") for store in STORES),
    DecodeCase(rows=4, kv_len=(2, 9), dtype="float32"),  # more rows than tokens
    DecodeCase(kv_len=(1030, 700), slots=1100, dim=64, dtype="bfloat16"),
    DecodeCase(
        kv_len=(1030, 700), store="headed", page_size=128, dim=64, dtype="bfloat16", layout="BNSD", integers="channel"
    ),
]
