"""torch_npu's names: its functions, and install(), which makes them the module `torch_npu`."""

from fusion_attention.npu import functions
from fusion_attention.npu.functions import *  # noqa: F403
from fusion_attention.npu.install import install, uninstall
from fusion_attention.settings import strict

__all__ = ["install", "strict", "uninstall"]
__all__ += functions.__all__
