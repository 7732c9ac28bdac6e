"""Compressed keys of transformers' DeepSeek-V4 layers and those of fa.compress, by loops."""

import pytest
import torch
from support.compressed import pooled_by_loops
from support.sparse_models import code_of

import fusion_attention as fa
from fusion_attention.testing.drawn import compare_with

Tensor = torch.Tensor
RATIO, DIM = 4, 6


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ["HCA", "CSA"])
def test_the_layers_of_transformers_pool_alike(kind: str) -> None:
    """Before their norm and rotation."""
    v4, overlap = code_of("deepseek_v4"), kind == "CSA"
    config = v4.DeepseekV4Config(hidden_size=16, head_dim=2 * DIM, index_head_dim=8, index_n_heads=2, q_lora_rank=8)
    layer = getattr(v4, f"DeepseekV4{kind}Compressor")(config)
    layer.compress_rate = RATIO
    width = layer.kv_proj.weight.shape[0]
    layer.position_bias = torch.nn.Parameter(drawn(RATIO, width, seed=5))
    pooled: list[Tensor] = []

    class Pooled(Exception):
        pass

    def norm(rows: Tensor) -> Tensor:
        pooled.append(rows.detach())
        raise Pooled

    layer.kv_norm = torch.nn.Module()
    layer.kv_norm.forward = norm
    x = drawn(1, 11, 16, seed=6)
    with pytest.raises(Pooled):
        layer(x, None, torch.arange(11)[None], None, 0)
    kv, gate = layer.kv_proj(x).detach(), layer.gate_proj(x).detach()
    ours = fa.compress(
        kv[:, :, None], gate[:, :, None], ratio=RATIO, position_bias=layer.position_bias.detach(), overlap=overlap
    )

    def program() -> tuple[Tensor, ...]:
        rows = pooled_by_loops(kv[0].double(), gate[0].double(), layer.position_bias.detach().double(), RATIO, overlap)
        return (rows,)

    compare_with(f"{kind} of transformers", (pooled[0][0],), program)
    compare_with(f"{kind}", (ours[0, :, 0],), program)
