"""How much of a row's softmax every compressed key takes, a mean over heads: what teaches an indexer."""

from __future__ import annotations

import numpy as np
import torch

from fusion_attention.ops.compressed.call import FlashMla
from fusion_attention.ops.shared.layouts import row_view

Tensor = torch.Tensor
PAIRS = 1 << 22  # products of a step: rows * keys * heads


def l1_norm(call: FlashMla, lse: Tensor) -> Tensor:
    """Mean over heads of exp(s - lse), float32.

    Args:
        call: its keys in rows, not in pages. lse: of both sources and the sink, as the call returns it.

    Returns:
        Where the call has lists, for every entry that is read; else for every compressed key that a row sees:
        [B, S1, 1, K] or [T1, 1, K], 0 elsewhere.
    """
    p, e, lists = call.problem, call.extents, call.tensors["sparse_indices"]
    q, second = call.given("query"), call.second
    assert second is not None
    keys = call.compressed(call.given("key_compressed"))
    assert keys is not None
    width = int(second[1].kv_len.max(initial=0)) if lists is None else lists.shape[-1]
    result = torch.zeros(*q.shape[:-2], 1, width, device=q.device)
    rows, written = call.rows(q, p.heads_q), row_view(result, call.layout, 1, e, "q")
    saved = torch.empty(*q.shape[:-1], device=q.device)
    call.grouped(saved).copy_(lse)
    statistics = call.rows(saved.unsqueeze(-1), p.heads_q)
    for b, count in enumerate(e.q_len.tolist()):
        k = keys.sequence(b, 1, int(second[1].kv_len[b]))[0].float()
        seen = torch.from_numpy(e.compressed_end(b, np.arange(count), p.compressed_ratio)).to(q.device)[:, None]
        entry = torch.arange(width, device=q.device).expand(count, -1)
        read = entry < seen
        if lists is not None:
            named = call.rows(lists, 1).sequence(b, 1, count)[0].long()
            read = read & (named >= 0).cumprod(-1).bool() & (named < seen)
            entry = named
        step = max(1, PAIRS // max(p.heads_q * max(width, 1), 1))
        for first in range(0, count if len(k) else 0, step):
            here = slice(first, first + step)
            of_keys = k[entry[here].clamp(0, len(k) - 1)] if lists is not None else k.expand(len(read[here]), -1, -1)
            of_rows = rows.sequence(b, p.heads_q, count)[:, here].transpose(0, 1).float()
            scores = p.scale * (of_rows @ of_keys.mT) - statistics.sequence(b, p.heads_q, count)[:, here].transpose(
                0, 1
            )
            target = written.sequence(b, 1, count)[0, here]
            target[:, : scores.shape[-1]] = scores.exp().mean(1).where(read[here, : scores.shape[-1]], 0)
    return result
