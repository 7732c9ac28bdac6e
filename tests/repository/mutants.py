"""Run small mutations of the sources; tests that a mutation names must detect it: python tests/repository/mutants.py.

Mutations are made in a copy, never in the working tree. The named tests must pass without the mutation. Only a failing
test detects a mutant: one that cannot be imported, crashes or times out does not count. Exit codes: 0 all detected, 1
some survived, 2 a mutation no longer fits its source or the unmutated tests fail.
"""

import argparse
import compileall
import importlib.util
import os
import py_compile
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

from mutant import Mutant
from mutations import MUTANTS as OF_THE_PACKAGE
from mutations_site import SITE

T = TypeVar("T")
R = TypeVar("R")
ROOT = Path(__file__).parents[2]
COPIED = ("pyproject.toml", "src", "tests", "csrc", "docs", "website", "codegen", "benchmarks", "examples")
COPIED += ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", "mkdocs.yml")
MUTANTS = (*OF_THE_PACKAGE, *SITE)
CORE_TEST = "make test-core"  # what the mutants of csrc name, in place of tests of Python
SECONDS = 300.0  # on a busy machine; a quiet core needs a tenth
# PathFinder comes first, because the finder of an editable install would load the original tree.
FIRST_ON_THE_PATH = "import sys\nfrom importlib.machinery import PathFinder\nsys.meta_path.insert(0, PathFinder)\n"
# Compiler and options: those of CMakeLists.txt for the base instruction set, but -O1 for quick compilation.
CORE = [os.environ.get("CXX", "c++"), "-std=c++20", "-O1", "-w", "-ffp-contract=fast", "-fno-math-errno"]
CORE += ["-fno-trapping-math", "-DFUSION_VARIANT_ENTRY=fusion_variant_base"]


@dataclass(frozen=True)
class Run:
    """Result of a command: exit code (-9: killed after SECONDS), output, CPU seconds."""

    code: int
    text: str
    seconds: float

    @property
    def failed(self) -> bool:
        """True if tests ran and some failed; errors during collection do not count."""
        if self.code != 1 or re.search(r"^(ERROR .*|.*error.* during collection.*)$", self.text, re.MULTILINE):
            return False
        return re.search(r"\b[1-9]\d* (failed|failures)\b", self.text) is not None


def misfit(mutant: Mutant, text: str) -> str | None:
    """The reason why a mutation cannot be made in a source's text, or None."""
    result = text.count(mutant.old)
    return (
        None if result == 1 else f"{mutant.name}: {mutant.file} has its text {result} times, not once: {mutant.old!r}"
    )


def stale(built: Path) -> bool:
    """True if an object file is missing or older than one of its sources, which the compiler listed in the .d file."""
    if not built.exists():
        return True
    sources = built.with_suffix(".d").read_text(encoding="utf-8").partition(":")[2].replace("\\\n", " ").split()
    return any(Path(source).stat().st_mtime_ns > built.stat().st_mtime_ns for source in sources)


class Copy:
    """Copy of the tree, in which commands and tests run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        for name in COPIED:
            source, target = ROOT / name, root / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "build"))
            else:
                shutil.copy2(source, target)
        native = importlib.util.find_spec("fusion_attention._native")
        assert native is not None
        assert native.origin is not None
        shutil.copy2(native.origin, root / "src/fusion_attention")
        (root / "hook").mkdir()
        (root / "hook/sitecustomize.py").write_text(FIRST_ON_THE_PATH)
        # Bytecode is checked by hash, because a mutated source may have the same size and modification time.
        hashed = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(root / "src", quiet=2, invalidation_mode=hashed)

    def run(self, command: Sequence[str | Path], interpreted: bool = False) -> Run:
        """Runs a command in the copy, against its sources."""
        meant_here = "PYTEST_ADDOPTS", "TRITON_INTERPRET"
        environment = {name: value for name, value in os.environ.items() if name not in meant_here}
        environment |= {"PYTHONPATH": os.pathsep.join(str(self.root / name) for name in ("hook", "src"))}
        environment |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        environment |= {"TRITON_INTERPRET": "1"} if interpreted else {}
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                [str(word) for word in command], cwd=self.root, env=environment, stdout=output, stderr=subprocess.STDOUT
            )
            alarm = threading.Timer(SECONDS, process.kill)
            alarm.start()
            try:
                _, status, used = os.wait4(process.pid, 0)
            finally:
                alarm.cancel()
            process.returncode = os.waitstatus_to_exitcode(status)
            output.seek(0)
            text = output.read().decode(errors="replace")
        return Run(process.returncode, text, used.ru_utime + used.ru_stime)

    def tests(self, names: Iterable[str], *options: str) -> Run:
        """Run tests in one process: Python tests, kernels under Triton's interpreter, or the core's test program."""
        names = list(names)
        if names == [CORE_TEST]:
            return self.core_test()
        pytest = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:randomly"]
        return self.run([*pytest, *options, *names], interpreted=names[0].startswith("tests/kernels"))

    def core_test(self) -> Run:
        """Build the core's test program for one instruction set, changed files only, and run it."""
        folder, seconds = self.root / "core", 0.0
        folder.mkdir(exist_ok=True)
        csrc = self.root / "csrc"
        # Sources other than bind/ (the Python binding), files that only the module links, and files of other systems.
        elsewhere = ("old_glibc.cpp", "system_macos.cpp", "system_windows.cpp")
        sources = [path for path in sorted(csrc.glob("*.cpp")) if path.name not in elsewhere]
        sources += sorted(csrc.glob("plan/*.cpp"))
        sources += sorted((self.root / "tests/native").glob("*.cpp"))
        objects = []
        for source in sources:
            objects.append(folder / f"{source.parent.name}-{source.stem}.o")
            if stale(objects[-1]):
                built = self.run([*CORE, f"-I{csrc}", "-MMD", "-c", source, "-o", objects[-1]])
                seconds += built.seconds
                if built.code:
                    return Run(built.code + 1000, built.text, seconds)
        linked = self.run([*CORE, *objects, "-o", folder / "core_test"])
        ran = self.run([folder / "core_test"]) if linked.code == 0 else Run(1000, linked.text, 0.0)
        return Run(ran.code, ran.text, seconds + linked.seconds + ran.seconds)

    def capi(self) -> None:
        """Build the C API's libraries, changed files only, for the tests of the copy."""
        csrc, package = self.root / "csrc", self.root / "src/fusion_attention/capi"
        definitions = self.root / "capi" / "capi" / "operators.inc"
        if not definitions.exists():
            definitions.parent.mkdir(parents=True)
            generated = self.run(
                [sys.executable, self.root / "codegen/c_definitions.py", package / "include", definitions]
            )
            assert generated.code == 0, generated.text
        text = (csrc / "capi/CMakeLists.txt").read_text(encoding="utf-8")
        built_objects: list[str | Path] = []
        for name, exports, listed in re.findall(r"^fusion_capi\((\w+) (\S+\.map) ([^)]*)\)", text, re.MULTILINE):
            objects = []
            for source in [csrc / "capi" / word for word in listed.split()]:
                objects.append(self.root / "capi" / f"{source.stem}.o")
                if stale(objects[-1]):
                    flags = ["-std=c++20", "-O0", "-w", "-fPIC", f"-I{csrc}", f"-I{package / 'include'}", "-MMD"]
                    flags.append(f"-I{definitions.parents[1]}")
                    built = self.run([CORE[0], *flags, "-c", source, "-o", objects[-1]])
                    assert built.code == 0, built.text
            library = package / "lib64" / f"lib{name}.so"
            library.unlink(missing_ok=True)
            options = ["-shared", f"-Wl,--version-script={csrc / 'capi' / exports}", "-Wl,-rpath,$ORIGIN", "-ldl"]
            linked = self.run(
                [CORE[0], *objects, *built_objects, *options, f"-Wl,-soname,{library.name}", "-o", library]
            )
            assert linked.code == 0, linked.text
            built_objects.append(library)

    def survived(self, mutant: Mutant) -> tuple[list[str], float, str]:
        """(named tests that did not detect the mutant, CPU seconds, output of these tests)."""
        path = self.root / mutant.file
        source = path.read_text(encoding="utf-8")
        path.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")
        blind, seconds, output = [], 0.0, ""
        of_capi = mutant.file.startswith("csrc/capi/")
        try:
            if of_capi:
                self.capi()
            for name in mutant.tests:
                ran = self.tests([name], "-x")
                seconds += ran.seconds
                if not ran.failed and name != CORE_TEST:  # the everyday cases did not; do the slow ones?
                    ran = self.tests([name], "-x", "-m", "")
                    seconds += ran.seconds
                if not ran.failed:
                    blind.append(name)
                    output += f"{name}: exit code {ran.code}\n{ran.text[-2000:]}\n"
        finally:
            path.write_text(source, encoding="utf-8")
            if of_capi:
                self.capi()
        return blind, seconds, output


def each(copies: Sequence[Copy], work: Callable[[Copy, T], R], items: Iterable[T]) -> Iterator[tuple[T, R]]:
    """Yield (item, work(copy, item)) as they finish, one at a time per copy."""
    free: SimpleQueue[Copy] = SimpleQueue()
    for copy in copies:
        free.put(copy)

    def one(item: T) -> R:
        copy = free.get()
        try:
            return work(copy, item)
        finally:
            free.put(copy)

    with ThreadPoolExecutor(len(copies)) as pool:
        running = {pool.submit(one, item): item for item in items}
        try:
            for done in as_completed(running):
                yield running[done], done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def baseline(copies: Sequence[Copy], mutants: Sequence[Mutant]) -> list[str]:
    """Outputs of the named tests that fail without a mutation; each test runs once."""
    named = list(dict.fromkeys(name for mutant in mutants for name in mutant.tests))
    kernels = [name for name in named if name.startswith("tests/kernels")]
    ordinary = [name for name in named if name != CORE_TEST and name not in kernels]
    # Groups of 16 tests end within SECONDS.
    shares = [tuple(names[i : i + 16]) for names in (ordinary, kernels) for i in range(0, len(names), 16)]
    shares += [(CORE_TEST,)] if CORE_TEST in named else []
    ends = each(copies, lambda copy, names_of_share: copy.tests(names_of_share), shares)
    return [
        f"exit code {ran.code}: {' '.join(names_of_share)}\n{ran.text[-4000:]}"
        for names_of_share, ran in ends
        if ran.code != 0
    ]


def judge(copies: Sequence[Copy], mutants: Sequence[Mutant]) -> list[str]:
    """The names of the mutants that survived; prints a line for each mutant."""
    survivors, total = [], 0.0
    for mutant, (blind, seconds, output) in each(copies, Copy.survived, mutants):
        total += seconds
        print(line(mutant, seconds, blind), flush=True)
        if blind:
            survivors.append(mutant.name)
            print(output, file=sys.stderr, flush=True)
    print(f"{len(mutants)} mutants, {len(survivors)} survived, {total:.0f} CPU seconds", flush=True)
    return survivors


def line(mutant: Mutant, seconds: float, blind: list[str]) -> str:
    """Line that is printed about a mutant."""
    verdict = f"SURVIVED {', '.join(blind)}" if blind else "caught"
    return f"{mutant.name:<36} {mutant.file:<58} {seconds:5.1f} s  {verdict}"


def chosen(only: list[str]) -> list[Mutant]:
    """The mutants named in `only`; all if it is empty."""
    unknown = set(only) - {mutant.name for mutant in MUTANTS}
    if unknown:
        raise SystemExit(f"no such mutant: {', '.join(sorted(unknown))} (--list names them)")
    return [mutant for mutant in MUTANTS if not only or mutant.name in only]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="this mutant; may be repeated")
    parser.add_argument("--list", action="store_true", help="names them, and runs nothing")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at once (default: all cores)")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Both take the copies away.
    mutants = chosen(given.only)
    wrong = [text for m in mutants if (text := misfit(m, (ROOT / m.file).read_text(encoding="utf-8")))]
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        return 2
    if given.list:
        print("\n".join(f"{m.name:<36} {m.file:<58} {' '.join(m.tests)}" for m in mutants))
        return 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = [Copy(Path(folder) / str(i)) for i in range(max(1, min(given.jobs, len(mutants))))]
        result = copies[0].run([sys.executable, "-c", "import fusion_attention; print(fusion_attention.__file__)"])
        if not result.text.startswith(str(copies[0].root)):
            print(f"the copy is not what Python imports, but {result.text}", file=sys.stderr)
            return 2
        failing = baseline(copies, mutants)
        if failing:
            print("unmutated, these fail:\n" + "\n".join(failing), file=sys.stderr)
            return 2
        return 1 if judge(copies, mutants) else 0


if __name__ == "__main__":
    raise SystemExit(main())
