"""Training code written for Ascend, unchanged, on a machine without one: only the first two lines are ours."""

from fusion_attention import npu

npu.install()

import torch  # noqa: E402
import torch_npu  # noqa: E402

torch.npu.set_device("npu:0")
torch.npu.manual_seed(0)


class Attention(torch.nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.register_buffer("mask", torch.ones(2048, 2048, dtype=torch.bool).triu(1))

    def forward(self, x: torch.Tensor, ends: list[int]) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in self.qkv(x).chunk(3, dim=-1))
        rows, *_ = torch_npu.npu_fusion_attention(
            q, k, v, self.heads, "TND", atten_mask=self.mask, sparse_mode=3, scale=q.shape[-1] ** -0.5,
            actual_seq_qlen=ends, actual_seq_kvlen=ends, keep_prob=0.9,
        )  # fmt: skip
        return self.out(rows.flatten(1))


model = Attention(64, 4).npu()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
tokens = torch.randn(96, 64, device="npu")
target = tokens.roll(1, 0)
losses = []
for _ in range(20):
    with torch.autocast("npu", torch.bfloat16):
        loss = (model(tokens, [40, 70, 96]).float() - target).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
torch.npu.synchronize()
assert losses[-1] < losses[0]
print(f"torch_npu {torch_npu.__version__} on {torch.npu.get_device_name()}")
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps, three packed sequences, dropout 0.1, bfloat16")
