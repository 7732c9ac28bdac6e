"""Simulates kernels of attention to a window and compressed keys, and of its indexer, with common mistakes."""

import math
import runpy
import tempfile
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from support.compressed import pooled_by_loops
from support.planted import Capture, Planted
from support.sources import ROOT

import fusion_attention as fa
from fusion_attention.captures.reader import Recording, read

Tensor = torch.Tensor
Results = dict[str, Tensor]
LATE, EARLY, RESIDUAL = "compressed-bound:late", "compressed-bound:early", "compressed-residual"


def closed_keys(rows: int, tokens: int, keys: int, ratio: int, wrong: str) -> Tensor:
    """Returns the number of compressed keys that every row sees; the last row is the last token."""
    if wrong == RESIDUAL:
        tokens = keys * ratio + keys % ratio
    position = torch.arange(tokens - rows, tokens)
    visible = {LATE: position // ratio, EARLY: position // ratio + 1}.get(wrong, (position + 1) // ratio)
    if wrong.startswith("compressed-unmasked") or wrong == "mask-ignored":
        visible = torch.full_like(position, keys)
    return visible.clamp(0, keys)


def attended(args: dict[str, Any], wrong: str = "") -> Results:
    """Computes attention_out, softmax_max and softmax_sum [B, 1, S, N] of complete sequences in float64."""
    q, k, c = (args[name].double() for name in ("query", "key", "key_compressed"))
    rows, ratio = q.shape[1], args["ratio"]
    scale = 1.0 if wrong == "scale-missing" else q.shape[-1] ** -0.5
    row, key, entry = torch.arange(rows)[:, None], torch.arange(rows), torch.arange(c.shape[1])
    first = args["band"].lo + (wrong == "window-off-by-one")
    near = (key <= row) & (key >= row + first) | (wrong == "compressed-unmasked:both")
    closed = closed_keys(rows, rows, c.shape[1], ratio, wrong)[:, None]
    far = (entry < closed).expand(len(q), -1, -1)
    if args.get("sparse_indices") is not None:
        lists = args["sparse_indices"][:, :, 0].long()
        read = (lists >= 0).cumprod(-1).bool() & (torch.arange(lists.shape[-1]) < closed)
        marked = torch.zeros(*lists.shape[:2], c.shape[1] + 1, dtype=torch.bool)
        far = far & marked.scatter_(-1, lists.where(read, c.shape[1]), True)[..., :-1]
    visible = torch.cat((near.expand(len(q), -1, -1), far), -1)[:, None]
    every = torch.cat((k, c), 1)[:, :, 0]
    scores = (scale * torch.einsum("bshd,bjd->bhsj", q, every)).masked_fill(~visible, -math.inf)
    sinks = args["sinks"].double().view(1, -1, 1, 1).expand(len(q), -1, rows, 1)
    with_sink = torch.cat((scores, sinks), -1)
    out = torch.einsum("bhsj,bjd->bshd", with_sink.softmax(-1)[..., :-1], every)
    counted = scores if wrong == "lse-sink" else with_sink
    top = counted.amax(-1)
    total = (counted - top[..., None]).exp().sum(-1)
    results = {"attention_out": out.to(args["query"].dtype)}
    return results | {n: t.mT[:, None].float() for n, t in (("softmax_max", top), ("softmax_sum", total))}


def chosen(args: dict[str, Any], wrong: str = "") -> Results:
    """Computes sparse_indices_out and sparse_values_out of complete sequences."""
    q, k, w = (args[name].double() for name in ("query", "key", "weights"))
    scores = (w[..., None] * torch.einsum("bshd,bjd->bshj", q, k[:, :, 0]).relu()).sum(2)
    rows, count = q.shape[1], args["sparse_count"]
    closed = closed_keys(rows, rows, k.shape[1], args["ratio"], wrong)[:, None]
    scores = scores.masked_fill(torch.arange(k.shape[1]) >= closed, -math.inf)
    scores = torch.nn.functional.pad(scores, (0, max(0, count - k.shape[1])), value=-math.inf)
    values, indices = scores.sort(dim=-1, descending=True, stable=True)
    indices = indices.masked_fill(values == -math.inf, -1)[..., :count]
    dtype = args["query"].dtype
    return {"sparse_indices_out": indices[:, :, None].int(), "sparse_values_out": values[:, :, None, :count].to(dtype)}


def pooled(args: dict[str, Any], wrong: str = "") -> Tensor:
    """Computes the compressed keys of complete sequences in float64, window by window."""
    kv, gate, bias = (args[name].double() for name in ("kv", "gate", "position_bias"))
    if wrong == "position-bias-missing":
        bias = torch.zeros_like(bias)
    if wrong == "compressor-halves":
        kv, gate, bias = (t.roll(t.shape[-1] // 2, -1) for t in (kv, gate, bias))
    first = int(wrong == "compressor-first-window")
    if first:  # a window of zeros before the sequence
        kv = torch.cat((torch.zeros_like(kv[:, : len(bias)]), kv), 1)
        gate = torch.cat((-bias[None, :, None].expand(len(gate), -1, gate.shape[2], -1), gate), 1)
    each = [pooled_by_loops(x, z, bias, args["ratio"], args["overlap"])[first:] for x, z in zip(kv, gate, strict=True)]
    return torch.stack(each).to(args["kv"].dtype)


TOKENS, FAR = 72, 16  # 18 keys of 4 tokens; 4 keys of 16 and 8 more tokens: every mistake changes the visible keys
Captures = dict[str, list[Path]]


def captured(folder: Path) -> Captures:
    """Records a training step of the example in its last stage; returns the files by operator and direction."""
    script = runpy.run_path(str(ROOT / "examples" / "train_v4.py"))
    names = script["model_of"].__globals__
    names["CONTEXT"] = TOKENS
    names["KINDS"] = ({}, names["CHOSEN"], {"ratio": FAR})
    torch.manual_seed(0)
    model, (tokens, _) = script["model_of"](), script["draw"](script["read_text"](), 2, TOKENS, 0)
    for block in model.blocks:
        torch.nn.init.normal_(block.attention.sinks)
    with fa.capture(folder) as recorded:
        logits, index_loss = model(tokens)
        (logits.square().mean() + index_loss).backward()
    files: Captures = {}
    for file in recorded.files:
        files.setdefault(file.stem.partition("-")[2], []).append(file)
    return files


def recording(files: Captures, name: str, number: int = 0) -> Recording:
    return read(files[name][number], torch.device("cpu"))


@cache
def _calls() -> tuple[Recording, ...]:
    """Returns calls of attention to listed compressed keys, of attention to all of them, and of the indexer."""
    with tempfile.TemporaryDirectory() as folder:
        files = captured(Path(folder))
        attention = (recording(files, "compressed_attention", number) for number in (0, 1))
        return (*attention, recording(files, "lightning_indexer"))


def _planted(number: int, wrong: str) -> Planted:
    call, program = _calls()[number], chosen if number == 2 else attended
    inputs = {name: value for name, value in call.args.items() if value is not None}
    return Capture(call.op.name, inputs, program(call.args, wrong)), (wrong.partition(":")[0],), ()


BOTH = ("scale-missing", "window-off-by-one", "lse-sink", LATE)  # for listed and for all compressed keys
ALL = (*BOTH, EARLY, RESIDUAL, "compressed-unmasked", "compressed-unmasked:both")
FAULTS = {
    **{f"listed {wrong}": partial(_planted, 0, wrong) for wrong in BOTH},
    **{wrong: partial(_planted, 1, wrong) for wrong in ALL},
    **{f"indexer {wrong}": partial(_planted, 2, wrong) for wrong in (LATE, EARLY, RESIDUAL, "mask-ignored")},
}


def planted(fault: str, seed: int) -> Planted:
    """Returns a call of the example with wrong results."""
    return FAULTS[fault]()


def right(seed: int) -> Capture:
    return _planted(seed % 3, "")[0]
