"""Trains a small language model on texts that are distributed over the ranks (processes) of a process group.

Each rank has a part of every text, and of the weights (FSDP2), and attention computes over whole texts. The model is a
transformer whose tokens are bytes, and it learns Python's help topics. The losses equal those of one process:

    python examples/train_context_parallel.py --steps 20 --folder build/one
    torchrun --nproc-per-node 4 examples/train_context_parallel.py --steps 20 --compare build/one

A run continues from its last checkpoint, also with another number of ranks. With `--max-restarts`, torchrun restarts
the run when a rank dies. To try it, end one of the processes by `kill -9`:

    torchrun --nproc-per-node 4 --max-restarts 3 examples/train_context_parallel.py --steps 60 --every 5

The exit code is 1 if --compare finds a loss that differs by more than TOLERANCE.
"""

import argparse
import datetime
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from byte_model import read_text
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import fusion_attention as fa
from fusion_attention import distributed
from fusion_attention.nn import apply_rope, rope_table

TOLERANCE = 2e-5  # for losses near 5: float32 rounding errors, which grow over the steps
DIM, HEADS, KV_HEADS, LAYERS = 128, 4, 2, 2


class Block(nn.Module):
    """Attention over all ranks and a two-layer network, each with a norm and a residual connection."""

    def __init__(self, schedule: str) -> None:
        super().__init__()
        self.schedule, size = schedule, DIM // HEADS
        self.before, self.out = nn.RMSNorm(DIM), nn.Linear(DIM, DIM, bias=False)
        self.rows = nn.Linear(DIM, (HEADS + 2 * KV_HEADS) * size, bias=False)
        self.network = nn.Sequential(nn.RMSNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], tokens: int) -> Tensor:
        """Computes the layer.

        Args:
            x: [batch, this rank's tokens, DIM].
            rope: cosines and sines of the tokens' positions.
            tokens: of whole texts.
        """
        q, k, v = self.rows(self.before(x)).unflatten(-1, (-1, DIM // HEADS)).split((HEADS, KV_HEADS, KV_HEADS), 2)
        q, k = apply_rope(q, rope), apply_rope(k, rope)
        mixed = distributed.attention(q, k, v, schedule=self.schedule, tokens=tokens, band=fa.Band.causal())
        x = x + self.out(mixed.flatten(2))
        return x + self.network(x)


class Model(nn.Module):
    """A language model: takes bytes, returns logits of the next byte."""

    def __init__(self, schedule: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, DIM)
        self.blocks = nn.ModuleList(Block(schedule) for _ in range(LAYERS))
        self.head = nn.Sequential(nn.RMSNorm(DIM), nn.Linear(DIM, 256, bias=False))

    def forward(self, bytes_: Tensor, positions: Tensor, tokens: int) -> Tensor:
        """Returns logits [batch, n, 256].

        Args:
            bytes_: this rank's part of the texts, [batch, n].
            positions: of the n bytes in their text.
            tokens: of whole texts.
        """
        x, rope = self.embed(bytes_), rope_table(positions, DIM // HEADS)
        for block in self.blocks:
            x = block(x, rope, tokens)
        logits: Tensor = self.head(x)
        return logits


class Run:
    """The model, its optimizer, and the progress of the run."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)  # the same weights on every rank, whatever their number
        self.options, self.model = options, Model(options.schedule)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in (*self.model.blocks, self.model):
            fully_shard(module, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.rate)
        self.losses: list[float] = []
        self.text = read_text()
        self.positions = distributed.positions(None, options.schedule, options.tokens)

    def step(self) -> None:
        """Trains on one text: forward, backward, update."""
        options, world = self.options, dist.get_world_size()
        start = torch.Generator().manual_seed(1000 + len(self.losses))
        first = int(torch.randint(len(self.text) - options.tokens, (), generator=start))
        full = self.text[first : first + options.tokens + 1][None]
        tokens, following = (
            distributed.shard(tensor, None, options.schedule, options.tokens) for tensor in (full[:, :-1], full[:, 1:])
        )
        logits = self.model(tokens, self.positions, options.tokens)
        loss = cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="sum") / options.tokens
        (loss * world).backward()  # FSDP takes the mean over ranks; the loss is their sum
        self.optimizer.step()
        self.optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        self.losses.append(total.item())

    def save(self) -> None:
        """Writes a new checkpoint, then the file last.json that names it, then removes older ones: at any time, the
        checkpoint that last.json names is complete."""
        folder, step = self.options.folder, len(self.losses)
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder / f"step-{step}")
        if dist.get_rank() == 0:
            draft = folder / "last.draft"
            draft.write_text(json.dumps({"step": step, "losses": self.losses, "settings": settings(self.options)}))
            draft.replace(folder / "last.json")
            for older in folder.glob("step-*"):
                if older.name != f"step-{step}":
                    shutil.rmtree(older)
        dist.barrier()

    def load(self) -> None:
        """Loads the last checkpoint of the folder, if there is one."""
        path = self.options.folder / "last.json"
        if not path.exists():
            return
        last = json.loads(path.read_text())
        if last["settings"] != settings(self.options):
            raise SystemExit(f"{path} was written with other options; remove its folder, or give another --folder")
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=self.options.folder / f"step-{last['step']}")
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.losses = last["losses"]


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the options on which the losses depend; they do not depend on the number of ranks and the schedule."""
    return {"tokens": options.tokens, "rate": options.rate}


def train(run: Run, console: Console) -> None:
    """Runs the remaining steps."""
    options, world = run.options, dist.get_world_size()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=options.steps, completed=len(run.losses))
        while len(run.losses) < options.steps:
            run.step()
            progress.update(bar, completed=len(run.losses), description=f"ranks: {world}, loss {run.losses[-1]:.3f}")
            if len(run.losses) % options.every == 0 or len(run.losses) == options.steps:
                run.save()


def agrees(losses: list[float], folder: Path, console: Console) -> bool:
    """True if the losses equal those of another run within TOLERANCE."""
    others = json.loads((folder / "last.json").read_text())["losses"]
    both = list(zip(losses, others, strict=False))
    difference = max(abs(one - other) for one, other in both)
    good = difference <= TOLERANCE
    console.print(
        f"largest difference of {len(both)} losses from {folder}: {difference:.1e}: "
        + ("the curves agree" if good else "FAILED: they differ")
    )
    return good


def join() -> None:
    """Joins the process group; creates one of a single process without torchrun."""
    store: Any
    if "RANK" in os.environ:
        result, rank, world = next(dist.rendezvous("env://"))
        # The store continues after a restart; another prefix hides the addresses of the ranks that died.
        store = dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}", result)
    else:
        store, rank, world = dist.HashStore(), 0, 1
    # When a rank dies, the others fail after this time at the latest, and torchrun restarts all of them.
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=20))


def main() -> None:
    """Trains in one process, or in as many as torchrun starts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=4096, help="bytes of a text")
    parser.add_argument("--schedule", default="zigzag", help="allgather, ring, zigzag or ulysses")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--every", type=int, default=10, help="steps from one checkpoint to the next")
    parser.add_argument("--folder", type=Path, default=Path("build/train_context_parallel"))
    parser.add_argument("--compare", type=Path, help="folder of another run, whose losses must be the same")
    options = parser.parse_args()
    join()
    console = Console(quiet=dist.get_rank() != 0, soft_wrap=True)
    options.folder.mkdir(parents=True, exist_ok=True)
    run = Run(options)
    run.load()
    console.print(
        f"{options.tokens} bytes a text, {len(run.positions)} of them on rank 0 of {dist.get_world_size()}, "
        f"{options.schedule}, process {os.getpid()}; begins at step {len(run.losses)}"
    )
    start, done = time.perf_counter(), len(run.losses)
    train(run, console)
    if len(run.losses) > done:
        seconds = (time.perf_counter() - start) / (len(run.losses) - done)
        console.print(
            f"loss {run.losses[0]:.4f} at first, {run.losses[-1]:.4f} at last; {options.tokens / seconds:.0f} tokens/s"
        )
    good = options.compare is None or agrees(run.losses, options.compare, console)
    dist.destroy_process_group()
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
