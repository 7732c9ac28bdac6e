"""Simulates kernels of inference, of the indexer and of its loss with common mistakes, like planted.py."""

import math
from collections.abc import Iterator
from functools import partial

import torch
from support.planted import Capture
from support.planted_cases import Make

Tensor = torch.Tensor
LENGTHS, PAGE, HEADS, HEADS_KV, DIM, SCALE = (53, 90, 17), 16, 4, 2, 32, 0.2


def softmax_rows(q: Tensor, k: Tensor, v: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns (out [N, R, D], log-sum-exp [N, R, 1]) over all keys of k [N, S, D]."""
    scores = q @ k.mT * scale
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    carried = weights.to(dtype).float() if dtype == torch.bfloat16 else weights
    return carried @ v / total, top + total.log()


def paged(wrong: str, dtype: torch.dtype, operator: str, seed: int) -> Capture:
    """Makes a decode of three sequences over pages, with log-sum-exp if the operator returns it."""
    torch.manual_seed(seed)
    pages = [-(-n // PAGE) for n in LENGTHS]
    blocks = 3 * max(pages) + 1
    pool_k, pool_v = (torch.randn(blocks, PAGE, HEADS_KV * DIM).to(dtype) for _ in range(2))
    table = torch.randperm(blocks - 1)[: 3 * max(pages)].view(3, -1).int()
    q = torch.randn(3, HEADS, 1, DIM).to(dtype)
    fused = "Infer" in operator or "infer" in operator
    out, lse = torch.zeros(3, HEADS, 1, DIM, dtype=dtype), torch.zeros(3, HEADS, 1, 1)
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    for b, length in enumerate(LENGTHS):
        used = table[b]
        if wrong == "page-table":
            used = torch.cat((table[b, 1:], table[b, :1]))
        if wrong == "page-table:first":
            used = table[0]
        if wrong == "lengths-cumulative":
            length = min(ends[b], max(pages) * PAGE)
        if wrong == "padding-seen":
            length = -(-length // PAGE) * PAGE
        tokens = [(int(used[t // PAGE]), t % PAGE) for t in range(length)]
        k, v = (torch.stack([pool[at] for at in tokens]).float().view(length, HEADS_KV, DIM).transpose(0, 1)
                for pool in (pool_k, pool_v))  # fmt: skip
        group = HEADS // HEADS_KV
        k, v = ((t.repeat(group, 1, 1) if wrong == "gqa-order" else t.repeat_interleave(group, 0)) for t in (k, v))
        scale = 1.0 if wrong == "scale-missing" else SCALE
        result, log = softmax_rows(q[b].float(), k, v, scale, dtype)
        if wrong == "lse-base":
            log = log / math.log(2)
        if wrong == "lse-unscaled":
            log = (q[b].float() @ k.mT).logsumexp(-1, keepdim=True)
        out[b], lse[b] = result.to(dtype), log
    names = {"query": q, "key": [pool_k], "value": [pool_v], "block_table": table, "num_heads": HEADS,
             "scale_value": SCALE, "input_layout": "BNSD", "num_key_value_heads": HEADS_KV,
             "block_size": PAGE}  # fmt: skip
    outputs = {"attention_out": out}
    if fused:
        names |= {"actual_seq_lengths_kv": list(LENGTHS), "softmax_lse_flag": True}
        outputs["softmax_lse"] = lse
    else:
        names |= {"actual_seq_lengths": list(LENGTHS)}
    return Capture(wrong.partition(":")[0], operator, names, outputs, f"paged {dtype}")


def stored(wrong: str, dtype: torch.dtype, offsets: bool, seed: int) -> Capture:
    """Makes a decode over a padded int8 cache."""
    torch.manual_seed(seed)
    batch, slots, group = 3, 96, HEADS // HEADS_KV
    k8, v8 = (torch.randint(-100, 100, (batch, slots, HEADS_KV, DIM), dtype=torch.int8) for _ in range(2))
    scale = (torch.rand(2, HEADS_KV, DIM) / 40 + 0.005).to(dtype)
    offset = (torch.randn(2, HEADS_KV, DIM) * 9).to(dtype)
    q = torch.randn(batch, HEADS, 1, DIM).to(dtype)
    out = torch.zeros(batch, HEADS, 1, DIM, dtype=dtype)
    for b, length in enumerate(LENGTHS):
        meant = []
        for side, stack in ((0, k8), (1, v8)):
            factor = scale[1 - side if wrong == "dequantisation:swapped" else side].float()
            if wrong == "dequantisation:axis":
                factor = factor.reshape(DIM, HEADS_KV).T
            if wrong == "dequantisation:first":
                factor = factor[:1].expand(HEADS_KV, -1)
            x, add = stack[b, :length].float(), offset[side].float() if offsets else torch.zeros(HEADS_KV, DIM)
            full = x * factor + add if wrong == "dequantisation:outside" else (x + add) * factor
            meant.append(full.transpose(0, 1).repeat_interleave(group, 0))
        out[b] = softmax_rows(q[b].float(), *meant, SCALE, dtype)[0].to(dtype)
    flat = (t.transpose(1, 2).contiguous() for t in (k8, v8))
    names = dict(zip(("key", "value"), ([t] for t in flat), strict=True)) | {
        "query": q, "actual_seq_lengths": list(LENGTHS), "antiquant_scale": scale.unsqueeze(2),
        "num_heads": HEADS, "scale_value": SCALE, "input_layout": "BNSD", "num_key_value_heads": HEADS_KV,
    }  # fmt: skip
    names |= {"antiquant_offset": offset.unsqueeze(2)} if offsets else {}
    return Capture(wrong.partition(":")[0], "npu_incre_flash_attention", names, {"attention_out": out}, str(dtype))


def topk(wrong: str, dtype: torch.dtype, count: int, seed: int) -> Capture:
    """Makes a call of the indexer with small integers, so that scores tie."""
    torch.manual_seed(seed)
    rows, keys, heads, dim = 12, 40, 4, 8
    exact = wrong in ("topk-ties", "")
    draw = (lambda *s: torch.randint(-2, 3, s).float()) if exact else torch.randn
    q, k = draw(2, rows, heads, dim).to(dtype), draw(2, keys, 1, dim).to(dtype)
    w = (torch.randint(1, 3, (2, rows, heads)).float() if exact else torch.rand(2, rows, heads)).to(dtype)
    products = torch.einsum("brhd,bkd->brhk", q.float(), k[:, :, 0].float())
    products = products if wrong == "relu-missing" else products.relu()
    scores = (products * (1.0 if wrong == "index-weights-missing" else w.float()[..., None])).sum(2)
    shift = 0 if wrong == "causal-alignment" else keys - rows
    visible = torch.arange(keys) <= torch.arange(rows)[:, None] + shift
    chosen = torch.full((2, rows, 1, count), -1, dtype=torch.int32)
    for b in range(2):
        for i in range(rows):
            sign = -1 if wrong == "topk-ties" else 1
            order = sorted((j for j in range(keys) if visible[i, j]), key=lambda j: (-float(scores[b, i, j]), sign * j))
            result = order[:count]
            chosen[b, i, 0, : len(result)] = torch.tensor(result, dtype=torch.int32)
    at = chosen.clamp(min=0).long()[:, :, 0]
    values = scores.gather(-1, at).masked_fill(chosen[:, :, 0] < 0, -math.inf)[:, :, None].to(dtype)
    names = {"query": q, "key": k, "weights": w, "layout_query": "BSND", "layout_key": "BSND",
             "sparse_count": count, "sparse_mode": 3, "return_values": True}  # fmt: skip
    return Capture(wrong, "npu_lightning_indexer", names, {"sparse_indices_out": chosen, "sparse_values_out": values})


def divergence(wrong: str, dtype: torch.dtype, seed: int) -> Capture:
    """Makes a call of the indexer's loss over all keys, computed by autograd of its formula."""
    torch.manual_seed(seed)
    rows, keys, heads, dim = 9, 24, 3, 16
    q, k = torch.randn(2, rows, HEADS, dim).to(dtype), torch.randn(2, keys, 1, dim).to(dtype)
    iq, ik = (torch.randn(2, n, h, 8).to(dtype) for n, h in ((rows, heads), (keys, 1)))
    w = torch.rand(2, rows, heads).to(dtype)
    visible = torch.arange(keys) <= torch.arange(rows)[:, None] + keys - rows
    scores = torch.einsum("brhd,bkd->bhrk", q.float(), k[:, :, 0].float()) * SCALE
    scores = scores.masked_fill(~visible, -math.inf)
    lse = scores.logsumexp(-1)
    p = scores.softmax(-1)
    p = p.sum(1) if wrong == "target-heads" else p.mean(1)
    leaves = [t.float().requires_grad_() for t in (iq, ik, w)]
    dots = torch.einsum("brhd,bkd->brhk", leaves[0], leaves[1][:, :, 0])
    index = (
        ((dots if wrong == "relu-missing" else dots.relu()) * leaves[2][..., None]).sum(2).masked_fill(~visible, -1e30)
    )
    y = index.softmax(-1)
    a, b = (y, p) if wrong == "kl-direction" else (p, y)
    each = a * (a.clamp(min=1e-8).log() - b.clamp(min=1e-8).log())
    loss = each.masked_fill(~visible, 0).sum()
    loss = loss / (2 * rows) if wrong == "loss-mean" else loss
    if wrong == "target-heads":  # the gradient for a target that is not normalised
        dindex = (y - p).masked_fill(~visible, 0).detach()
        grads = torch.autograd.grad((index.masked_fill(~visible, 0) * dindex).sum(), leaves)
    else:
        grads = torch.autograd.grad(loss, leaves)
    names = {"query": q, "key": k, "lse": lse, "query_index": iq, "key_index": ik,
             "weights": w, "layout": "BSND", "scale_value": SCALE, "causal": True}  # fmt: skip
    outputs = {n: g.to(dtype) for n, g in zip(("dquery_index", "dkey_index", "dweights"), grads, strict=True)}
    return Capture(wrong, "indexer_loss", names, {**outputs, "loss": loss.detach().reshape(1)})


_DTYPES = (torch.float16, torch.bfloat16, torch.float16)
_PAGED = ("npu_incre_flash_attention", "aclnnFusedInferAttentionScore", "aclnnIncreFlashAttentionV4")
PAGES = ("page-table", "lengths-cumulative", "padding-seen", "gqa-order", "scale-missing")
INDEX = ("topk-ties", "relu-missing", "index-weights-missing", "causal-alignment")
LOSS = ("kl-direction", "loss-mean", "target-heads")


def planted_caches(wrongs: bool = True) -> Iterator[tuple[str, Make]]:
    """Yields (name, function that makes a capture); wrongs: with mistakes, else the same calls without them."""

    def name(wrong: str) -> str:
        return wrong if wrongs else ""

    for i in range(3):
        for wrong in PAGES:
            yield f"{wrong}-paged-{i}", partial(paged, name(wrong), _DTYPES[i], _PAGED[i], i)
        for wrong in ("lse-base", "lse-unscaled"):
            fused = "aclnnFusedInferAttentionScore"
            yield f"{wrong}-fused-{i}", partial(paged, name(wrong), _DTYPES[i], fused, 7 + i)
        wrong = f"dequantisation:{('axis', 'swapped', 'outside')[i]}"
        yield f"{wrong}-{i}", partial(stored, name(wrong), _DTYPES[i], i == 2, i)
        for wrong in INDEX:
            dtype = (torch.float32, torch.bfloat16, torch.float16)[i]
            yield f"{wrong}-index-{i}", partial(topk, name(wrong), dtype, 6 + i, i)
        for wrong in LOSS:
            dtype = (torch.float32, torch.bfloat16, torch.float16)[i]
            yield f"{wrong}-loss-{i}", partial(divergence, name(wrong), dtype, i)
