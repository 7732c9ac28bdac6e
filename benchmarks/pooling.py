"""Times pooling of rows into compressed keys, forward and backward, beside memory reads and torch's operators."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.backward_only import gradient
from benchmarks.decode import READ_BYTES, reader
from benchmarks.dense import DTYPES
from fusion_attention.api.compress import compress
from fusion_attention.bench.pair import Pair
from fusion_attention.contract import bind
from fusion_attention.ops.compressed.pooling import RECORD, PoolingBackward
from fusion_attention.ops.shared.softmax_pooling import Windows, pooled
from fusion_attention.torch_ops.eager import run

GROUP, DIM = "pooling, GB/s", 512
# Name: (rows of a window, overlap), as in DeepSeek-V4's layers.
LAYERS = {"4 rows, overlap": (4, True), "128 rows": (128, False)}
DEFAULTS = {"layout": "BSND", "before": False}
FORWARD, BACKWARD = 0.5, 0.4  # goals in bfloat16, as fractions of the rate of reading memory


def keys(quick: bool) -> Iterator[Pair]:
    """Times pooling of a whole sequence; rates count the rows that a call reads and those that its backward writes."""
    count = 4096 if quick else 16384
    for label, dtype in DTYPES.items():
        for layer, (ratio, overlap) in LAYERS.items():
            torch.manual_seed(0)
            channels = DIM * (1 + overlap)
            rows, gates = (torch.randn(1, count, 1, channels).to(dtype) for _ in range(2))
            bias = torch.randn(ratio, channels)
            dout = torch.randn(1, count // ratio, 1, DIM).to(dtype)
            windows = Windows(ratio, overlap)
            words: Any = {"ratio": ratio, "position_bias": bias, "overlap": overlap}
            assert RECORD.lower is not None
            backward = PoolingBackward(
                RECORD.lower(bind(RECORD, {"kv": rows, "gate": gates, **words, **DEFAULTS})), dout
            )
            read = 2 * rows.numel() * rows.element_size()
            name, memory = f"{label}, {layer}", reader(True)
            goals = (FORWARD, BACKWARD) if label == "bf16" else (0.0, 0.0)
            ours = partial(compress, rows, gates, **words), partial(run, backward)
            leaves = tuple(t.clone().requires_grad_() for t in (rows, gates, bias))
            torch_way = partial(pooled, rows, gates, bias, windows), gradient(partial(pooled, *leaves, windows), leaves)
            for i, way in enumerate(("forward", "backward")):
                case, moved = f"{way}, {name}", read * (1 + i)
                yield Pair(GROUP, case, "reading memory", ours[i], memory, moved, peer_flops=READ_BYTES, goal=goals[i])
                yield Pair(GROUP, case, "torch's operators", ours[i], torch_way[i], moved)
