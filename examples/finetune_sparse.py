"""Trains a small model of each sparse family of transformers with and without our attention, and generates.

Byte-level models with random weights learn English documentation (Python's help topics, which every installation has).
Each run is a process of its own, which prints losses, seconds and the peak of its memory. The two runs of a family
differ in one argument: attn_implementation="fusion_attention" or "eager".

    python examples/finetune_sparse.py                                  # four families, 10 steps of 512 tokens
    python examples/finetune_sparse.py --families deepseek_v32 --tokens 4096

Exit code 1 if the losses of the two runs differ.
"""

import importlib
import json
import math
import resource
import subprocess
import sys
import time
from typing import Annotated, Any

import torch
import transformers
import typer

from fusion_attention.integrations.transformers import register

SHARED = {
    "vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "max_position_embeddings": 65536, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LATENT = SHARED | {
    "intermediate_size": 256, "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 32, "first_k_dense_replace": 1, "n_routed_experts": 4, "n_group": 1,
    "topk_group": 1, "index_n_heads": 16, "index_head_dim": 32, "index_topk": 64,
}  # fmt: skip
CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v32": ("DeepseekV32", LATENT),
    "glm_moe_dsa": ("GlmMoeDsa", LATENT | {"indexer_types": ["full", "shared"]}),
    "deepseek_v4": ("DeepseekV4", SHARED | {
        "head_dim": 32, "q_lora_rank": 64, "n_routed_experts": 4, "sliding_window": 32, "layer_types": [CSA, HCA],
        "compress_rates": {CSA: 4, HCA: 16}, "mlp_layer_types": ["moe", "moe"], "o_groups": 2, "o_lora_rank": 32,
        "partial_rotary_factor": 0.5, "index_n_heads": 16, "index_head_dim": 32, "index_topk": 16,
    }),
    "qwen4_exp": ("Qwen4Exp", SHARED | {
        "num_key_value_heads": 2, "head_dim": 32, "num_experts": 4, "shared_expert_intermediate_size": 64,
        "hc_count": 2, "hc_lowrank": 16, "layer_types": ["indexed_attention"] * 2, "indexer_n_heads": 16,
        "indexer_kv_heads": 1, "indexer_head_dim": 32, "indexer_budget": 64, "indexer_compress_ratio": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                            "mrope_section": [4, 2, 2]},
    }),
}  # fmt: skip


def text() -> torch.Tensor:
    """Returns the help topics of this Python, as bytes."""
    from pydoc_data.topics import topics

    return torch.tensor(list("\n\n".join(topics[name] for name in sorted(topics)).encode()))


def model_of(family: str, attention: str) -> Any:
    """Returns a model with random weights, the same for every attention."""
    prefix, sizes = SIZES[family]
    configuration, modeling = (
        importlib.import_module(f"transformers.models.{family}.{kind}_{family}")
        for kind in ("configuration", "modeling")
    )
    config = getattr(configuration, f"{prefix}{'Text' if family == 'qwen4_exp' else ''}Config")(**sizes)
    torch.manual_seed(0)
    model = getattr(modeling, f"{prefix}ForCausalLM")(config)
    register()
    model.set_attn_implementation(attention)  # the line
    return model


def trained(family: str, attention: str, steps: int, tokens: int) -> dict[str, Any]:
    """Trains a model, generates 16 bytes, and returns losses, bytes, seconds of a step and the peak of memory in MB."""
    transformers.logging.set_verbosity_error()
    model, data = model_of(family, attention), text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, before = [], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    for step in range(steps):
        rows = data[step * tokens : (step + 1) * tokens][None]
        loss = model.train()(rows, labels=rows, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    seconds = (time.perf_counter() - start) / steps
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    new = model.eval().generate(data[None, : tokens // 2], max_new_tokens=16, do_sample=False)[0, -16:].tolist()
    return {"losses": losses, "new": new, "seconds": seconds, "peak": peak}


def main(
    families: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(SIZES),
    steps: Annotated[int, typer.Option(min=1)] = 10,
    tokens: Annotated[int, typer.Option(min=32, help="Tokens of a step.")] = 512,
    attention: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Trains models with and without our attention."""
    if attention:
        print(json.dumps(trained(families, attention, steps, tokens)))
        return
    differs = False
    for family in families.split(","):
        results = {}
        for name in ("fusion_attention", "eager"):
            command = [sys.executable, __file__, "--families", family, "--attention", name]
            command += ["--steps", str(steps), "--tokens", str(tokens)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(done.stderr)
            results[name] = result = json.loads(done.stdout.splitlines()[-1])
            numbers = f"loss {result['losses'][0]:.5f} to {result['losses'][-1]:.5f}, {result['seconds']:.2f} s a step"
            print(f"{family}, {name}: {numbers}, {result['peak']:.0f} MB, generated {bytes(result['new'])!r}")
        ours, theirs = (result["losses"] for result in results.values())
        differs |= not all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(ours, theirs, strict=True))
    if differs:
        sys.exit("the losses differ")


if __name__ == "__main__":
    typer.run(main)
