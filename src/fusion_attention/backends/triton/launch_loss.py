"""From the indexer's loss to launches: over whole bands by launch_warm_up.py, over selected keys here.

Selected keys: a chunk of rows has five kernels, after which the rows that it has for keys are added up (key_sum.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fusion_attention.backends.triton import (
    common,
    launch_key_sum,
    loss_parts,
    memory,
    selected_loss,
    shapes,
    shapes_loss,
)
from fusion_attention.backends.triton.launch_key_sum import KeySum, Where
from fusion_attention.backends.triton.launch_warm_up import (
    MOST,
    NOTE,
    Rooms,
    Roomy,
    bytes_of,
    given_by,
    lse_bytes,
    ready_warm,
    run_lse,
    warm_bytes,
)
from fusion_attention.backends.triton.launching import Constants, Family, Launch, Schedule
from fusion_attention.waist import tiles
from fusion_attention.waist.problem import (
    Extents,
    IndexerGrads,
    IndexerLossOperands,
    IndexerLossProblem,
    IndexerProblem,
)

__all__ = ["run_loss", "run_lse", "workspace_bytes"]

ROOM = 1 << 27  # elements of rows for keys that a chunk holds
ROWS = 64  # rows of a program of note(), keys of one of clean_keys()
SLOTS = 1024  # entries that scan() and compare() take at a time, at most
FAMILY = Family(
    selected_loss.scan, selected_loss.target, selected_loss.score, selected_loss.compare, selected_loss.gradients,
    loss_parts.note, loss_parts.clean_keys,
)  # fmt: skip


def run_loss(
    problem: IndexerLossProblem, extents: Extents, schedule: Schedule, o: IndexerLossOperands, g: IndexerGrads
) -> None:
    """Writes the loss and its gradients."""
    p, index = problem, o.index
    views: dict[str, memory.View | None] = {
        "q": o.q, "k": o.k, "max": o.stats.max, "sum": o.stats.sum,
        "q_rope": o.q_rope if p.dim_rope else None,
        "k_rope": o.k_rope if p.dim_rope else None,
        "index_q": index.q, "index_k": index.k, "weights": index.weights,
        "dq": g.dq, "dk": g.dk, "dweights": g.dweights,
    }  # fmt: skip
    if p.select_count:
        views["indices"] = index.indices
    else:
        assert index.stats is not None
        views |= {"index_max": index.stats.max, "index_sum": index.stats.sum}
    given = given_by(views)
    if p.has_sink:
        assert o.sink is not None
        given["sink"] = o.sink.to(torch.float32).contiguous()
    make = ready_selected if p.select_count else ready_warm
    ready = schedule.once(memory.layout(views, given), lambda: make(p, schedule.kept, views, given))
    given["like"] = given["q"]
    ready.run(given)
    # In one order, whatever the chunks were.
    o.loss.copy_(given["losses"].sum(dtype=torch.float64).expand(1))


def workspace_bytes(problem: IndexerProblem | IndexerLossProblem, schedule: Schedule) -> int:
    """What a verb allocates besides operands and results, at most."""
    e = schedule.kept.capacity
    if isinstance(problem, IndexerProblem):
        return lse_bytes(problem, e)
    if not problem.select_count:
        return warm_bytes(problem, e)
    keys, entries = int(e.kv_len.sum()), rows_of_chunk(problem) * problem.select_count
    sums = launch_key_sum.workspace_bytes(keys, shapes.power(problem.dim_index))
    return bytes_of(rooms_of(problem, e)) + sums + launch_key_sum.BYTES_OF_ENTRY * entries


# ------------------------------------------------------------------------------------------------- loss of selections


@dataclass(eq=False)
class Selected(Roomy):
    """What a loss over selected keys does: `launches` first, then those of each chunk of rows."""

    chunks: list[tuple[int, list[Launch]]] = field(default_factory=list)  # rows, launches
    width: int = 0  # of a row for a key
    dim: int = 0
    entries: int = 0  # of a list
    keys: int = 0
    where: Where | None = None

    def run(self, given: dict[str, Any]) -> None:
        """Launches chunk after chunk, adding up what each has for keys."""
        super().run(given)
        total = KeySum(given["like"], self.keys, self.width)
        for rows, launches in self.chunks:
            for each in launches:
                each.start(given)
            count = rows * self.entries
            total.add(given["rows"][: count * self.width].view(count, self.width), given["ids"][:count])
        assert self.where is not None
        total.write(given["dk"], "dk", 0, self.dim, 1, self.where)


def rows_of_chunk(p: IndexerLossProblem) -> int:
    """Rows whose lists are in scratch at one time."""
    return min(max(ROOM // (p.select_count * shapes.power(p.dim_index)), 1), MOST)


def token_table(capacity: Extents) -> np.ndarray:
    """[tokens, 4] int32: sequence, row and id of its key 0 (launch_key_sum.numbered)."""
    e = capacity
    seq = np.repeat(np.arange(len(e)), e.q_len)
    return np.stack((seq, np.arange(len(seq)) - e.q_start[seq], e.kv_start[seq], np.zeros_like(seq)), 1).astype(
        np.int32
    )


def row_table(e: Extents) -> np.ndarray:
    """[tiles, 8] int32: those of rows, as note() reads them."""
    t = tiles.by_query(e, ROWS)
    none = np.zeros_like(t.seq)
    rows = t.seq, t.row0, t.row1, none, none, none, none, e.q_start[t.seq] + t.row0
    return np.stack(rows, 1).astype(np.int32)


def key_table(e: Extents, capacity: Extents) -> np.ndarray:
    """[tiles, 8] int32: those of keys, as clean_keys() reads them; a row lies where its key's id says."""
    k = tiles.by_key(e, ROWS)
    none = np.zeros_like(k.seq)
    keys = k.seq, k.row0, k.row1, none, none, capacity.kv_start[k.seq] + k.row0, k.row1 - k.row0, none
    return np.stack(keys, 1).astype(np.int32)


def selected_constants(p: IndexerLossProblem, t: shapes_loss.Selected, align: int) -> dict[str, Constants]:
    """What each kernel of a loss over selected keys knows while compiling."""
    index = {"E": shapes.power(p.dim_index), "DIM_INDEX": p.dim_index, "ALIGN": align}
    group, slots = p.heads_q // p.heads_kv, min(SLOTS, shapes.power(p.select_count))
    heads = shapes.power(p.heads_index)
    return {
        "note": {"BM": ROWS},
        "clean_keys": index | {"BN": ROWS},
        "scan": {"BK": slots},
        "target": {
            "GROUP": group, "DIM": p.dim_qk, "DIM_ROPE": p.dim_rope, "ALIGN": align,
            "BH": min(shapes.power(group), t.target.BN), "BK": t.target.BM, "BC": t.columns,
        },
        "score": index | {"HI": heads, "PADDED": heads != p.heads_index, "BK": t.score.BM},
        "compare": {"BK": slots},
        "gradients": index | {"HI": heads, "BK": t.gradients.BM},
    }  # fmt: skip


def rooms_of(p: IndexerLossProblem, e: Extents) -> Rooms:
    """Scratch of a loss over selected keys, but for the sums per key."""
    wide, rows, width = torch.float32, int(e.q_len.sum()), shapes.power(p.dim_index)
    entries = min(rows, rows_of_chunk(p)) * p.select_count
    low = torch.bfloat16 if p.dtype == "bfloat16" else wide  # float16 holds no sum over heads
    found = {
        "notes": (rows * (p.heads_q + 1), wide, False),
        "keys": (int(e.kv_len.sum()) * width, p.torch_dtype, False),
        "ids": (entries, torch.int32, False),
        "scores": (entries, wide, False),
        "shares": (entries, wide, False),
        "rows": (entries * width, low, False),
        "losses": (rows, wide, False),
    }
    return found | ({"largest": (1, torch.int32, True)} if p.dtype == "float16" else {})


def ready_selected(
    p: IndexerLossProblem, held: memory.Kept, views: dict[str, memory.View | None], given: dict[str, Any]
) -> Selected:
    """What run_loss() does over selected keys, with memory as these views lie."""
    e, device = held.capacity, memory.one_device(given)
    table = memory.places(views | {"ids": launch_key_sum.numbered(given["q"], e, 1)}, len(e))
    t = tiles_on(p, device)
    known = selected_constants(p, t, memory.alignment(views, table))
    tables = (
        memory.Copied.of(table, device),
        held.on(device, "lengths", memory.lengths),
        held.on(device, "tokens", lambda _: token_table(e)),
        held.on(device, "rows", row_table),
        held.on(device, "keys", lambda now: key_table(now, e)),
        held.on(device, "written", launch_key_sum.key_tiles),
    )
    places, lengths, tokens, of_rows, of_keys, to_write = (each.tensor for each in tables)
    rooms, rows, width = rooms_of(p, e), int(e.q_len.sum()), shapes.power(p.dim_index)
    absent = {"q_rope", "k_rope", "sink", "largest"} - given.keys() - rooms.keys()
    kept = dict.fromkeys(absent) | {
        "count": len(e), "heads_q": p.heads_q, "heads_kv": p.heads_kv, "heads_index": p.heads_index,
        "step_head": 1, "step_row": p.heads_q + 1, "slots": p.select_count, "places": places, "lengths": lengths,
        "tokens": tokens, "tiles": of_rows, "exponent": p.scale * common.LOG2E.value,
    }  # fmt: skip
    own = [*(name for name in given if name != "dk"), *rooms]  # KeySum writes dk

    def launch(kernel: Any, grid: tuple[int, ...], tile: shapes.Tile, **more: Any) -> Launch:
        return FAMILY.launch(kernel, grid, kept | more, own, known[kernel.__name__], tile)

    first = [launch(loss_parts.note, (len(of_rows),), NOTE)] if len(of_rows) else []
    if len(of_keys):
        first.append(launch(loss_parts.clean_keys, (len(of_keys),), NOTE, tiles=of_keys))
    chunks = []
    for at in range(0, rows, rows_of_chunk(p)):
        count, here = min(rows - at, rows_of_chunk(p)), {"first": at}
        launches = [
            launch(selected_loss.scan, (count,), NOTE, **here),
            launch(selected_loss.target, (-(-p.select_count // t.target.BM), count), t.target, **here),
            launch(selected_loss.score, (count,), t.score, **here),
            launch(selected_loss.compare, (count,), NOTE, **here),
            launch(selected_loss.gradients, (count,), t.gradients, **here),
        ]
        chunks.append((count, launches))
    where = Where(places, to_write, len(e))
    keys = int(e.kv_len.sum())
    return Selected(first, tables, {}, rooms, chunks, width, p.dim_index, p.select_count, keys, where)


def tiles_on(problem: IndexerLossProblem, device: torch.device) -> shapes_loss.Selected:
    """The tiles of a loss over selected keys on a device."""
    chip = shapes.chip_of(device)
    found = None if chip is None else shapes_loss.selected_tiles(problem, chip)
    assert found is not None  # reasons_against() has looked
    return found
