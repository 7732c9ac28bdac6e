"""Models the time of context-parallel attention on 8 to 4096 ranks.

The model counts the operations and bytes of each schedule (docs/distributed.md has the formulas) and divides them by a
machine's rates. It ignores contention and stragglers, and assumes that collectives use point-to-point messages. It is
compared with measurements of gloo on this machine.
"""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.distributed import DIM, HEADS, Ranks
from fusion_attention.bench.report import Report

SCHEDULES = ("allgather", "zigzag", "ulysses", "ulysses+ring")
RANKS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
GB = 1e9


@dataclass(frozen=True)
class Step:
    """Attention of one layer, forward and backward, over one causal sequence that is sharded across all ranks."""

    tokens: int  # length of the sequence
    # heads_q, heads_kv, dim: numbers of heads, and the head dim.
    heads_q: int = 32
    heads_kv: int = 8
    dim: int = 128
    size: int = 2  # bytes of an element; gradients of keys are sent in float32

    @property
    def flops(self) -> float:
        """Returns the floating-point operations: two products forward and five backward, over half of all pairs."""
        return 2 * 7 * self.heads_q * self.dim * self.tokens**2 / 2


@dataclass(frozen=True)
class Machine:
    """The rates of a machine's ranks."""

    name: str  # machine and source of its rates
    flops: float  # floating-point operations per second of attention on one rank
    node: int  # number of ranks with fast links
    # near, far: bytes per second that a rank sends while it receives as many, within a node and between nodes.
    near: float
    far: float
    wait: float  # latency of a message in seconds
    overlaps: bool = True  # messages do not slow the computation; false for gloo, where the same cores do both

    def beside(self, computing: float, sending: float) -> float:
        """Returns the seconds that `computing` and `sending` seconds take together."""
        return max(computing, sending) if self.overlaps else computing + sending

    def sent(self, count: float, ranks: int) -> float:
        """Returns the seconds to send `count` bytes in a ring of `ranks` ranks; its slowest link decides."""
        return count / (self.near if ranks <= self.node else self.far)


H100 = Machine("H100: 4th-generation NVLink 450 GB/s each way, 400 Gb/s InfiniBand", 400e12, 8, 450 * GB, 50 * GB, 1e-5)


@dataclass(frozen=True)
class Cost:
    """The cost of a step on one rank: bytes sent, sequential messages and seconds."""

    sent: float
    messages: int
    seconds: float
    memory: float  # largest number of bytes of keys, values and gradients from other ranks at one time


def cost(step: Step, machine: Machine, ranks: int, schedule: str) -> Cost | None:
    """Returns the cost of a schedule; None if it cannot run on so many ranks.

    Ulysses shards heads, so it runs on at most as many ranks as heads. Combined with a ring, it uses the ranks of a
    node, or as many as there are key heads; the ring connects these groups.
    """
    remote_fraction = (ranks - 1) / ranks
    keys = 2 * step.tokens * step.heads_kv * step.dim  # elements of all keys and values
    compute = step.flops / machine.flops / ranks
    if schedule == "allgather":
        # Keys are gathered in forward and backward; gradients of all keys return to their ranks in float32.
        sent = remote_fraction * keys * (2 * step.size + 4)
        seconds = compute + machine.sent(sent, ranks) + 3 * machine.wait
        return Cost(sent, 3, seconds, keys * (step.size + 4))
    if schedule == "zigzag":
        # Forward sends keys, backward keys and gradients; sending and computing overlap in each step.
        sent = remote_fraction * keys * (2 * step.size + 4)
        waits = 2 * (ranks - 1) * machine.wait
        seconds = machine.beside(compute, machine.sent(sent, ranks) + waits)
        return Cost(sent, 2 * (ranks - 1), seconds, 2 * keys * (step.size + 4) / ranks)
    if schedule == "ulysses":
        if ranks > step.heads_kv:
            return None
        sent = _exchanged(step, step.tokens / ranks, ranks)
        return Cost(sent, 4, compute + machine.sent(sent, ranks) + 4 * machine.wait, 0.0)
    inner = min(machine.node, step.heads_kv)
    outer = ranks // inner
    if outer < 2:
        return None
    exchanged = _exchanged(step, step.tokens / ranks, inner)
    travelled = (outer - 1) / outer * keys / inner * (2 * step.size + 4)
    waits = 2 * (outer - 1) * machine.wait
    ring = machine.beside(compute, machine.sent(travelled, ranks) + waits)
    seconds = ring + machine.sent(exchanged, inner) + 4 * machine.wait
    return Cost(exchanged + travelled, 4 + 2 * (outer - 1), seconds, 2 * keys * (step.size + 4) / ranks)


def _exchanged(step: Step, rows: float, ranks: int) -> float:
    """Returns the bytes exchanged between sequence and head sharding: q, k, v and out forward; q, k, v, out, dout
    and the gradients of q, k and v backward; two statistics of each row and head in both."""
    elements = 6 * (step.heads_q + step.heads_kv) * step.dim * step.size + 2 * 8 * step.heads_q
    return rows * elements * (ranks - 1) / ranks


@dataclass(frozen=True)
class Checked:
    """The milliseconds of a step on this machine's processes, measured and by the model."""

    ranks: int
    schedule: str
    measured: float
    model: float


def checked(quick: bool, turns: int) -> list[Checked]:
    """Compares the model with this machine, using its measured rates of computing and sending."""
    tokens, sizes, result = (2048, 1 << 20, []) if quick else (8192, 1 << 24, [])
    step = Step(tokens, HEADS, HEADS, DIM)
    for world in (2, 4, 8):
        with Ranks(world) as ranks:

            def slowest(what: str, length: int, ranks: Ranks = ranks, **words: Any) -> float:
                times = [max(rank["ms"] for rank in ranks.ask(what, length=length, **words)) for _ in range(turns + 1)]
                return statistics.median(times[1:]) / 1e3  # the first turn is a warm-up

            alone = tokens // 2
            computing = Step(alone, HEADS, HEADS, DIM).flops / slowest("alone", alone)
            sending = sizes / slowest("send", sizes)
            here = Machine("gloo", computing, 1, sending, sending, slowest("send", 1), overlaps=False)
            for schedule in ("allgather", "zigzag", "ulysses"):
                model = cost(step, here, world, schedule)
                if model is not None:
                    taken = slowest("step", tokens, schedule=schedule)
                    result.append(Checked(world, schedule, taken * 1e3, model.seconds * 1e3))
    return result


def modelled(step: Step, machine: Machine = H100) -> list[dict[str, Any]]:
    """Returns a row for each number of ranks: seconds of every schedule that can run, and of the computation alone."""
    rows = []
    for ranks in RANKS:
        results = {name: cost(step, machine, ranks, name) for name in SCHEDULES}
        there = {name: c.seconds for name, c in results.items() if c is not None}
        rows.append({"ranks": ranks, "computing": step.flops / machine.flops / ranks, **there})
    return rows


def show(quick: bool, turns: int, console: Console) -> dict[str, list[dict[str, Any]]]:
    """Prints the fastest schedule for each number of ranks, and the model's error on this machine."""
    tables = {}
    for tokens in (1 << 17, 1 << 20):
        step = Step(tokens)
        report = Report(
            console,
            f"{step.tokens} tokens, {step.heads_q}/{step.heads_kv} heads of {step.dim}, causal, forward and backward: "
            f"modelled ms per layer, and the fraction of it that is computation. {H100.name}",
            {"ranks": 6, **dict.fromkeys(SCHEDULES, 16), "fastest": -14},
        )
        for row in (rows := modelled(step)):
            cells = [
                f"{row[name] * 1e3:.1f} ({row['computing'] / row[name]:.2f})" if name in row else ""
                for name in SCHEDULES
            ]
            report.add(str(row["ranks"]), *cells, min((n for n in SCHEDULES if n in row), key=lambda n: row[n]))
        tables[str(tokens)] = rows
    report = Report(
        console, "Processes of one thread on this machine, over gloo", {"ranks": 6, "schedule": -12, "measured ms": 12,
        "model ms": 12, "ratio": 6},
    )  # fmt: skip
    tables["checked"] = []
    for one in checked(quick, turns):
        ratio = one.measured / one.model
        report.add(str(one.ranks), one.schedule, f"{one.measured:.0f}", f"{one.model:.0f}", f"{ratio:.2f}")
        tables["checked"].append(vars(one))
    return tables


def draw(tables: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Draws a layer's modelled time by ranks for two lengths, and this machine's modelled and measured times."""
    import matplotlib.pyplot as plt

    plt.style.use("default")
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    for axis, tokens in zip(axes, ("131072", "1048576"), strict=False):
        rows = tables[tokens]
        axis.plot(
            [r["ranks"] for r in rows], [r["computing"] * 1e3 for r in rows], "--", color="0.6", label="computing"
        )
        for name in SCHEDULES:
            there = [r for r in rows if name in r]
            axis.plot([r["ranks"] for r in there], [r[name] * 1e3 for r in there], marker="o", ms=4, label=name)
        axis.set(xscale="log", yscale="log", xlabel="ranks", ylabel="ms per layer, forward and backward")
        axis.set_xticks(RANKS[::3], [str(n) for n in RANKS[::3]])
        axis.set_title(f"{int(tokens):,} tokens, H100s (model)", fontsize=10)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8, frameon=False)
    rows = tables["checked"]
    names = [f"{r['ranks']} ranks\n{r['schedule']}" for r in rows]
    at = range(len(rows))
    axes[2].bar([x - 0.2 for x in at], [r["measured"] for r in rows], 0.4, label="measured")
    axes[2].bar([x + 0.2 for x in at], [r["model"] for r in rows], 0.4, label="model", color="0.7")
    axes[2].set_xticks(list(at), names, fontsize=7)
    axes[2].set(ylabel="ms per step")
    axes[2].set_title("this machine's processes over gloo, 2 cores", fontsize=10)
    axes[2].legend(fontsize=8, frameon=False)
    axes[2].grid(alpha=0.3, axis="y")
    figure.savefig(path, dpi=110)
    plt.close(figure)
