"""The operators: their definitions, by name, and their lowering to the intermediate representation."""

import functools
import importlib
from collections.abc import Iterator, Mapping

from fusion_attention.contract import Op

FAMILIES = (
    *("training.api_definition", "inference.api_definition", "training.definitions", "training.score_v4"),
    *("block_sparse.definitions", "inference.definitions", "fused.definitions"),
    *("indexer.definitions", "indexer.second", "indexer.api_definition", "sparse.definitions", "sparse.api_definition"),
    *("compressed.definitions", "compressed.l1_norm", "compressed.api_definition", "compressed.compressor"),
    "compressed.pooling",
    *("indexer_loss.definitions", "indexer_loss.api_definition"),
    *("indexer_loss.given_target_definitions", "indexer_loss.api_target_definition"),
)


class _Records(Mapping[str, Op]):
    """All operator definitions, by name. The first look-up imports the modules of all of them; a function that imports
    its own definition loads no other."""

    @functools.cached_property
    def _loaded(self) -> dict[str, Op]:
        families = (importlib.import_module(f"{__name__}.{name}") for name in FAMILIES)
        return {op.name: op for family in families for op in family.RECORDS}

    def __getitem__(self, name: str) -> Op:
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaded)

    def __len__(self) -> int:
        return len(self._loaded)


RECORDS: Mapping[str, Op] = _Records()
