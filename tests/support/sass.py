"""Reads a kernel's machine code: finds the innermost loop with multiplications and counts its instructions.

If other instructions limit the tensor cores, their number determines the speed of a kernel; no GPU is needed.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

PRODUCTS = ("HGMMA", "HMMA", "UTCHMMA")
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,6})\*/\s+(?:@!?(U?P\w+)\s+)?([A-Z][\w.]*)([^;]*);")
_TARGET = re.compile(r"(0x[0-9a-f]+)")


class Instruction(NamedTuple):
    """An instruction; target: address of its jump, or 0."""

    address: int
    name: str
    always: bool  # true if it has no predicate
    target: int


@dataclass(frozen=True)
class Loop:
    """The numbers of instructions of an iteration: `most` on its longest path, `least` on its shortest."""

    most: int
    least: int
    stacked: int  # instructions that read or write the stack, on all paths


def instructions(code: str) -> list[Instruction]:
    """Parses the output of cuobjdump -sass for one kernel."""
    results = []
    for address, predicate, name, rest in _INSTRUCTION.findall(code):
        target = _TARGET.findall(rest) if name.split(".")[0] == "BRA" else []
        always = not predicate and ".DIV" not in name and not re.search(r"\bU?P\d", rest)
        results.append(Instruction(int(address, 16), name, always, int(target[-1], 16) if target else 0))
    return results


def _is(instruction: Instruction, *kinds: str) -> bool:
    return instruction.name.split(".")[0] in kinds


def _paths(body: list[Instruction]) -> Loop:
    """Returns the longest and shortest path through a loop; all jumps are forward, so one pass suffices."""
    at = {instruction.address: n for n, instruction in enumerate(body)}
    most, least = [-1] * len(body), [len(body)] * len(body)
    most[0] = least[0] = 1
    for n, one in enumerate(body[:-1]):
        if most[n] < 0:
            continue
        ways = [] if one.target and one.always else [n + 1]
        ways += [at[one.target]] if at.get(one.target, 0) > n else []
        for way in ways:
            most[way], least[way] = max(most[way], most[n] + 1), min(least[way], least[n] + 1)
    return Loop(most[-1], least[-1], sum(_is(one, "LDL", "STL") for one in body))


def loops(code: str) -> list[Loop]:
    """Returns the innermost loops that multiply on tensor cores; without any, those with the most multiply-adds."""
    listed = instructions(code)
    spans = sorted({(one.target, one.address) for one in listed if 0 < one.target < one.address})
    bodies = [[one for one in listed if first <= one.address <= last] for first, last in spans]

    def innermost(bodies: list[list[Instruction]]) -> list[list[Instruction]]:
        inside = lambda a, b: a is not b and a[0].address >= b[0].address and a[-1].address <= b[-1].address  # noqa: E731
        return [body for body in bodies if not any(inside(other, body) for other in bodies)]

    multiplying = [body for body in bodies if any(_is(one, *PRODUCTS) for one in body)]
    if not multiplying and bodies:
        adds = [sum(_is(one, "FFMA") for one in body) for body in bodies]
        multiplying = [body for body, count in zip(bodies, adds, strict=True) if count and count * 2 > max(adds)]
    # The main loop computes exponentials; loops without them only add means of values.
    main = [body for body in multiplying if any(one.name == "MUFU.EX2" for one in body)] or multiplying
    return [loop for body in innermost(main) if (loop := _paths(body)).most > 0]  # else: code moved after the loop
