"""Attention over sequences that are sharded over the ranks of torch.distributed. Modules load on first use."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusion_attention.distributed.decode import decode_attention
    from fusion_attention.distributed.dense import attention
    from fusion_attention.distributed.groups import GroupError
    from fusion_attention.distributed.sharding import positions, shard, unshard
    from fusion_attention.distributed.sparse import indexer_loss, lightning_indexer, sparse_attention

__all__ = [
    "GroupError", "attention", "decode_attention", "indexer_loss", "lightning_indexer", "positions", "shard",
    "sparse_attention", "unshard",
]  # fmt: skip
_HOMES = {
    "GroupError": "groups", "attention": "dense", "decode_attention": "decode", "indexer_loss": "sparse",
    "lightning_indexer": "sparse", "sparse_attention": "sparse", "positions": "sharding", "shard": "sharding",
    "unshard": "sharding",
}  # fmt: skip


def _load(name: str) -> Any:
    if name in _HOMES:
        module = importlib.import_module(f"{__name__}.{_HOMES[name]}")
        return globals().setdefault(name, getattr(module, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if not TYPE_CHECKING:  # type checkers report names that are not imported above
    __getattr__ = _load


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
