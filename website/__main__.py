"""python -m website [--check]: writes what the site's pages show and nobody writes by hand, or names what is stale."""

from __future__ import annotations

import sys
from pathlib import Path

from website.everything import generated

DOCS = Path(__file__).resolve().parents[1] / "docs"


def main() -> int:
    """0, or 1 where --check found a stale file."""
    stale = []
    for name, text in generated().items():
        path = DOCS / name
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if "--check" not in sys.argv:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
    verb = "is stale: run `make docs`" if "--check" in sys.argv else "written"
    for name in stale:
        print(f"docs/{name} {verb}")
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    raise SystemExit(main())
