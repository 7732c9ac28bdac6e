"""Times a model on device "npu" beside the same model on the CPU; both run the same kernels."""

import copy
import functools
from collections.abc import Iterator

import torch

from benchmarks.dense import DTYPES, PEAKS, triangle
from benchmarks.integrations import STEPS, linear, step, transformers
from fusion_attention import npu
from fusion_attention.bench.pair import Pair

# Speed relative to the CPU: a step may take a tenth longer.
GOAL = 1 / 1.1


def steps(quick: bool) -> Iterator[Pair]:
    """Times training steps of a Llama of width 1024 on 512 tokens."""
    size, width = (64, 128) if quick else (512, 1024)
    config = transformers().LlamaConfig(
        hidden_size=width, intermediate_size=width * 11 // 4, num_hidden_layers=2, num_attention_heads=width // 64,
        max_position_embeddings=size, vocab_size=1024,
    )  # fmt: skip
    ids = torch.randint(config.vocab_size, (1, size), generator=torch.Generator().manual_seed(0))
    npu.install()
    try:
        for label in ("fp32", "bf16"):
            torch.manual_seed(0)
            model = transformers().LlamaForCausalLM._from_config(
                config, attn_implementation="sdpa", dtype=DTYPES[label]
            )
            ours, peer = (
                functools.partial(step, one, torch.optim.AdamW(one.parameters(), **STEPS), ids.to(one.device))
                for one in (copy.deepcopy(model).to("npu"), model)
            )
            flops = 3 * linear(model, size) + config.num_hidden_layers * 7 * 2 * width * triangle(size)
            name = f"Llama {label} S{size}, training step"
            yield Pair("npu", name, "cpu", ours, peer, flops, PEAKS[label], goal=GOAL)
    finally:
        npu.uninstall()
