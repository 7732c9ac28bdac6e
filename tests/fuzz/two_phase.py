"""Every two-phase record: legal calls in strange memory, broken ones, and phases in the wrong order.

A legal call gives the same bits wherever its tensors lie, and writes nothing but its outputs; a refused one writes
nothing at all and says which code.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import islice
from typing import Any

import torch
from support.two_phase import call, handles_of, outputs_of

from fusion_attention import ContractError, ContractWarning, acl, aclnn
from fusion_attention.contract import Op, bind
from fusion_attention.contract.sampling import InvalidSample, invalid_samples, sample
from fusion_attention.ops import RECORDS

from .core import Drawn, Results, Value, exact
from .storage import Rng, Tensor, maybe, pick, place

OPERATORS = [op for name, op in RECORDS.items() if name.startswith("aclnn") and op.asked]  # metadata has no rule
RUNTIME = 361001
Args = dict[str, Any]


def draw(rng: Rng) -> Drawn:
    op = OPERATORS[int(rng.integers(len(OPERATORS)))]
    if maybe(rng, 0.45):
        return _draw_poisoned(rng, op)
    rule = op.asked[int(rng.integers(len(op.asked)))]
    layouts = [name for name in op.layouts if name in (rule.only or op.layouts)]
    args = sample(op, **{op.layout_attr: layouts[0], **rule.given})
    if not rule.given or maybe(rng, 0.2) or not _taken(op, args) or not _all_outputs(op, args):
        args = sample(op, **{op.layout_attr: str(pick(rng, *op.layouts))})
    args = {name: _other_numbers(rng, op, name, value) for name, value in args.items()}
    if maybe(rng, 0.25):
        return _draw_disorder(rng, op, args)
    return _draw_legal(rng, op, args)


def _other_numbers(rng: Rng, op: Op, name: str, value: Any) -> Any:
    """Numbers that are not the sample's, where only their kind matters."""
    free = isinstance(value, Tensor) and value.is_floating_point() and name in ("query", "key", "value", "dy", "pse")
    if not free or not value.numel() or op.by_name[name].make:  # type: ignore[union-attr]
        return value
    return value[torch.from_numpy(rng.permutation(len(value)))] * float(rng.choice([0.5, 1.0, -1.0]))


def _taken(op: Op, args: Args) -> bool:
    """Whether the record takes the settings that one of its rules is asked about; another rule may refuse them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ContractWarning)
        try:
            bind(op, args, strict=True)
        except ContractError:
            return False
    return True


def _all_outputs(op: Op, args: Args) -> bool:
    """Whether the call's own tensors show how large its outputs are."""
    outputs = outputs_of(op, args)
    return all(p.optional or outputs[p.name] is not None for p in op.tensors(output=True))


def _lists(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], Tensor)


class _Watched:
    """Outputs in memory of which every byte is known."""

    def __init__(self, rng: Rng, outputs: Mapping[str, Tensor | None], contiguous: float) -> None:
        self.tensors = {name: None if t is None else place(rng, t, contiguous) for name, t in outputs.items()}
        self.before = {n: _bytes(t) for n, t in self.tensors.items() if t is not None}

    def touched(self, everywhere: bool) -> int:
        """Bytes that changed: of everything, or of what lies around the outputs."""
        count = 0
        for name, before in self.before.items():
            tensor = self.tensors[name]
            assert tensor is not None
            now = _bytes(tensor)
            if not everywhere:
                copy_before = tensor.clone()
                old = torch.empty(0, dtype=tensor.dtype).set_(
                    before.clone().untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
                )
                tensor.copy_(old)
                now = _bytes(tensor)
                tensor.copy_(copy_before)
            count += int((now != before).sum())
        return count


def _bytes(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),)).clone()


def _start() -> None:
    acl.init()
    acl.rt.set_device(0)


@contextmanager
def _started() -> Iterator[None]:
    _start()
    try:
        yield
    finally:
        acl.finalize()


def _code(code: int) -> Tensor:
    return torch.tensor([code])


def _draw_legal(rng: Rng, op: Op, args: Args) -> Drawn:
    moved = {
        name: place(rng, value)
        if isinstance(value, Tensor)
        else [place(rng, t) for t in value]
        if _lists(value)
        else value
        for name, value in args.items()
    }
    outputs, strange = outputs_of(op, args), _Watched(rng, outputs_of(op, args), 0.0)

    def run() -> Results:
        with _started():
            first = call(op, args, outputs, strict=True)
            second = call(op, moved, strange.tensors, strict=False)
        results = {
            f"{n} as {where}": _code(code)
            for where, pair in (("it is", first), ("moved", second))
            for n, code in zip(("phase 1", "phase 2"), pair, strict=True)
        }
        results["bytes written beside outputs"] = _code(strange.touched(everywhere=False))
        return results | {name: t.clone() for name, t in strange.tensors.items() if t is not None}

    def expect(got: Results) -> dict[str, Value]:
        wanted = {name: exact(_code(0)) for name in got if name not in outputs}
        return wanted | {name: exact(t) for name, t in outputs.items() if t is not None}

    return Drawn({"operator": op.name, **moved}, run, expect)


@cache
def _mistakes(name: str) -> int:
    """How many calls a record invalid samples."""
    return sum(1 for _ in invalid_samples(RECORDS[name]))


def _limited(op: Op, args: Args) -> bool:
    """Whether a call that a note is about is one that the chip's limits refuse."""
    try:
        bind(op, args, strict=True)
    except ContractError as error:
        return all(failure.rule is not None and failure.rule.level == "limit" for failure in error.failures)
    return False


def _draw_poisoned(rng: Rng, op: Op) -> Drawn:
    """A call that breaks one rule, and the code that its record gives."""
    broken: InvalidSample = next(islice(invalid_samples(op), int(rng.integers(_mistakes(op.name))), None))
    outputs = outputs_of(op, broken.args)
    # Asked strictly, the chip's limits may speak before the rule that is broken.
    strict = broken.level == "limit" or (broken.level not in ("meaning", "content") and maybe(rng, 0.5))
    strict = strict and not (broken.level == "note" and _limited(op, broken.args))
    content = broken.level == "content"
    watched = _Watched(rng, outputs, 1.0 if strict else 0.3)
    strictly = strict or not watched.tensors
    refused = broken.level in ("meaning", "limit", "content") or (broken.level == "doubt" and strictly)

    def run() -> Results:
        with _started():
            first, second = call(op, broken.args, watched.tensors, content, strict=strictly)
        return {
            "code": _code(first or second),
            "bytes written": _code(watched.touched(everywhere=True) if refused else 0),
        }

    def expect(_: Results) -> dict[str, Value]:
        return {"code": exact(_code(broken.code if refused else 0)), "bytes written": exact(_code(0))}

    about = {"operator": op.name, "broken": broken.id, "level": broken.level, "strict": strict, **broken.args}
    return Drawn(about, run, expect)


def _draw_disorder(rng: Rng, op: Op, args: Args) -> Drawn:
    """Too little workspace, an executor used twice, a tensor destroyed between the phases, no runtime at all."""
    how = str(pick(rng, "workspace", "twice", "destroyed", "finalized"))
    watched = _Watched(rng, outputs_of(op, args), 0.5)
    inputs = [p.name for p in op.params if isinstance(args.get(p.name), Tensor)]
    victim = str(pick(rng, *inputs))

    def run() -> Results:
        with _started():
            return _disordered(op, args, watched, how, victim)

    def expect(got: Results) -> dict[str, Value]:
        return {name: exact(_code(RUNTIME if name == "code" else 0)) for name in got}

    return Drawn({"operator": op.name, "how": how, "victim": victim, **args}, run, expect)


def _disordered(op: Op, args: Args, watched: _Watched, how: str, victim: str) -> Results:
    handles = handles_of(op, args, watched.tensors)
    first, size, executor = getattr(aclnn, op.name + "GetWorkspaceSize")(*handles.values(), strict=False)
    workspace = acl.rt.malloc(size)[0] if size else None
    second = getattr(aclnn, op.name)
    if how == "workspace" and not size:  # nothing to take away: the call is legal
        return {"first": _code(first), "second": _code(second(None, 0, executor, None))}
    if how == "twice":
        done = second(workspace, size, executor, None)
        if done:
            return {"first use": _code(done)}
        watched.before = {n: _bytes(t) for n, t in watched.tensors.items() if t is not None}
    elif how == "destroyed":
        acl.destroy_tensor(handles[victim])
    elif how == "finalized":
        acl.finalize()
    code = second(workspace, size - (how == "workspace"), executor, None)
    if how == "finalized":
        _start()
    return {"first": _code(first), "code": _code(code), "bytes written": _code(watched.touched(everywhere=True))}
