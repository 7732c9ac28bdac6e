"""The package's sources as a tree of modules, for the tests that hold laws against it."""

from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "fusion_attention"
SOURCE = ROOT / "src" / PACKAGE


def named(path: Path) -> str:
    """The module's name within the package; the package's own __init__ is the empty name."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    return {named(path): path for path in sorted(SOURCE.rglob("*.py"))}
