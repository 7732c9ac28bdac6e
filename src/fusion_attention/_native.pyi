"""The native CPU core: which instruction-set variants it holds, and proof that each of them runs."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, overload

from torch import Tensor

class _CpuFeatures(TypedDict):
    built: list[str]
    chosen: str
    features: list[str]
    forced: str
    forked: bool
    lanes: dict[str, int]
    needs: dict[str, list[str]]
    parts: dict[str, list[str]]
    runnable: list[str]
    tiles_refused: str

class _Probe(TypedDict):
    variant: str
    lanes: int
    checksum: float
    checksum_bf16: float
    checksum_int8: int

def cpu_features() -> _CpuFeatures: ...
def variant_probe(variant: str, *, within: Sequence[str] | None = None) -> _Probe: ...
def poison_scratch(on: bool) -> None: ...

TILE_ROWS: int

class Signature:
    def __init__(
        self,
        names: tuple[str, ...],
        kinds: str,
        watched: tuple[bool, ...],
        types: tuple[Any, ...],
        integers: tuple[Any, ...],
    ) -> None: ...
    def read(
        self, args: Mapping[str, Any], strict: bool, grad: bool, /
    ) -> tuple[Any, tuple[bytes, ...] | None, bool]: ...

class ForwardPlan:
    def __init__(
        self, problem: tuple[Any, ...], extents: tuple[Any, ...], tiles: tuple[Any, ...], variant: str | None = None
    ) -> None: ...
    def workspace_bytes(self, threads: int) -> int: ...
    @property
    def variant(self) -> str: ...
    def run(self, threads: int, operands: tuple[Any, ...]) -> int: ...
    def prepare(self, operands: tuple[Any, ...], names: tuple[str, ...]) -> PreparedForward: ...

class PreparedForward:
    def run(self, threads: int, /, *tensors: Tensor | None) -> int: ...

class BackwardPlan:
    def __init__(self, problem: tuple[Any, ...], extents: tuple[Any, ...], variant: str | None = None) -> None: ...
    def workspace_bytes(self, threads: int) -> int: ...
    @property
    def variant(self) -> str: ...
    def run(self, threads: int, operands: tuple[Any, ...], gradients: tuple[Any, ...]) -> int: ...

class DecodePlan:
    def __init__(
        self, problem: tuple[Any, ...], more: tuple[Any, ...], extents: tuple[Any, ...], variant: str | None = None
    ) -> None: ...
    def update(self, kv_len: Any, lo: Any, hi: Any) -> None: ...
    def workspace_bytes(self, threads: int) -> int: ...
    @property
    def variant(self) -> str: ...
    def run(self, threads: int, operands: tuple[Any, ...]) -> int: ...
    def run_dense(self, dense: ForwardPlan, threads: int, operands: tuple[Any, ...]) -> int: ...
    def prepare(self, operands: tuple[Any, ...], names: tuple[str, ...]) -> PreparedDecode: ...

class PreparedDecode:
    def run(self, threads: int, /, *tensors: Tensor | None) -> int: ...

class SparsePlan:
    @overload
    def __init__(
        self, problem: tuple[Any, ...], extents: tuple[Any, ...], backward: bool, variant: str | None = None
    ) -> None: ...
    @overload
    def __init__(
        self,
        problem: tuple[Any, ...],
        attention: tuple[Any, ...],
        extents: tuple[Any, ...],
        unit_target: bool = False,
        variant: str | None = None,
    ) -> None: ...
    def workspace_bytes(self, threads: int) -> int: ...
    @overload
    def run(self, threads: int, operands: tuple[Any, ...]) -> None: ...
    @overload
    def run(self, threads: int, operands: tuple[Any, ...], attended: tuple[Any, ...], loss: int) -> None: ...

class IndexerPlan:
    def __init__(self, problem: tuple[Any, ...], extents: tuple[Any, ...], variant: str | None = None) -> None: ...
    def workspace_bytes(self, threads: int) -> int: ...
    def prepare(self, operands: tuple[Any, ...], names: tuple[str, ...]) -> PreparedIndexer: ...
    def run(self, threads: int, operands: tuple[Any, ...]) -> None: ...

class PreparedIndexer:
    def run(self, threads: int, /, *tensors: Tensor | None) -> int: ...

def pool(
    threads: int,
    problem: tuple[Any, ...],
    lengths: tuple[Any, ...],
    operands: tuple[Any, ...],
    variant: str | None = None,
) -> None: ...
def pool_gradients(
    threads: int,
    problem: tuple[Any, ...],
    lengths: tuple[Any, ...],
    operands: tuple[Any, ...],
    variant: str | None = None,
) -> None: ...
def machine_peak(threads: int) -> dict[str, float]: ...
def multiply_adds(dtype: str, threads: int, turns: int, variant: str | None = None) -> float: ...
