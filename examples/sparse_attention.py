"""Runs a small example of DeepSeek's sparse attention: an indexer selects 32 of 256 keys for every row.

Results and gradients are compared with those of dense computation. The program runs on a GPU if there is one.
"""

import torch

import fusion_attention as fa

torch.manual_seed(0)
torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
TOKENS, HEADS, DIM, ROPE, CHOSEN = 256, 8, 64, 16, 32

# The lightning indexer: small heads, one key row per token that all heads share, weights that include the scale.
index_q = torch.randn(1, TOKENS, 4, 32, requires_grad=True)
index_k = torch.randn(1, TOKENS, 1, 32, requires_grad=True)
index_w = (torch.rand(1, TOKENS, 4) * (4 * 32) ** -0.5).requires_grad_()
indices, values = fa.lightning_indexer(index_q, index_k, index_w, CHOSEN)

scores = (torch.einsum("bqhd,bkzd->bqhk", index_q, index_k).relu() * index_w[..., None]).sum(2)
causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
scores = scores.masked_fill(~causal, -torch.inf)
expected, _ = scores.topk(CHOSEN, dim=-1)
assert torch.allclose(values[:, :, 0], expected, atol=1e-5)
print(f"indexer: the {CHOSEN} best of up to {TOKENS} keys; row 2 sees three: {indices[0, 2, 0, :5].tolist()}")

visible = values > -torch.inf
gradients = torch.autograd.grad(values.masked_fill(~visible, 0).sum(), (index_q, index_k, index_w))
expected_gradients = torch.autograd.grad(expected[expected > -torch.inf].sum(), (index_q, index_k, index_w))
worst = max((a - b).abs().max() for a, b in zip(gradients, expected_gradients, strict=True))
assert worst < 1e-3, worst
print(f"indexer: gradients of its values agree with autograd through a dense top-k to {worst:.1e}")

# Attention in MLA's absorbed form: one key row per token for all heads, and the same rows are the values.
q, q_rope = (torch.randn(1, TOKENS, HEADS, d, requires_grad=True) for d in (DIM, ROPE))
latent, k_rope = (torch.randn(1, TOKENS, 1, d, requires_grad=True) for d in (DIM, ROPE))
leaves = (q, latent, q_rope, k_rope)
out = fa.sparse_attention(q, latent, None, indices, q_rope=q_rope, k_rope=k_rope)

chosen = torch.zeros(1, TOKENS, TOKENS + 1, dtype=torch.bool)
chosen.scatter_(-1, indices[:, :, 0].long().where(indices[:, :, 0] >= 0, TOKENS), True)
blocked = ~(chosen[..., :TOKENS] & causal)
dense = fa.attention(q, latent, latent, q_rope=q_rope, k_rope=k_rope, blocked=blocked[:, None])
assert torch.allclose(out, dense, atol=1e-5)
gradients, expected_gradients = (torch.autograd.grad(o.square().sum(), leaves) for o in (out, dense))
worst = max((a - b).abs().max() for a, b in zip(gradients, expected_gradients, strict=True))
assert worst < 1e-3, worst
print(f"attention: out and gradients agree with dense attention under a mask to {worst:.1e}")
