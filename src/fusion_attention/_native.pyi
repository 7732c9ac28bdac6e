"""The native CPU core: which instruction-set variants it holds, and proof that each of them runs."""

from collections.abc import Sequence
from typing import TypedDict

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
