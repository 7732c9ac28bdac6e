"""How long context parallel attention takes on 8 to 4096 ranks, by a model of operations and bytes.

The model knows what each schedule computes and sends (docs/distributed.md has the formulas); a machine says how fast it
does both. It knows no contention, no stragglers and no collective that is cleverer than point to point. On this
machine's gloo it is checked against what was measured (benchmarks/distributed.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console

from benchmarks.report import Report

SCHEDULES = ("allgather", "zigzag", "ulysses", "ulysses+ring")
RANKS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
GB = 1e9


@dataclass(frozen=True)
class Step:
    """One layer's attention, forward and backward, of one text that all ranks share; causal.

    Attributes:
        tokens: of the text.
        heads_q, heads_kv, dim: of the layer.
        size: bytes of an element; gradients of keys travel in float32.
    """

    tokens: int
    heads_q: int = 32
    heads_kv: int = 8
    dim: int = 128
    size: int = 2

    @property
    def flops(self) -> float:
        """Two products forward and five backward, over half of all pairs."""
        return 2 * 7 * self.heads_q * self.dim * self.tokens**2 / 2


@dataclass(frozen=True)
class Machine:
    """What ranks do in a second.

    Attributes:
        name: and where the figures are from.
        flops: of attention, of one rank.
        node: ranks that the fast links join.
        near, far: bytes that a rank sends in a second, and receives meanwhile, within a node and between nodes.
        wait: seconds that a message takes before its first byte.
    """

    name: str
    flops: float
    node: int
    near: float
    far: float
    wait: float

    def sent(self, count: float, ranks: int) -> float:
        """Seconds for bytes that a rank sends among so many neighbours: the slowest link of a ring decides."""
        return count / (self.near if ranks <= self.node else self.far)


H100 = Machine("H100: 4th-generation NVLink 450 GB/s each way, 400 Gb/s InfiniBand", 400e12, 8, 450 * GB, 50 * GB, 1e-5)


@dataclass(frozen=True)
class Cost:
    """What one rank does of a step: bytes sent, messages one behind the other, seconds; None where it cannot run.

    Attributes:
        memory: bytes of keys, values and their gradients of other ranks that are held at once.
    """

    sent: float
    messages: int
    seconds: float
    memory: float


def cost(step: Step, machine: Machine, ranks: int, schedule: str) -> Cost | None:
    """The cost of a schedule; None where it cannot run on so many ranks.

    Ulysses spreads heads, so it has no more ranks than heads; with a ring it takes a node's ranks, or as many as there
    are key heads, and the ring the rest.
    """
    share = (ranks - 1) / ranks
    keys = 2 * step.tokens * step.heads_kv * step.dim  # elements of all keys and values
    compute = step.flops / machine.flops / ranks
    if schedule == "allgather":
        # Gathered forward and again backward; gradients of all keys go home in float32.
        sent = share * keys * (2 * step.size + 4)
        seconds = compute + machine.sent(sent, ranks) + 3 * machine.wait
        return Cost(sent, 3, seconds, keys * (step.size + 4))
    if schedule == "zigzag":
        # Forward keys travel, backward keys and their gradients; each step hides behind the computing, or the reverse.
        sent = share * keys * (2 * step.size + 4)
        waits = 2 * (ranks - 1) * machine.wait
        return Cost(
            sent, 2 * (ranks - 1), max(compute, machine.sent(sent, ranks) + waits), 2 * keys * (step.size + 4) / ranks
        )
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
    ring = max(compute, machine.sent(travelled, ranks) + waits)
    seconds = ring + machine.sent(exchanged, inner) + 4 * machine.wait
    return Cost(exchanged + travelled, 4 + 2 * (outer - 1), seconds, 2 * keys * (step.size + 4) / ranks)


def _exchanged(step: Step, rows: float, ranks: int) -> float:
    """Bytes of the exchanges of rows against heads: q, k, v and out forward; backward q, k, v, out, dout and the
    gradients of q, k and v; and both times two statistics of a row and head."""
    elements = 6 * (step.heads_q + step.heads_kv) * step.dim * step.size + 2 * 8 * step.heads_q
    return rows * elements * (ranks - 1) / ranks


def show(console: Console, step: Step | None = None, machine: Machine = H100) -> list[dict[str, object]]:
    """Prints which schedule is fastest on how many ranks."""
    step = step or Step(1 << 20)
    report = Report(
        console,
        f"{step.tokens} tokens, {step.heads_q}/{step.heads_kv} heads of {step.dim}, causal, forward and backward: "
        f"ms a layer by the model, and the share of it that computes. {machine.name}",
        {"ranks": 6, **dict.fromkeys(SCHEDULES, 16), "fastest": -14},
    )
    rows: list[dict[str, object]] = []
    for ranks in RANKS:
        found = {name: cost(step, machine, ranks, name) for name in SCHEDULES}
        there = {name: c for name, c in found.items() if c is not None}
        compute = step.flops / machine.flops / ranks
        cells = ["" if c is None else f"{c.seconds * 1e3:.3g} ({compute / c.seconds:.2f})" for c in found.values()]
        fastest = min(there, key=lambda name: there[name].seconds)
        report.add(str(ranks), *cells, fastest)
        rows.append({"ranks": ranks, "fastest": fastest, **{name: c.seconds for name, c in there.items()}})
    return rows
