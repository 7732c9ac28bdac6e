"""Simulates the speed-up of the native plans' schedules on up to 64 threads, on a machine of any size.

tests/native/schedule has the program: the real plans on a virtual clock, with kernels that advance it instead of
computing. It ignores caches, links between cores and the rate of memory.
"""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from fusion_attention.bench.report import Report

ROOT = Path(__file__).resolve().parents[1]
THREADS = (2, 4, 8, 16, 32, 64)
SHOWN = (2, 8, 16, 64)
# (family, case): goals of the speed-up on 8, 16 and 64 threads.
GOALS = {
    ("forward", "B1 N8 S2048"): (7.5, 14, 30),
    ("forward", "B1 N8 S2048 causal"): (7.5, 14, 30),
    ("forward", "B8 N32 S4096"): (7.8, 15.5, 58),
    ("forward", "B8 N32 S4096 causal"): (7.8, 15.5, 58),
    ("decode", "B1 Nkv8, 4096 keys"): (7.5, 14, 40),
    ("decode", "B8 Nkv8, 4096 keys"): (7.8, 15.5, 58),
    ("decode", "B64 Nkv8, 4096 keys"): (7.8, 15.5, 58),
    ("backward", "B8 N32 S4096 causal"): (7.8, 15, 55),
    ("backward", "B1 N32/8 S2048 causal"): (7.5, 14, 28),
    ("backward", "B1 N1 S65536 causal"): (7, 13, 35),
    ("sparse backward", "4096 rows of 8192, top 2048"): (7.5, 14, 45),
    ("sparse backward", "4096 rows of 8192, top 512"): (7, 13, 40),
    ("loss", "4096 rows and keys, top 2048"): (7.5, 14, 40),
}


@dataclass(frozen=True)
class Schedule:
    """A call's simulated time on one thread, and its speed-up by number of threads."""

    family: str
    case: str
    ms: float
    speedup: dict[int, float]

    @property
    def goals(self) -> tuple[float, ...]:
        """Returns the goals on 8, 16 and 64 threads; empty without a goal."""
        return GOALS.get((self.family, self.case), ())

    @property
    def reached(self) -> bool:
        """True if every goal is met; the clock is exact, so there is no tolerance."""
        return all(self.speedup[t] >= goal for t, goal in zip((8, 16, 64), self.goals, strict=False))


def compiler() -> str | None:
    """Returns the C++ compiler that CXX names, or the first one on PATH, or None."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next((result for name in names if (result := shutil.which(name))), None)


def build(folder: Path, *, sleeps: bool = False) -> Path:
    """Compiles the program into a folder and returns its path; sleeps: use real threads instead of the virtual clock.

    Raises:
        FileNotFoundError: there is no C++ compiler.
    """
    result = compiler()
    if result is None:
        raise FileNotFoundError("no C++ compiler for the schedule test: install g++, or set CXX to a compiler")
    here, core, program = ROOT / "tests/native/schedule", ROOT / "csrc", folder / ("sleeping" if sleeps else "schedule")
    sources = [path for path in sorted(here.glob("*.cpp")) if path.stem not in ("clock", "sleeping")]
    plans = [*sorted((core / "plan").glob("*.cpp")), core / "system_linux.cpp", *[core / "amx_permission.cpp"] * sleeps]
    # The first plan/team.h on the include path is used: the core's with real threads, else the simulation's.
    sources += [path for path in plans if sleeps or path.stem not in ("team", "thread_pool")]
    sources.append(here / ("sleeping.cpp" if sleeps else "clock.cpp"))
    folders = (core, here) if sleeps else (here, core)
    options = ["-std=c++20", "-O1", "-Wall", "-Wextra", *(f"-I{f}" for f in folders)]
    objects = [program.with_name(f"{program.name}_{source.stem}.o") for source in sources]

    def compiled(source: Path, target: Path) -> None:
        subprocess.run([result, *options, "-c", str(source), "-o", str(target)], check=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compiled, sources, objects))
    subprocess.run([result, *options, *map(str, objects), "-o", str(program)], check=True)
    return program


def run(program: Path, *words: str) -> list[Schedule]:
    """Runs the program and parses its output; words: numbers of threads, and a filter of "family case"."""
    text = subprocess.run([str(program), "--json", *words], capture_output=True, text=True, check=True).stdout
    results: dict[tuple[str, str], Schedule] = {}
    for row in json.loads(text):
        key = row["family"], row["case"]
        results.setdefault(key, Schedule(*key, row["ms"], {1: 1.0})).speedup[row["threads"]] = row["speedup"]
    return list(results.values())


def rows() -> Iterator[Schedule]:
    """Simulates every case."""
    with tempfile.TemporaryDirectory() as folder:
        yield from run(build(Path(folder)), *map(str, THREADS))


COLUMNS = {"case": -40, "ms": 10, **{str(threads): 6 for threads in SHOWN}, "goal": -14, "reached": -7}


def show(console: Console) -> list[Schedule]:
    """Prints a table of all cases and returns them."""
    title = "Speed-up of the plans' schedules by threads, on a virtual clock; ms: simulated time of one thread"
    report, result = Report(console, title, COLUMNS), list(rows())
    for row in result:
        figures = [f"{row.speedup[threads]:.2f}" for threads in SHOWN]
        reached = ("yes" if row.reached else "no") if row.goals else ""
        goal = " / ".join(f"{value:g}" for value in row.goals)
        report.add(row.case, f"{row.ms:.1f}", *figures, goal, reached, section=row.family)
    return result


def draw(schedules: list[Schedule], path: Path) -> None:
    """Draws speed-up over threads, a panel for each family, as a PNG file."""
    from matplotlib import colormaps  # only a chart needs the bench extra
    from matplotlib.figure import Figure

    families = list(dict.fromkeys(row.family for row in schedules))
    columns = 4
    lines = -(-len(families) // columns)
    figure = Figure(figsize=(4.2 * columns, 4.6 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flat
    for axes, family in zip(panels, families, strict=False):
        axes.plot((1, *THREADS), (1, *THREADS), color="black", linewidth=1, linestyle="dotted")
        axes.set_prop_cycle(color=colormaps["tab20"].colors)
        for row in schedules:
            if row.family == family:
                counts = sorted(row.speedup)
                axes.plot(counts, [row.speedup[count] for count in counts], label=row.case, linewidth=1.2)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks((1, *THREADS), [str(count) for count in (1, *THREADS)])
        axes.set_yticks((1, *THREADS), [str(count) for count in (1, *THREADS)])
        axes.set_title(family)
        axes.set_xlabel("threads")
        axes.legend(fontsize=6)
    for axes in list(panels)[len(families) :]:
        axes.remove()
    figure.savefig(path, dpi=100)
