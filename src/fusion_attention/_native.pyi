"""The native CPU core: which instruction-set variants it holds, and proof that each of them runs."""

from collections.abc import Sequence
from typing import Any, TypedDict

class _CpuFeatures(TypedDict):
    built: list[str]
    chosen: str
    runnable: list[str]

class _Probe(TypedDict):
    variant: str
    lanes: int
    checksum: float
    checksum_bf16: float

def cpu_features() -> _CpuFeatures: ...
def variant_probe(variant: str, *, within: Sequence[str] | None = None) -> _Probe: ...

TILE_ROWS: int

class ForwardPlan:
    def __init__(
        self, problem: tuple[Any, ...], extents: tuple[Any, ...], tiles: tuple[Any, ...], variant: str | None = None
    ) -> None: ...
    def workspace_bytes(self, threads: int) -> int: ...
    @property
    def variant(self) -> str: ...
    def run(self, threads: int, operands: tuple[Any, ...]) -> int: ...

class BackwardPlan:
    def __init__(self, problem: tuple[Any, ...], extents: tuple[Any, ...], variant: str | None = None) -> None: ...
    def workspace_bytes(self, threads: int) -> int: ...
    @property
    def variant(self) -> str: ...
    def run(self, threads: int, operands: tuple[Any, ...], gradients: tuple[Any, ...]) -> int: ...

def machine_peak(threads: int) -> dict[str, float]: ...
