"""Trains a small language model to attend to 64 of up to 512 keys, in the three stages of DeepSeek's sparse attention.

A transformer whose tokens are bytes learns English documentation (Python's help topics, which every installation has)
with dense attention. In the second stage only its indexers are trained: they learn to predict the attention weights. In
the third stage the whole model is trained, with attention to only the keys that the indexers select. A copy of the
model that stays dense takes the same steps, as a baseline.

The program prints losses on text that is not used for training, and the recall: the part of the dense attention's
weights that is on the selected keys.

    python examples/train_dsa.py                  # a few minutes on two cores; a picture needs matplotlib

A run that was interrupted continues from its last checkpoint. The exit code is 1 if the goals below are missed.
"""

import math
import os
import pickle
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from byte_model import Model, draw, held_out_loss, read_text
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor
from torch.nn.functional import cross_entropy

import fusion_attention as fa
from fusion_attention.nn import SparseSelfAttention, rope_table, set_stage

RECALL, WORSE = 0.8, 1.02  # goals: least recall after warm-up, and largest ratio of the sparse and the dense loss
FULL = 600  # dense steps of a full run; shorter runs need not reach the goals


@dataclass(frozen=True)
class Settings:
    """The options on which a run's numbers depend; a checkpoint is valid for the same options only."""

    steps: int = FULL
    context: int = 512
    batch: int = 4
    layers: int = 3
    dim: int = 128
    heads: int = 4
    kv_heads: int = 2
    top_k: int = 64
    rate: float = 2e-3
    seed: int = 0

    def schedule(self) -> list[tuple[str, int]]:
        """Returns (stage, steps) in order."""
        return [("dense", self.steps), ("warmup", math.ceil(self.steps / 3)), ("sparse", math.ceil(self.steps / 3))]


def model_of(s: Settings) -> Model:
    """Returns an untrained model with the layers of the settings."""
    sizes = {"kv_heads": s.kv_heads, "index_heads": 4, "index_dim": 32, "top_k": s.top_k}
    attentions = (SparseSelfAttention(s.dim, s.heads, **sizes) for _ in range(s.layers))
    return Model(s.dim, attentions, rope_table(torch.arange(s.context), s.dim // s.heads))


# ---------------------------------------------------------------------------------------------------------- the state


class Learner:
    """A model and its optimizer."""

    def __init__(self, model: Model, s: Settings) -> None:
        self.model = model
        # One optimizer for all stages: it does not change parameters without a gradient.
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=s.rate, betas=(0.9, 0.99), weight_decay=0.01)

    def step(self, tokens: Tensor, following: Tensor, stage: str) -> tuple[float, float]:
        """Runs one training step; returns (the model's loss, the indexers' loss)."""
        logits, index_loss = self.model(tokens)
        loss = cross_entropy(logits.flatten(0, 1), following.flatten())
        total = index_loss if stage == "warmup" else loss + index_loss
        total.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item(), index_loss.item()


@dataclass
class State:
    """The progress of a run, which a checkpoint contains."""

    settings: Settings
    learner: Learner
    baseline: Learner | None = None  # the copy that stays dense, from the first sparse step on
    step: int = 0
    losses: dict[str, list[float]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    recalls: dict[str, list[float]] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Replaces the checkpoint atomically, so that a crash leaves the old one."""
        learners = {"learner": self.learner, "baseline": self.baseline}
        state: dict[str, Any] = {
            name: {"model": one.model.state_dict(), "optimizer": one.optimizer.state_dict()}
            for name, one in learners.items()
            if one is not None
        }
        progress = {"step": self.step, "losses": self.losses, "seconds": self.seconds, "recalls": self.recalls}
        draft = path.with_suffix(".draft")
        with draft.open("wb") as file:
            torch.save({**state, **progress, "settings": asdict(self.settings)}, file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)

    def load(self, path: Path) -> None:
        """Loads a checkpoint of the same settings."""
        try:
            state = torch.load(path, weights_only=True)
        except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
            raise SystemExit(f"{path} is no checkpoint ({error}); remove it, or give another --folder") from error
        if state["settings"] != asdict(self.settings):
            raise SystemExit(f"{path} was written with other options; remove it, or give another --folder")
        if "baseline" in state:
            self.baseline = Learner(deepcopy(self.learner.model), self.settings)
            set_stage(self.baseline.model, "dense")
        for name, one in (("learner", self.learner), ("baseline", self.baseline)):
            if one is not None:
                one.model.load_state_dict(state[name]["model"])
                one.optimizer.load_state_dict(state[name]["optimizer"])
        self.step, self.losses, self.seconds, self.recalls = (
            state[name] for name in ("step", "losses", "seconds", "recalls")
        )


# -------------------------------------------------------------------------------------------------------- measurements


@torch.no_grad()
def selections(model: Model, tokens: Tensor, by: str) -> Iterator[tuple[float, Tensor]]:
    """Yields for each layer its recall, the part of dense attention's weights on the selected keys, and their lists.

    For a head and row, this is exp(lse of the selected keys - lse of all). Rows that see at most top_k keys are left
    out, since they select all of them.

    Args:
        by: what selects the keys: "indexer"; "chance" (random keys); or "attention" (the largest weights, the best that
            one list for all heads can reach).
    """
    x, top_k = model.embed(tokens), model.blocks[0].attention.indexer.top_k
    visible = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
    for block in model.blocks:
        hidden = block.before(x)
        q, k, v = block.attention.project(hidden, model.rope)
        if by == "indexer":
            lists = block.attention.indexer(hidden, rope=model.rope).indices
        elif by == "chance":
            drawn = torch.rand(len(x), *visible.shape, generator=torch.Generator().manual_seed(0))
            lists = drawn.masked_fill(~visible, -1).topk(top_k).indices.unsqueeze(2)
        else:
            scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2))
            mass = (scores * q.shape[-1] ** -0.5).masked_fill(~visible, -torch.inf).softmax(-1).mean(1)
            lists = mass.masked_fill(~visible, -1).topk(top_k).indices.unsqueeze(2)
        _, everything = fa.attention(q, k, v, band=fa.Band.causal(), return_lse=True)
        _, lse = fa.sparse_attention(q, k, v, lists.expand(*k.shape[:-1], -1), return_lse=True)
        yield (lse - everything)[..., top_k:].exp().mean().item(), lists
        x = block(x, model.rope)[0]


def recall(model: Model, text: Tensor, s: Settings, by: str = "indexer") -> list[float]:
    """Returns the recall of every layer on held-out text, with dense attention."""
    stage = model.blocks[0].attention.stage
    set_stage(model, "dense")
    results = [recalled for recalled, _ in selections(model.eval(), draw(text, s.batch, s.context, 99)[0], by)]
    set_stage(model.train(), stage)
    return results


# ------------------------------------------------------------------------------------------------------------ training


def advance(state: State, stage: str, train: Tensor) -> None:
    """Runs one step of a stage; in the sparse stage the dense copy takes the same step."""
    s = state.settings
    tokens, following = draw(train, s.batch, s.context, 1000 + state.step)
    for name, one in ((stage, state.learner), ("baseline", state.baseline)):
        if one is None:
            continue
        start = time.perf_counter()
        loss, index_loss = one.step(tokens, following, name)
        state.seconds[name] = state.seconds.get(name, 0.0) + time.perf_counter() - start
        state.losses.setdefault(name, []).append(loss)
        if name in ("warmup", "sparse"):
            state.losses.setdefault(f"{name} indexers", []).append(index_loss)
    state.step += 1


def enter(state: State, stage: str, held_out: Tensor) -> None:
    """Prepares a stage before its first step, and measures the recall."""
    s, model = state.settings, state.learner.model
    if stage == "warmup" and "best keys" not in state.recalls:
        state.recalls["random keys"] = recall(model, held_out, s, by="chance")
        state.recalls["best keys"] = recall(model, held_out, s, by="attention")
        state.recalls["indexer, untrained"] = recall(model, held_out, s)
    if stage == "sparse" and state.baseline is None:
        state.recalls["indexer, after warm-up"] = recall(model, held_out, s)
        set_stage(model, "dense")
        state.baseline = Learner(deepcopy(model), s)
        state.baseline.optimizer.load_state_dict(deepcopy(state.learner.optimizer.state_dict()))
    set_stage(model, stage)


def train(state: State, texts: tuple[Tensor, Tensor], path: Path, every: int, console: Console) -> None:
    """Runs the remaining steps."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        first = 0
        for stage, steps in state.settings.schedule():
            last = first + steps
            bar = progress.add_task(stage, total=steps, completed=min(steps, max(0, state.step - first)))
            if state.step < last:
                enter(state, stage, texts[1])
            while state.step < last:
                advance(state, stage, texts[0])
                loss = state.losses["warmup indexers" if stage == "warmup" else stage][-1]
                progress.update(bar, completed=state.step - first, description=f"{stage} {loss:.3f}")
                if state.step % every == 0:
                    state.save(path)
            first = last
    if "indexer, after sparse" not in state.recalls:
        state.recalls["indexer, after sparse"] = recall(state.learner.model, texts[1], state.settings)
    state.save(path)


# ------------------------------------------------------------------------------------------------------------- results


def report(state: State, held_out: Tensor, console: Console) -> bool:
    """Prints the results; returns True if the goals are reached."""
    s, sparse, baseline = state.settings, state.learner.model, state.baseline
    assert baseline is not None
    times = Table(title="Stages")
    for name in ("stage", "steps", "first loss", "last loss", "indexers first", "indexers last", "ms per step"):
        times.add_column(name, justify="right")
    for name, seconds in state.seconds.items():
        losses, index = state.losses[name], state.losses.get(f"{name} indexers")
        ends = [f"{values[at]:.3f}" if values else "" for values in (losses, index) for at in (0, -1)]
        times.add_row(name, str(len(losses)), *ends, f"{seconds / len(losses) * 1e3:.0f}")
    console.print(times)
    shares = Table(title=f"Recall: part of the dense attention's weights on {s.top_k} selected keys (held-out text)")
    for name in ("keys", *(f"layer {i}" for i in range(s.layers)), "mean"):
        shares.add_column(name, justify="right")
    for name, values in state.recalls.items():
        shares.add_row(name, *(f"{value:.3f}" for value in (*values, sum(values) / len(values))))
    console.print(shares)
    with_sparse, with_dense = (held_out_loss(model, held_out, s.batch, s.context) for model in (sparse, baseline.model))
    console.print(
        f"held-out loss per byte: sparse {with_sparse:.4f}, dense {with_dense:.4f}: "
        f"ratio {with_sparse / with_dense:.4f} (goal {WORSE})"
    )
    result = sum(state.recalls["indexer, after warm-up"]) / s.layers
    console.print(f"recall after warm-up {result:.3f} (goal {RECALL})")
    return with_sparse <= WORSE * with_dense and result >= RECALL


def picture(state: State, held_out: Tensor, path: Path, console: Console) -> None:
    """Draws the curves of all stages, and the keys that one layer selects in one text."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        console.print("no picture: matplotlib is not installed")
        return
    s = state.settings
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    starts = {"dense": 0, "baseline": s.steps, "sparse": s.steps}
    for name, start in starts.items():
        values = torch.tensor(state.losses[name])
        width = max(1, len(values) // 40)
        smooth = values.unfold(0, width, 1).mean(-1)
        left.plot(range(start + width - 1, start + len(values)), smooth, label=name, lw=1.2)
    left.set(xlabel="steps of the model", ylabel="loss per byte", title="The model")
    left.legend()
    start = 0
    for name in ("warmup indexers", "sparse indexers"):
        values = state.losses[name]
        middle.plot(range(start, start + len(values)), values, label=name, lw=1)
        start += len(values)
    middle.set(xlabel="steps of the indexers", ylabel="KL, sum of layers", title="The indexers", yscale="log")
    middle.legend()
    set_stage(state.learner.model, "sparse")
    *_, (_, lists) = selections(state.learner.model.eval(), draw(held_out, s.batch, s.context, 99)[0], by="indexer")
    chosen = torch.zeros(s.context, s.context + 1).scatter_(1, lists[0, :, 0].long() % (s.context + 1), 1)
    right.imshow(chosen[:, : s.context], cmap="Blues", interpolation="nearest")
    right.set(xlabel="key", ylabel="row", title=f"Keys chosen by layer {s.layers - 1} ({s.top_k} per row)")
    figure.savefig(path, dpi=110)
    plt.close(figure)
    console.print(f"picture: {path}")


def main(
    steps: Annotated[int, typer.Option(min=1, help="Dense steps; the other stages take a third each.")] = FULL,
    folder: Annotated[Path, typer.Option(help="Folder of checkpoint and picture.")] = Path("build/train_dsa"),
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 50,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights.")] = 0,
) -> None:
    """Trains a model in three stages (dense, warm-up, sparse), and a dense baseline."""
    console = Console()
    s = Settings(steps=steps, seed=seed)
    text = read_text()
    texts = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    torch.manual_seed(seed)
    state = State(s, Learner(model_of(s), s))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "checkpoint.pt"
    if path.exists():
        state.load(path)
        console.print(f"{path}: continues after step {state.step}")
    weights = sum(p.numel() for p in state.learner.model.parameters())
    console.print(
        f"{len(text)} bytes of text, {weights} weights, {s.top_k} keys of up to {s.context}; "
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32"
    )
    train(state, texts, path, save_every, console)
    reached = report(state, texts[1], console)
    picture(state, texts[1], folder / "train_dsa.png", console)
    if steps < FULL:
        console.print(f"the goals apply to runs of {FULL} steps or more")
    raise typer.Exit(0 if reached or steps < FULL else 1)


if __name__ == "__main__":
    typer.run(main)
