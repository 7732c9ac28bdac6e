"""Trains a small language model with the three kinds of DeepSeek-V4's attention layers, in three stages.

A transformer whose tokens are bytes learns English documentation (Python's help topics, which every installation has).
All layers attend to a window of 32 tokens. Some also attend to compressed keys of 4 tokens each, of which an indexer
selects 8, and some to all compressed keys of 32 tokens each. In the first stage, rows attend to all compressed keys. In
the second, only the indexers are trained: they learn to predict the attention weights. In the third, the whole model is
trained, with attention to only the compressed keys that the indexers select.

The program prints losses on text that is not used for training, and the recall: the part of the attention's weights on
compressed keys that is on the selected ones.

    python examples/train_v4.py                  # a few minutes on two cores; a picture needs matplotlib

The exit code is 1 if the goals below are missed.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer
from byte_model import Model, draw, held_out_loss, read_text
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor
from torch.nn.functional import cross_entropy

import fusion_attention as fa
from fusion_attention.nn import CompressedAttention, rope_table, set_stage

GOAL = 0.9  # goal: least ratio of the recall after the last stage and that of the best keys
FULL = 300  # dense steps of a full run; shorter runs need not reach the goals
CONTEXT, BATCH, DIM, WINDOW, RATIO, TOP_K, FAR = 256, 4, 128, 32, 4, 8, 32
CHOSEN = {"ratio": RATIO, "top_k": TOP_K, "index_heads": 4, "index_dim": 32}
KINDS: tuple[dict[str, int], ...] = ({}, CHOSEN, {"ratio": FAR}, CHOSEN)  # of the layers, in order
Lists = Tensor | None


def model_of() -> Model:
    """Returns an untrained model with the layers in KINDS."""
    sizes = {"head_dim": 32, "q_rank": 64, "window": WINDOW, "out_groups": 2, "out_rank": 64}
    attentions = (CompressedAttention(DIM, 4, **sizes, **kind) for kind in KINDS)
    return Model(DIM, attentions, rope_table(torch.arange(CONTEXT), 16))


# -------------------------------------------------------------------------------------------------------- measurements


def chosen_by(layer: CompressedAttention, by: str, hidden: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[float, Tensor]:
    """Returns a layer's recall, the part of the weights on compressed keys that is on selected ones, and their lists.

    The sum of some keys' weights is the difference of exp(lse) with and without them. The first TOP_K * RATIO rows are
    left out: they see at most TOP_K compressed keys, and select all of them.

    Args:
        by: what selects the keys: "indexer"; "chance" (random keys); or "attention" (the largest weights, the best that
            one list for all heads can reach).
    """
    query, q, k = layer.project(hidden, rope)
    entries = layer.compressor.compressed(hidden, rope)
    row, entry = torch.arange(CONTEXT)[:, None], torch.arange(entries.shape[1])
    visible = (entry + 1) * RATIO <= row + 1
    if by == "indexer":
        assert layer.indexer is not None
        index = layer.indexer(hidden, query, rope)
        lists, _ = fa.lightning_indexer(index.q, index.k, index.weights, TOP_K, ratio=RATIO)
    else:
        p = torch.rand(len(hidden), *visible.shape, generator=torch.Generator().manual_seed(0))
        if by == "attention":
            scores = torch.einsum("bihd,bjd->bhij", q, entries[:, :, 0]) * q.shape[-1] ** -0.5
            p = (scores - log_sum(layer, q, k, entries, None)[..., None]).exp().mean(1)
        lists = p.masked_fill(~visible, -1).topk(TOP_K)
        lists = lists.indices.masked_fill(lists.values < 0, -1)[:, :, None]
    window, some, every = (log_sum(layer, q, k, entries, one) for one in (torch.full_like(lists, -1), lists, None))
    first = TOP_K * RATIO
    mass = [(lse - every)[..., first:].exp().sum().item() for lse in (window, some, every)]
    return (mass[1] - mass[0]) / (mass[2] - mass[0]), lists


def log_sum(layer: CompressedAttention, q: Tensor, k: Tensor, entries: Tensor, lists: Lists) -> Tensor:
    """Returns log(sum(exp(score))) of window, sink and compressed keys (listed; None: all), [B, heads, CONTEXT]."""
    band, sink = fa.Band.window(WINDOW - 1), layer.sinks
    return fa.compressed_attention(q, k, entries, lists, ratio=RATIO, band=band, sink=sink, return_lse=True)[1]


@torch.no_grad()
def selections(model: Model, tokens: Tensor, by: str) -> Iterator[tuple[float, Tensor]]:
    """Yields recall and lists of every layer with an indexer, with attention to all compressed keys."""
    x = model.embed(tokens)
    for block in model.blocks:
        if block.attention.indexer is not None:
            yield chosen_by(block.attention, by, block.before(x), model.rope)
        x = block(x, model.rope)[0]


def recall(model: Model, text: Tensor, by: str = "indexer") -> list[float]:
    """Returns the recall of every layer with an indexer, on held-out text."""
    stage = model.blocks[0].attention.stage
    set_stage(model.eval(), "dense")
    results = [recalled for recalled, _ in selections(model, draw(text, BATCH, CONTEXT, 99)[0], by)]
    set_stage(model.train(), stage)
    return results


# ------------------------------------------------------------------------------------------------------------ training


@dataclass
class Curves:
    """The measurements of a run, by stage."""

    losses: dict[str, list[float]] = field(default_factory=dict)
    index_losses: dict[str, list[float]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    held_out: dict[str, float] = field(default_factory=dict)
    recalls: dict[str, list[float]] = field(default_factory=dict)


def train(model: Model, texts: tuple[Tensor, Tensor], steps: int, console: Console) -> Curves:
    """Runs the three stages."""
    curves, step, batches = Curves(), 0, min(8, steps)
    # One optimizer for all stages: it does not change parameters without a gradient.
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.99), weight_decay=0.01)
    curves.held_out["untrained"] = held_out_loss(model, texts[1], BATCH, CONTEXT, batches)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        for stage, count in (("dense", steps), ("warmup", math.ceil(steps / 3)), ("sparse", math.ceil(steps / 3))):
            if stage == "warmup":
                curves.recalls["random keys"] = recall(model, texts[1], "chance")
                curves.recalls["indexer, untrained"] = recall(model, texts[1])
            set_stage(model, stage)
            losses, index_losses = curves.losses.setdefault(stage, []), curves.index_losses.setdefault(stage, [])
            bar, start = progress.add_task(stage, total=count), time.perf_counter()
            for _ in range(count):
                tokens, following = draw(texts[0], BATCH, CONTEXT, 1000 + step)
                logits, index_loss = model(tokens)
                loss = cross_entropy(logits.flatten(0, 1), following.flatten())
                (index_loss if stage == "warmup" else loss + index_loss).backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                index_losses.append(index_loss.item())
                step += 1
                progress.update(bar, advance=1, description=f"{stage} {losses[-1]:.3f}, KL {index_losses[-1]:.3f}")
            curves.seconds[stage] = time.perf_counter() - start
            curves.held_out[stage] = held_out_loss(model, texts[1], BATCH, CONTEXT, batches)
            if stage != "dense":
                curves.recalls[f"indexer, after {stage}"] = recall(model, texts[1])
    curves.recalls["the best keys of one list"] = recall(model, texts[1], "attention")
    return curves


# ------------------------------------------------------------------------------------------------------------- results


def report(curves: Curves, console: Console) -> bool:
    """Prints the results; returns True if the goals are reached."""
    times = Table(title="Stages")
    for name in ("stage", "steps", "held-out loss per byte", "indexers first", "indexers last", "ms per step"):
        times.add_column(name, justify="right")
    times.add_row("untrained", "0", f"{curves.held_out['untrained']:.3f}", "", "", "")
    for stage, losses in curves.losses.items():
        index = curves.index_losses[stage]
        between = ("", "") if stage == "dense" else (f"{index[0]:.3f}", f"{index[-1]:.3f}")
        per_step = f"{curves.seconds[stage] / len(losses) * 1e3:.0f}"
        times.add_row(stage, str(len(losses)), f"{curves.held_out[stage]:.3f}", *between, per_step)
    console.print(times)
    shares = Table(title=f"Recall: part of compressed keys' weights on {TOP_K} selected ones (held-out text)")
    for name in ("keys", *(f"layer {i}" for i, kind in enumerate(KINDS) if "top_k" in kind), "mean"):
        shares.add_column(name, justify="right")
    means = {name: sum(values) / len(values) for name, values in curves.recalls.items()}
    for name, values in curves.recalls.items():
        shares.add_row(name, *(f"{value:.3f}" for value in (*values, means[name])))
    console.print(shares)
    best = means["the best keys of one list"]
    first, last = (means[f"indexer, {when}"] / best for when in ("untrained", "after sparse"))
    console.print(
        f"recall over that of the best keys: untrained {first:.3f}, after the sparse stage {last:.3f} (goal {GOAL})"
    )
    falls = curves.held_out["untrained"] > curves.held_out["dense"] > curves.held_out["sparse"]
    return falls and last >= GOAL > first


def picture(model: Model, curves: Curves, text: Tensor, path: Path, console: Console) -> None:
    """Draws the losses of all stages, and the compressed keys that one layer selects in one text."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        console.print("no picture: matplotlib is not installed")
        return
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    panels = (
        (left, curves.losses, ("dense", "sparse"), "The model", "loss per byte"),
        (middle, curves.index_losses, ("warmup", "sparse"), "The indexers", "KL, sum of layers"),
    )
    for panel, values, stages, title, label in panels:
        start = 0
        for stage in stages:
            panel.plot(range(start, start + len(values[stage])), values[stage], label=stage, lw=1)
            start += len(values[stage])
        panel.set(xlabel="steps", ylabel=label, title=title)
        panel.legend()
    set_stage(model.eval(), "sparse")
    *_, (_, lists) = selections(model, draw(text, BATCH, CONTEXT, 99)[0], "indexer")
    count = CONTEXT // RATIO
    chosen = torch.zeros(CONTEXT, count + 1).scatter_(1, lists[0, :, 0].long() % (count + 1), 1)
    right.imshow(chosen[:, :count], cmap="Blues", interpolation="nearest", aspect="auto")
    right.set(xlabel=f"compressed key, {RATIO} tokens each", ylabel="row", title=f"Chosen by the last layer ({TOP_K})")
    figure.savefig(path, dpi=110)
    plt.close(figure)
    console.print(f"picture: {path}")


def main(
    steps: Annotated[int, typer.Option(min=1, help="Dense steps; the other stages take a third each.")] = FULL,
    folder: Annotated[Path, typer.Option(help="Folder of the picture.")] = Path("build/train_v4"),
    seed: Annotated[int, typer.Option(help="Seed of the initial weights.")] = 0,
) -> None:
    """Trains a model in three stages: dense, warm-up and sparse."""
    console = Console()
    text = read_text()
    texts = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    torch.manual_seed(seed)
    model = model_of()
    console.print(
        f"{len(text)} bytes of text, {sum(p.numel() for p in model.parameters())} weights, context {CONTEXT}; "
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32"
    )
    curves = train(model, texts, steps, console)
    reached = report(curves, console)
    folder.mkdir(parents=True, exist_ok=True)
    picture(model, curves, texts[1], folder / "train_v4.png", console)
    if steps < FULL:
        console.print(f"the goals apply to runs of {FULL} steps or more")
    raise typer.Exit(0 if reached or steps < FULL else 1)


if __name__ == "__main__":
    typer.run(main)
