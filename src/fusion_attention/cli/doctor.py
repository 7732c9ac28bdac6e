"""What the library finds of the processor it runs on, and what is worth knowing about it.

Knows words. Refuses to know how features are found: the native core asks the processor.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

AMX_NOTE = (
    "This processor has AMX, which the library does not use and torch's own attention does in bfloat16 and float16. "
    "Nothing was measured on such processors: torch.nn.functional.scaled_dot_product_attention may be faster."
)


def notes(features: Sequence[str]) -> list[str]:
    """What a user of a processor with these features should know."""
    return [AMX_NOTE] if "amx_bf16" in features else []


def processor() -> str:
    """Its name where the system tells one, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} ({platform.machine()})" if names else platform.machine()


def doctor() -> None:
    """Show the processor's features, and the instruction sets of the native core: built, usable here, chosen."""
    import torch

    from fusion_attention import _native

    found = _native.cpu_features()
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    table.add_row("processor", processor())
    table.add_row("features", " ".join(found["features"]) or "none that the library asks about")
    table.add_row("instruction sets built", " ".join(found["built"]))
    table.add_row("usable here", " ".join(found["runnable"]))
    table.add_row("chosen", found["chosen"])
    table.add_row("threads", str(torch.get_num_threads()))
    console = Console()
    console.print(table)
    for note in notes(found["features"]):
        console.print(f"\n{note}")


__all__ = ["doctor", "notes", "processor"]
