"""Embeds texts of different lengths with an unmodified BERT of transformers: packed into one sequence, and padded.

DataCollatorWithFlattening concatenates the texts. It also returns position_ids, which start at 0 in every text, and
cu_seq_lens_q, the cumulative lengths of the texts, from which the attention knows where a text ends.

    python examples/packed_bert.py            # needs pip install "fusion-attention[demo]"

The exit code is 1 if the embeddings differ.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, DataCollatorWithFlattening
from transformers.utils import logging

from fusion_attention.cli.comparison import library_texts
from fusion_attention.cli.encoder import model_folder
from fusion_attention.integrations.transformers import register

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.05}  # of a unit vector


def padded(model: Any, ids: list[list[int]]) -> Tensor:
    """Returns [texts, width] from a padded batch and a mask: the mean over real tokens."""
    longest = max(map(len, ids))
    mask = torch.arange(longest) < torch.tensor([[len(text)] for text in ids])
    rows = torch.tensor([text + [0] * (longest - len(text)) for text in ids])
    hidden = model(rows, attention_mask=mask.long()).last_hidden_state
    return torch.nn.functional.normalize((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True), dim=-1)


def packed(model: Any, ids: list[list[int]]) -> Tensor:
    """Returns the same vectors, computed from one sequence without padding."""
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True)([{"input_ids": text} for text in ids])
    del batch["labels"]
    (hidden,) = model(**batch).last_hidden_state
    means = torch.segment_reduce(hidden.float(), "mean", lengths=torch.tensor([len(text) for text in ids]))
    return torch.nn.functional.normalize(means, dim=-1)


def timed(embed: Callable[[Any, list[list[int]]], Tensor], model: Any, ids: list[list[int]]) -> tuple[Tensor, float]:
    """Returns a function's result and its seconds."""
    start = time.perf_counter()
    with torch.inference_mode():
        result = embed(model, ids)
    return result, time.perf_counter() - start


def main() -> None:
    """Embeds one batch in both ways, in alternation, and compares speed and results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    register()
    logging.disable_progress_bar()
    folder = model_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    texts = random.Random(0).sample(library_texts(), options.texts)
    ids = tokenizer(texts, truncation=True, max_length=256)["input_ids"]
    real, rectangle = sum(map(len, ids)), len(ids) * max(map(len, ids))
    print(f"{len(ids)} docstrings, {real} tokens, padded {rectangle}: {rectangle / real:.2f} times as many")
    for dtype, tolerance in TOLERANCE.items():
        packed_model, padded_model = (
            AutoModel.from_pretrained(folder, attn_implementation=name, dtype=dtype, local_files_only=True).eval()
            for name in ("fusion_attention", "sdpa")
        )
        turns = range(options.turns + 1)
        pairs = [(timed(padded, padded_model, ids), timed(packed, packed_model, ids)) for _ in turns][1:]
        slow, fast = (statistics.median(pair[i][1] for pair in pairs) for i in (0, 1))
        difference = float((pairs[0][0][0] - pairs[0][1][0]).norm(dim=-1).max())
        print(
            f"{dtype}: padded with sdpa {real / slow:.0f} tokens/s, packed {real / fast:.0f} tokens/s, "
            f"{statistics.median(a[1] / b[1] for a, b in pairs):.2f} times; largest difference {difference:.1e}"
        )
        if not difference <= tolerance:
            raise SystemExit("FAILED: the embeddings differ")


if __name__ == "__main__":
    main()
