"""Lists the package's modules for tests of the source code."""

from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "fusion_attention"
SOURCE = ROOT / "src" / PACKAGE


def named(path: Path) -> str:
    """Returns a module's name within the package; "" for the package's __init__."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    return {named(path): path for path in sorted(SOURCE.rglob("*.py"))}
