"""The workspace size that phase 1 returns: bytes that a call needs in addition to the caller's tensors."""

from collections.abc import Iterable

import torch

from fusion_attention.ir.call import Filled, tensors_in
from fusion_attention.plan import Plan


def workspace(filled: Filled, tensors: Iterable[torch.Tensor], plan: Plan | None) -> tuple[int, bool]:
    """Returns (workspace size: bytes of the plan's scratch and of converted tensors, True if an input is copied).

    filled: the call with views of its tensors. tensors: the caller's tensors, whose memory is not counted. plan: the
    back end's plan; None: nothing is computed.
    """
    theirs = {t.untyped_storage()._cdata for t in tensors}
    buffers = {t.untyped_storage()._cdata: t for t in filled.buffers}
    read = {t.untyped_storage()._cdata: t for t in tensors_in(filled.operands)}
    needed = {key: t for key, t in (read | buffers).items() if key not in theirs}
    converted = sum(t.numel() * t.element_size() for t in needed.values())
    return converted + (plan.workspace_bytes if plan else 0), not needed.keys() <= buffers.keys()
