"""Instructions of the variant v4+amx, disassembled: tile products without spills or needless loads."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from fusion_attention import _native

PRODUCT, CONFIG = "tdpbf16ps", "ldtilecfg"


class Instruction(NamedTuple):
    address: int
    name: str
    operands: str

    @property
    def target(self) -> int | None:
        match = re.match(r"([0-9a-f]+)\b", self.operands)
        return int(match.group(1), 16) if self.name.startswith("j") and match else None


Function = list[Instruction]


def disassembled(path: str) -> list[Function]:
    """Returns functions that use tiles. A module has no symbols: unwind tables give the functions' ranges."""
    command = ["objdump", "-d", "--no-show-raw-insn", path]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    line = re.compile(r"^\s+([0-9a-f]+):\s+(?:notrack |bnd )?(\S+) *(.*)$", re.MULTILINE)
    instructions = [Instruction(int(place, 16), name, operands) for place, name, operands in line.findall(listing)]
    command = ["readelf", "--debug-dump=frames", path]
    frames = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ranges = sorted((int(a, 16), int(b, 16)) for a, b in re.findall(r"FDE .*pc=([0-9a-f]+)\.\.([0-9a-f]+)", frames))
    return [f for f in split(instructions, ranges) if any("%tmm" in i.operands or i.name == CONFIG for i in f)]


def split(instructions: list[Instruction], ranges: list[tuple[int, int]]) -> Iterator[Function]:
    at = 0
    for begin, end in ranges:
        while at < len(instructions) and instructions[at].address < begin:
            at += 1
        first = at
        while at < len(instructions) and instructions[at].address < end:
            at += 1
        yield instructions[first:at]


def loops(function: Function) -> list[tuple[int, int]]:
    """Returns index pairs of backward jumps: the jump's target and the jump."""
    place = {instruction.address: i for i, instruction in enumerate(function)}
    return [
        (place[instruction.target], i)
        for i, instruction in enumerate(function)
        if instruction.target in place and place[instruction.target] <= i
    ]


def recurs(function: Function, start: int) -> bool:
    """Returns whether an instruction can be reached from itself."""
    place = {instruction.address: i for i, instruction in enumerate(function)}
    visited, left = set[int](), [start]
    while left:
        i = left.pop()
        instruction = function[i]
        following = [place[instruction.target]] if instruction.target in place else []
        if not instruction.name.startswith(("ret", "jmp", "ud2")) and i + 1 < len(function):
            following.append(i + 1)
        if start in following:
            return True
        left += [j for j in following if j not in visited]
        visited.update(following)
    return False


def faults(function: Function) -> list[str]:
    """Returns the instructions of a function that make tiles slow: spills, needless loads, configuration in loops."""
    messages = []
    for i, (_, name, operands) in enumerate(function):
        if name == CONFIG and recurs(function, i):
            messages.append("tiles are configured in a loop")
        if "%tmm" in operands and re.search(r"\(%rsp", operands):
            messages.append(f"tiles go to the stack: {name} {operands}")
        if name == "tilestored" and re.match(r"%tmm[4-7]", operands):
            messages.append(f"operands are stored: {operands}")
    around = loops(function)
    for first, last in around:
        inside = [instruction.name for instruction in function[first : last + 1]]
        if PRODUCT not in inside or any((a, b) != (first, last) and first <= a and b <= last for a, b in around):
            continue  # no innermost loop of products
        # Two by two tiles: each loaded operand enters two products.
        if "tilestored" in inside or inside.count("tileloadd") > inside.count(PRODUCT) + 1:
            messages.append(f"a loop of {inside.count(PRODUCT)} products has more traffic: {sorted(set(inside))}")
    return messages


def loop_products(functions: list[Function]) -> list[int]:
    """Returns the number of tile products of each loop that has some."""
    counts = []
    for function in functions:
        for first, last in loops(function):
            counts.append(sum(instruction.name == PRODUCT for instruction in function[first : last + 1]))
    return [count for count in counts if count]


@pytest.mark.slow  # disassembles the module
@pytest.mark.skipif("v4+amx" not in _native.cpu_features()["built"], reason="the compiler does not know AMX")
@pytest.mark.skipif(not (shutil.which("objdump") and shutil.which("readelf")), reason="no objdump or readelf")
def test_amx_code_multiplies_tiles_without_extra_tile_loads_or_stores() -> None:
    functions = disassembled(str(_native.__file__))
    assert not [fault for function in functions for fault in faults(function)]
    products = sum(instruction.name == PRODUCT for function in functions for instruction in function)
    assert products >= 40  # dense attention's blocks and panels of every height and width alone
    assert loop_products(functions).count(4) >= 4  # S, dP and dq; P v; dk and dv
    assert sum(instruction.name == CONFIG for f in functions for instruction in f) >= 2  # forward, backward
    for function in functions:  # where tiles multiply, vectors of pairs do not
        names = {instruction.name for instruction in function}
        assert not {PRODUCT, "vdpbf16ps"} <= names
