"""Draws calls of attention() and computes them completely and in chunks of their sequences."""

import itertools
import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fusion_attention.contract import bind
from fusion_attention.distributed.chunk_attention import Chunks, FullCall, Keys, Rows, Saved
from fusion_attention.ir.mask import Band
from fusion_attention.ir.problem import CHUNK_UNIT
from fusion_attention.judging.chi_square_limits import Expected
from fusion_attention.ops.training import api_definition
from fusion_attention.ops.training.lowered_call import EXTRAS, DenseCall, owns_bias
from fusion_attention.ops.training.statistics import to_lanes
from fusion_attention.testing.expected import dense
from fusion_attention.testing.run_case import attention, attention_backward

Tensor = torch.Tensor
SEED = 0x123456789ABCDEF
GRADIENTS = ("dq", "dk", "dv", "dq_rope", "dk_rope", "dbias", "dsink")
LENGTHS = (1, 7, CHUNK_UNIT - 1, CHUNK_UNIT, CHUNK_UNIT + 1, 3 * CHUNK_UNIT, 200, 333, 517)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Call:
    """The arguments of attention() in layout "BSND" or "TND"."""

    args: dict[str, Any]
    dout: Tensor
    seed: int = SEED

    @property
    def packed(self) -> bool:
        return self.args["layout"] == "TND"

    def lowered(self, in_float64: bool = False) -> DenseCall:
        """Returns the complete call, optionally in float64."""
        args = self.args
        if in_float64:
            inputs64 = {n: a.double() for n, a in args.items() if isinstance(a, Tensor) and a.is_floating_point()}
            args = args | inputs64
        # Without a call cache, so that no plan of another variant is reused.
        return replace(api_definition.dense_call(bind(api_definition.RECORD, args), seed=self.seed))

    def saved(self, of: dict[str, Tensor]) -> Saved:
        """Returns the saved results for a backward of all rows."""
        return Saved(*(self.tokens(t) for t in (self.dout, of["out"], of["max"], of["sum"])))

    def tokens(self, t: Tensor) -> Tensor:
        """Returns a view [batch, tokens, heads, ...], the layout of chunks."""
        if self.packed:
            return t[None]
        return t.transpose(1, 2) if t.dim() == 3 else t

    def full(self) -> FullCall:
        call = self.lowered()
        given = dict(zip(EXTRAS, call.extras, strict=True))
        slopes, heads = given["slopes"], call.problem.heads_q
        if slopes is not None:
            slopes = slopes.reshape(-1, heads).expand(len(call.extents), heads)
        sink = given["sink"]
        return FullCall(call.problem, call.extents, heads, 0, slopes, sink, self.seed, call.offset, owns_bias(call))

    def rows(self, chunks: Chunks) -> Rows:
        q_rope = self.args.get("q_rope")
        return Rows(
            chunks,
            self.tokens(self.args["q"]),
            None if q_rope is None else self.tokens(q_rope),
            self.args.get("bias"),
            self.args.get("blocked"),
        )

    def keys(self, chunks: Chunks) -> Keys:
        given = (None if t is None else self.tokens(t) for t in (self.args.get(n) for n in ("k", "v", "k_rope")))
        return Keys(chunks, *given)  # type: ignore[arg-type]

    def chunks(self, side: str, cuts: Any = None) -> Chunks:
        """Returns chunks of the sequences of rows ("q") or keys ("kv"), split at cuts(length)."""
        e = self.lowered().extents
        lengths = e.q_len if side == "q" else e.kv_len
        chunks = []
        for b, (length, start) in enumerate(zip(lengths, e.q_start if side == "q" else e.kv_start, strict=True)):
            edges = [0, *([] if cuts is None else cuts(int(length))), int(length)]
            for first, end in itertools.pairwise(edges):
                chunks.append((b, first, end - first, 0 if self.packed else b, first + start * self.packed))
        return Chunks(*np.array(chunks, np.int64).T)


def each(chunks: Chunks) -> list[Chunks]:
    """Returns each chunk separately."""
    return [subset(chunks, np.array([i])) for i in range(len(chunks))]


def subset(chunks: Chunks, chosen: np.ndarray) -> Chunks:
    return Chunks(*(getattr(chunks, name)[chosen] for name in ("seq", "first", "count", "batch", "start")))


def place(chunks: Chunks) -> tuple[int, slice]:
    """Returns the indices of one chunk in tensors [batch, tokens, ...]."""
    return int(chunks.batch[0]), slice(int(chunks.start[0]), int(chunks.start[0] + chunks.count[0]))


def run(call: Call, backend: str = "auto") -> dict[str, Tensor]:
    """Computes results and gradients of the complete call in one chunk."""
    golden = backend == "golden"
    lowered = call.lowered(golden)
    out, max_, sum_ = attention(lowered, backend)
    dout = call.dout.double() if golden else call.dout
    gradients = attention_backward(lowered, dout, out, (max_, sum_), dbias=True, backend=backend)
    results = {"out": out, "max": max_, "sum": sum_, **dict(zip(GRADIENTS, gradients, strict=True))}
    return {name: t for name, t in results.items() if t.numel()}


def expected(call: Call) -> dict[str, Expected]:
    """Returns the expected results of run() and lse: golden values with the expected errors of a correct program."""
    golden, lowered = run(call, "golden"), call.lowered()
    if "max" not in golden:  # no rows: gradients of keys are exactly 0
        return {name: Expected(t, torch.zeros_like(t)) for name, t in golden.items()}
    lse = golden["max"] + golden["sum"].log()
    lanes = dict(zip(("max", "sum"), to_lanes(lowered, golden["max"], golden["sum"]), strict=True))
    given = {"dpse" if name == "dbias" else name: t for name, t in golden.items()}
    result = dense(lowered, given | lanes | {"lse": lse}, call.dout)
    result |= {name: Expected(golden[name], result[name].size[..., 0]) for name in lanes}
    return {"dbias" if name == "dpse" else name: e for name, e in result.items()}


def draw(seed: int) -> Call:
    """Draws a call with random features, dtype, band and lengths."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    dtype = rng.choice(DTYPES)

    def rows(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    heads_kv, count = rng.choice([1, 2]), rng.choice([1, 2])
    heads, dim, dim_v = heads_kv * rng.choice([1, 3]), rng.choice([16, 33, 64]), rng.choice([16, 40])
    q_len = [rng.choice(LENGTHS) for _ in range(count)]
    kv_len = q_len if rng.random() < 0.5 else [rng.choice(LENGTHS) for _ in range(count)]
    packed = rng.random() < 0.5
    lead = (lambda n: (sum(n),)) if packed else (lambda n: (count, max(n)))
    args: dict[str, Any] = {"layout": "TND" if packed else "BSND", "q_len": q_len, "kv_len": kv_len}
    args |= {"q": rows(*lead(q_len), heads, dim), "k": rows(*lead(kv_len), heads_kv, dim)}
    args |= {"v": rows(*lead(kv_len), heads_kv, dim_v)}
    args["band"] = rng.choice(
        [None, Band.causal(), Band.window(70), Band.window(150, 33, "start"), Band.prefix_causal([40] * count)]
    )
    if rng.random() < 0.3:
        args |= {"q_rope": rows(*lead(q_len), heads, 16), "k_rope": rows(*lead(kv_len), heads_kv, 16)}
    if rng.random() < 0.3:
        args["sink"] = torch.randn(heads, generator=generator)
    if rng.random() < 0.3:
        args["softcap"] = 3.0
    if rng.random() < 0.4:
        args["keep_prob"] = 0.7
    args["empty_rows"] = rng.choice(["zero", "mean"])
    if packed or rng.random() < 0.3:
        args["alibi_slopes"] = torch.rand(heads, generator=generator) if rng.random() < 0.5 else None
    elif rng.random() < 0.6:
        axes = [n if rng.random() < 0.6 else 1 for n in (count, heads, max(q_len))]
        args["bias"] = rows(*axes, max(kv_len))
        if rng.random() < 0.5:
            args["blocked"] = torch.rand(*axes, max(kv_len), generator=generator) < 0.3
    return Call(args, rows(*lead(q_len), heads, dim_v))
