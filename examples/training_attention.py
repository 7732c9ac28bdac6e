"""Computes attention and its gradients with four kinds of bands, and compares them with torch under a dense mask.

Then it computes the causal call by torch_npu's function, and three sequences packed into one call.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import fusion_attention as fa
from fusion_attention.npu import npu_fusion_attention

torch.manual_seed(0)
q, k, v = (torch.randn(2, 8, 96, 64, requires_grad=True) for _ in range(3))  # [B, N, S, D]
row, key = torch.arange(96)[:, None], torch.arange(96)
cases = {
    "everything": (fa.Band.full(), torch.ones(96, 96, dtype=torch.bool)),
    "causal": (fa.Band.causal(), key <= row),
    "window of 32": (fa.Band.window(31, 0), (key <= row) & (key > row - 32)),
    "prefixes 10 and 40": (
        fa.Band.prefix_causal([10, 40]),
        (key <= row) | (key < torch.tensor([10, 40])[:, None, None, None]),
    ),
}
for name, (band, mask) in cases.items():
    out = fa.attention(q, k, v, layout="BNSD", band=band)
    expected = sdpa(q, k, v, attn_mask=mask)
    gradients, expected_gradients = (torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (out, expected))
    worst = max((a - b).abs().max() for a, b in zip((out, *gradients), (expected, *expected_gradients), strict=True))
    assert worst < 1e-4, (name, worst)
    print(f"{name:20} out and gradients agree with a masked softmax to {worst:.1e}")

# The same causal call by torch_npu's function: for any length, the mask is CANN's compressed 2048 x 2048 mask.
triangle = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
out, softmax_max, softmax_sum, *_ = npu_fusion_attention(
    q, k, v, 8, "BNSD", atten_mask=triangle, sparse_mode=3, scale=64**-0.5
)
assert torch.equal(out, fa.attention(q, k, v, layout="BNSD", band=fa.Band.causal()))
print(f"npu_fusion_attention: the same bits; statistics {list(softmax_max.shape)}")

# Packed: three concatenated sequences without padding; each is causal.
lengths = [30, 50, 16]
rows = torch.randn(sum(lengths), 8, 64)
packed = fa.attention(rows, rows, rows, layout="TND", q_len=lengths, band=fa.Band.causal())
alone = [fa.attention(*(x[None],) * 3, band=fa.Band.causal())[0] for x in rows.split(lengths)]
assert torch.equal(packed, torch.cat(alone))
print(f"packed {lengths}: the same bits as one call per sequence")
