"""Trains a Llama of transformers on texts of different lengths: packed into one sequence, and padded as usual.

The model, its loss and its optimizer are those of transformers and torch. Three runs differ in the attention and in how
they make a batch of texts:

    sdpa, padded    attn_implementation="sdpa", texts padded to the longest of their batch
    sdpa, packed    attn_implementation="sdpa", DataCollatorWithFlattening, which concatenates texts; its mask has an
                    element for every pair of tokens of the batch
    ours, packed    attn_implementation="fusion_attention", DataCollatorWithFlattening

All start from the same weights, take the same steps in alternation and must have the same losses.

    python examples/pack_and_train.py            # needs pip install "fusion-attention[demo]"

The exit code is 1 if two loss curves differ by more than TOLERANCE (float32 only).
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, LlamaConfig

from fusion_attention.cli.demo_comparison import library_texts
from fusion_attention.integrations.transformers import register

TOLERANCE = 2e-5  # for losses near 5: float32 rounding errors, which grow over the steps
Text = dict[str, list[int]]


def model(attention: str, dtype: torch.dtype) -> Any:
    """Returns a small Llama whose tokens are bytes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)


def pad(texts: list[Text]) -> dict[str, torch.Tensor]:
    """Returns padded tokens, their mask, and labels, which are -100 (no label) for padding."""
    rows, longest = [text["input_ids"] for text in texts], max(len(text["input_ids"]) for text in texts)
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.arange(longest) < torch.tensor([[len(row)] for row in rows])
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


class Run:
    """One copy of the model in training."""

    def __init__(self, name: str, attention: str, collate: Callable[[list[Text]], Any], dtype: torch.dtype) -> None:
        self.name, self.collate, self.model = name, collate, model(attention, dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, texts: list[Text]) -> None:
        """Runs forward, backward and the optimizer."""
        start = time.perf_counter()
        loss = self.model(**self.collate(texts), use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - start)


def draw(count: int, longest: int) -> list[Text]:
    """Returns docstrings of Python's standard library as bytes."""
    texts = [text.encode()[:longest] for text in library_texts() if len(text) > 20]
    return [{"input_ids": list(text)} for text in random.Random(0).sample(texts, count)]


def show(runs: list[Run], batches: list[list[Text]]) -> None:
    """Prints the losses of every step, and the speed in tokens without padding."""
    print("step  " + "  ".join(f"{run.name:>13}" for run in runs))
    for step in range(len(batches)):
        print(f"{step:4}  " + "  ".join(f"{run.losses[step]:13.6f}" for run in runs))
    tokens = [sum(len(text["input_ids"]) for text in batch) for batch in batches]
    for run in runs:
        rates = [count / seconds for count, seconds in zip(tokens, run.seconds, strict=True)]
        faster = statistics.median(a / b for a, b in zip(runs[0].seconds, run.seconds, strict=True))
        print(f"{run.name:13}  {statistics.median(rates):8.0f} tokens/s, {faster:.2f} times {runs[0].name}")


def main() -> None:
    """Trains three copies of the model on the same batches in alternation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--texts", type=int, default=16, help="in a batch")
    parser.add_argument("--longest", type=int, default=512, help="tokens that a text is cut to")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    register()
    dtype = getattr(torch, options.dtype)
    flatten = DataCollatorWithFlattening()
    runs = [
        Run("sdpa, padded", "sdpa", pad, dtype),
        Run("sdpa, packed", "sdpa", flatten, dtype),
        Run("ours, packed", "fusion_attention", flatten, dtype),
    ]
    texts = draw(options.steps * options.texts, options.longest)
    batches = [texts[i : i + options.texts] for i in range(0, len(texts), options.texts)]
    for run in runs:  # a first step, not measured: it also starts threads and allocates memory
        run.step(batches[0])
        run.losses.clear()
        run.seconds.clear()
    for batch in batches:
        for run in runs:
            run.step(batch)
    real = sum(len(text["input_ids"]) for text in texts)
    rectangles = sum(len(batch) * max(len(text["input_ids"]) for text in batch) for batch in batches)
    print(f"{len(texts)} docstrings, {real} tokens, padded {rectangles}; {torch.get_num_threads()} threads, {dtype}")
    show(runs, batches)
    losses = torch.tensor([run.losses for run in runs])
    difference = float((losses.amax(0) - losses.amin(0)).max())
    agree = options.dtype != "float32" or difference <= TOLERANCE
    print(f"largest difference of a loss {difference:.1e}: " + ("the curves agree" if agree else "FAILED: they differ"))
    raise SystemExit(0 if agree else 1)


if __name__ == "__main__":
    main()
