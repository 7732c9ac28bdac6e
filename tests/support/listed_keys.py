"""Makes a call of sparse_flash_mla with lists of keys, and computes the expected results row by row."""

from typing import Any

import torch

Tensor = torch.Tensor
Args = dict[str, Any]
ROWS, KEYS = (3, 0, 4), (7, 5, 9)  # lengths of packed sequences
LEAVES = ("q", "ori_kv", "sinks")


def packed(heads: int = 4, dim: int = 16, slots: int = 6, dtype: torch.dtype = torch.float32) -> Args:
    """Makes packed sequences whose lists have duplicates, entries after their end, or no keys; other keys are NaN."""
    q, kv = torch.randn(sum(ROWS), heads, dim).to(dtype), torch.randn(sum(KEYS), 1, dim).to(dtype)
    lists = torch.cat([torch.randint(0, keys - 1, (rows, 1, slots)) for rows, keys in zip(ROWS, KEYS, strict=True)])
    lists[1, 0, 2:], lists[4, 0] = -1, -1
    counts = torch.tensor([6, 4, 3, 0, 5, 2, 1]).int()[:, None]
    kv[torch.tensor(KEYS).cumsum(0) - 1] = torch.nan
    ends = {name: torch.tensor([0, *torch.tensor(n).cumsum(0)]) for name, n in (("q", ROWS), ("ori_kv", KEYS))}
    return {
        "q": q, "ori_kv": kv, "sinks": torch.randn(heads), "ori_sparse_indices": lists.int(), "softmax_scale": 0.3,
        "ori_topk_length": counts, "layout_q": "TND", "layout_kv": "TND", "cu_seqlens_q": ends["q"],
        "cu_seqlens_ori_kv": ends["ori_kv"],
    }  # fmt: skip


def witness(args: Args, dout: Tensor) -> tuple[Tensor, ...]:
    """Computes (out, softmax_lse, gradients of LEAVES, ori_softmax_l1_norm) in float64."""
    q, kv, sinks = (args[name].detach().double().nan_to_num().requires_grad_() for name in LEAVES)
    lists, counts, first = args["ori_sparse_indices"][:, 0].tolist(), args["ori_topk_length"][:, 0].tolist(), 0
    norm = torch.zeros(len(q), 1, len(lists[0]), dtype=torch.float64)
    outs, lses, row = [], [], 0
    for rows, keys in zip(ROWS, KEYS, strict=True):
        for i in range(row, row + rows):
            named = lists[i][: counts[i]]
            named = named[: named.index(-1)] if -1 in named else named
            read = kv[[first + n for n in named], 0]
            scores = args["softmax_scale"] * q[i] @ read.T
            lse = torch.cat((scores, sinks[:, None]), 1).logsumexp(1)
            weights = (scores - lse[:, None]).exp()
            norm[i, 0, : len(named)] = weights.mean(0).detach()
            outs.append(weights @ read)
            lses.append(lse if named else torch.zeros_like(lse))
        row, first = row + rows, first + keys
    out = torch.stack(outs)
    gradients = torch.autograd.grad(out, (q, kv, sinks), dout.double())
    return out.detach(), torch.stack(lses).detach()[None], *gradients, norm


def computed(cann: Any, args: Args, dout: Tensor) -> tuple[Tensor, ...]:
    """Computes the results of witness() with the package: gradients by autograd, the norm by the gradient operator."""
    leaves = {name: args[name].detach().clone().requires_grad_() for name in LEAVES}
    out, lse = cann.sparse_flash_mla(**{**args, **leaves}, return_softmax_lse=True)
    gradients = torch.autograd.grad(out, tuple(leaves.values()), dout)
    given = {**args, "dout": dout, "attn_out": out.detach(), "softmax_lse": lse.detach()}
    dq, dkv, dcmp, dsinks, norm, cmp_norm = cann.sparse_flash_mla_grad(**given)
    assert dcmp.numel() == cmp_norm.numel() == 0
    for mine, other in zip((dq, dkv, dsinks), gradients, strict=True):
        assert torch.equal(mine, other)
    return out.detach(), lse.detach(), *gradients, norm
