"""Training stages (dense, warm-up, sparse) of attention layers with an indexer: set_stage() and the base class."""

from typing import Any, Literal

from torch import nn

STAGES = ("dense", "warmup", "sparse")
Stage = Literal["dense", "warmup", "sparse"]


class StagedAttention(nn.Module):
    """The base class of attention layers with a stage of training, which is not in the state_dict.

    Attributes:
        stage: "dense": attention to all keys; "warmup": the same, and only the indexer learns; "sparse": attention to
            the keys that the indexer selects.
        indexer: the module that selects keys, or None; a subclass has it.
    """

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = checked(stage, type(self).__name__)


def set_stage(model: nn.Module, stage: Stage) -> None:
    """Sets the stage of every attention layer with an indexer in a model, and requires_grad of all parameters.

        stage     attention reads                parameters with requires_grad
        "dense"   all keys                       all except the indexers'
        "warmup"  all keys                       only the indexers'
        "sparse"  keys that indexers select      all

    To freeze more parameters, set their requires_grad afterwards. DDP reads requires_grad when it wraps a model, so
    wrap after set_stage(), and again after the next change of stage; find_unused_parameters is then not needed.

    Args:
        model: a module that contains at least one SparseAttention or CompressedAttention.
        stage: "dense", "warmup" or "sparse".

    Raises:
        ValueError: an unknown stage, or a model without such a layer.

    Source: this library; the schedule of DeepSeek-V3.2.

    Example:
        >>> from fusion_attention.nn import SparseSelfAttention, rope_table
        >>> layer = SparseSelfAttention(64, heads=4, index_heads=2, index_dim=16, top_k=8)
        >>> set_stage(layer, "warmup")
        >>> sorted({name.split(".")[0] for name, p in layer.named_parameters() if p.requires_grad})
        ['indexer']
    """
    checked(stage, "set_stage")
    # register() of the transformers integration adds the attribute `stage` to classes of transformers.
    layers: list[Any] = [m for m in model.modules() if isinstance(m, StagedAttention) or hasattr(type(m), "stage")]
    if not layers:
        raise ValueError(
            "set_stage: model: expected a SparseAttention, a CompressedAttention or a layer of transformers that "
            "register() serves among its modules, got none"
        )
    indexers: set[Any] = set()
    for layer in layers:
        layer.stage = stage
        if isinstance(layer.indexer, nn.Module):
            indexers.update(layer.indexer.parameters())
    # Integer parameters of quantized layers are never trained.
    for parameter in (p for p in model.parameters() if p.is_floating_point() or p.is_complex()):
        parameter.requires_grad_(stage == "sparse" or (parameter in indexers) == (stage == "warmup"))


def checked(stage: Stage, caller: str) -> Stage:
    """Returns the stage if it is "dense", "warmup" or "sparse"; caller: the function's name, for the error.

    Raises:
        ValueError: an unknown stage.
    """
    if stage not in STAGES:
        raise ValueError(f"{caller}: stage: expected one of {', '.join(STAGES)}, got {stage!r}")
    return stage
