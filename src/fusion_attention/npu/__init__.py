"""torch_npu's functions, and install(), which makes them importable as the module `torch_npu`."""

from fusion_attention.npu.install import install as install
from fusion_attention.npu.install import uninstall as uninstall
from fusion_attention.npu.surface.modules import INTERFACES
from fusion_attention.settings import strict as strict

# Type checkers read the functions in __init__.pyi.
_FUNCTIONS = {name: getattr(module, name) for module in INTERFACES for name in module.__all__}
globals().update(_FUNCTIONS)
__all__ = sorted(["install", "strict", "uninstall", *_FUNCTIONS])  # noqa: PLE0605
