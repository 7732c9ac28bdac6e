"""Trains a DeepSeek-V4 layer on device npu; it attends to a window and selected compressed keys.

Like typical programs, the layer has two paths: the fused functions of device npu, and torch's operators. Run as a
script, it computes the loss, the output and all gradients on device npu, and saves them to the file of its argument.
"""

import sys

import torch
from torch.nn.functional import rms_norm

RATIO, WINDOW, TOP_K, HEADS, DIM, INDEX_HEADS, INDEX_DIM, HIDDEN, TOKENS = 4, 8, 3, 4, 16, 16, 8, 24, 30


class IndexerLoss(torch.autograd.Function):
    """Gives the indexer the gradients that the fused function computes; the loss has the value 0."""

    @staticmethod
    def forward(ctx, q, k, w, lists, target):
        import cann_ops_transformer as cann

        rest = torch.tensor([TOKENS % RATIO], dtype=torch.int32, device=q.device)
        dq, dk, dw, _ = cann.sparse_lightning_indexer_kl_loss_grad(
            q, k, w, lists, target, cmp_residual_k=rest, layout_q="BSND", layout_k="BSND", mask_mode=3, cmp_ratio=RATIO
        )
        ctx.save_for_backward(dq, dk, dw)
        return q.new_zeros(())

    @staticmethod
    def backward(ctx, upstream):
        dq, dk, dw = ctx.saved_tensors
        return upstream * dq, upstream * dk, upstream * dw, None, None


def rotated(rows, every=1):
    """Rotates adjacent pairs of the last half of each row by its position."""
    half = rows.shape[-1] // 2
    angle = every * torch.arange(rows.shape[1], dtype=rows.dtype)[:, None] * 0.5 ** torch.arange(half // 2)
    cos, sin = (t.to(rows.device, rows.dtype)[:, None] for t in (angle.cos(), angle.sin()))
    a, b = rows[..., half::2], rows[..., half + 1 :: 2]
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    return torch.cat((rows[..., :half], turned), -1)


class Compressor(torch.nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.wkv = torch.nn.Parameter(torch.randn(2 * dim, HIDDEN) * 0.3)
        self.wgate = torch.nn.Parameter(torch.randn(2 * dim, HIDDEN) * 0.3)
        self.ape = torch.nn.Parameter(torch.randn(RATIO, 2 * dim))

    def forward(self, x, fused):
        pooled = self.fused(x) if fused else self.by_torch(x)
        return rotated(rms_norm(pooled, pooled.shape[-1:], eps=1e-6)[:, :, None], RATIO)

    def fused(self, x):
        import cann_ops_transformer as cann

        state = torch.zeros(2, TOKENS, 2 * len(self.wkv), device=x.device)
        table = torch.ones(1, 1, dtype=torch.int32, device=x.device)
        out = cann.compressor(
            x, self.wkv, self.wgate, state, self.ape, cmp_ratio=RATIO, state_block_table=table, coff=2
        )
        return out[:, : TOKENS // RATIO]

    def by_torch(self, x):
        count = TOKENS // RATIO * RATIO
        kv, gate = (x[:, :count] @ w.T for w in (self.wkv, self.wgate))
        kv, gate = (t.unflatten(1, (-1, RATIO)) for t in (kv, gate + self.ape.repeat(count // RATIO, 1)))
        dim = kv.shape[-1] // 2
        results = []
        for w in range(kv.shape[1]):
            of = [(kv[:, w, :, dim:], gate[:, w, :, dim:])]
            of += [(kv[:, w - 1, :, :dim], gate[:, w - 1, :, :dim])] if w else []
            rows, z = (torch.cat(parts, 1) for parts in zip(*of, strict=True))
            results.append((z.softmax(1) * rows).sum(1))
        return torch.stack(results, 1)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wq = torch.nn.Parameter(torch.randn(HIDDEN, HEADS * DIM) * 0.3)
        self.wkv = torch.nn.Parameter(torch.randn(HIDDEN, DIM) * 0.3)
        self.wo = torch.nn.Parameter(torch.randn(HEADS * DIM, HIDDEN) * 0.3)
        self.sinks = torch.nn.Parameter(torch.randn(HEADS))
        self.compressor = Compressor(DIM)
        self.index_wq = torch.nn.Parameter(torch.randn(HIDDEN, INDEX_HEADS * INDEX_DIM) * 0.3)
        self.index_weights = torch.nn.Parameter(torch.randn(HIDDEN, INDEX_HEADS) * 0.3)
        self.index_compressor = Compressor(INDEX_DIM)

    def forward(self, x, fused):
        q = rotated((x @ self.wq).unflatten(-1, (HEADS, DIM)))
        k = x @ self.wkv
        k = rotated(rms_norm(k, (DIM,), eps=1e-6)[:, :, None])
        entries = self.compressor(x, fused)
        given = x.detach()
        index_q = rotated((given @ self.index_wq).unflatten(-1, (INDEX_HEADS, INDEX_DIM)))
        index_k, weights = self.index_compressor(given, fused), given @ self.index_weights
        attend = self.fused if fused else self.by_torch
        out, index_loss = attend(q, k, entries, index_q, index_k, weights)
        return out.flatten(-2) @ self.wo, index_loss

    def fused(self, q, k, entries, index_q, index_k, weights):
        import cann_ops_transformer as cann

        rest = torch.tensor([TOKENS % RATIO], dtype=torch.int32, device=q.device)
        of_index = {"cmp_residual_k": rest, "mask_mode": 3, "cmp_ratio": RATIO}
        with torch.no_grad():
            lists, _ = cann.lightning_indexer(index_q, index_k, weights, TOP_K, **of_index)
        out, lse = cann.sparse_flash_mla(
            q, k, entries, None, lists, cmp_residual_kv=rest, sinks=self.sinks, softmax_scale=DIM**-0.5,
            cmp_ratio=RATIO, ori_mask_mode=4, cmp_mask_mode=3, ori_win_left=WINDOW - 1, ori_win_right=0,
            return_softmax_lse=True,
        )  # fmt: skip
        with torch.no_grad():
            target = cann.sparse_flash_mla_softmax_l1_norm(
                q, entries, lse, sparse_indices=lists, softmax_scale=DIM**-0.5, **of_index
            )
        return out, IndexerLoss.apply(index_q, index_k, weights, lists, target)

    def by_torch(self, q, k, entries, index_q, index_k, weights):
        row, key, entry = torch.arange(TOKENS)[:, None], torch.arange(TOKENS), torch.arange(TOKENS // RATIO)
        near, closed = (key <= row) & (key > row - WINDOW), (entry + 1) * RATIO <= row + 1
        dots = torch.einsum("bshd,bed->bshe", index_q, index_k[:, :, 0]).relu()
        index = (weights[..., None] * dots).sum(2).masked_fill(~closed, -torch.inf)
        order = index.topk(TOP_K, dim=-1).indices
        chosen = torch.zeros_like(index, dtype=torch.bool).scatter_(-1, order, True) & closed
        every = torch.cat((k, entries), 1)[:, :, 0]
        visible = torch.cat((near.expand(len(q), -1, -1), chosen), -1)[:, None]
        scores = (torch.einsum("bshd,bjd->bhsj", q, every) * DIM**-0.5).masked_fill(~visible, -torch.inf)
        sinks = self.sinks.view(1, -1, 1, 1).expand(len(q), -1, TOKENS, 1)
        p = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        target = p[..., TOKENS:].mean(1).detach()
        logs = index.masked_fill(~chosen, -torch.inf).log_softmax(-1).masked_fill(~chosen, 0)
        return torch.einsum("bhsj,bjd->bshd", p, every), -(target * logs).sum()


def step(layer, x, fused):
    """Returns the output and all gradients by name."""
    out, index_loss = layer(x, fused)
    (out.square().sum() + index_loss).backward()
    return {"out": out.detach(), "x": x.grad} | {name: p.grad for name, p in layer.named_parameters()}


def layer_on(device, dtype):
    """Returns the layer and its input, with the same values on every device."""
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(1, TOKENS, HIDDEN)
    return layer.to(device, dtype), x.to(device, dtype).requires_grad_()


if __name__ == "__main__":
    import torch_npu  # noqa: F401

    results = step(*layer_on("npu", torch.float32), fused=True)
    torch.save({name: t.cpu() for name, t in results.items()}, sys.argv[1])
