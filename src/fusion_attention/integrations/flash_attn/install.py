"""install() and uninstall(): makes this library the module `flash_attn` for programs that import it.

Another installed flash_attn stays unchanged. The module has attention and the helpers that programs commonly import.
"""

import functools
import re
import threading
from functools import partial
from types import ModuleType
from typing import Any

import torch

from fusion_attention.integrations.flash_attn import bert_padding, functions, layers, paged, rotary
from fusion_attention.patches import Changes, another, make_modules, together

NAME, VERSION = "flash_attn", "2.8.3"
_FUNCTIONS = {name: value for name, value in vars(functions).items() if name.startswith("flash_attn_")}
_FUNCTIONS["flash_attn_with_kvcache"] = paged.flash_attn_with_kvcache
_PADDING = ("index_first_axis", "index_put_first_axis", "index_first_axis_residual", "unpad_input", "pad_input",
            "unpad_input_for_concatenated_sequences")  # fmt: skip
_ROTARY = {"apply_rotary_emb": rotary.apply_rotary_emb, "apply_rotary_emb_func": rotary.apply_rotary_emb}
_CONTENTS: dict[str, dict[str, Any]] = {
    NAME: _FUNCTIONS,
    f"{NAME}.flash_attn_interface": _FUNCTIONS,
    f"{NAME}.bert_padding": {name: getattr(bert_padding, name) for name in _PADDING},
    f"{NAME}.layers": {},
    f"{NAME}.layers.rotary": {**_ROTARY, "RotaryEmbedding": layers.RotaryEmbedding},
    f"{NAME}.ops": {},
    f"{NAME}.ops.rms_norm": {"RMSNorm": layers.RMSNorm, "rms_norm": layers.rms_norm},
    f"{NAME}.ops.triton": {},
    f"{NAME}.ops.triton.rotary": {"apply_rotary": rotary.apply_rotary},
    f"{NAME}.ops.triton.layer_norm": {"RMSNorm": layers.RMSNorm},
    f"{NAME}.losses": {},
    f"{NAME}.losses.cross_entropy": {"CrossEntropyLoss": layers.CrossEntropyLoss},
}

_LOCK = threading.RLock()
_installed: tuple[str, Changes] | None = None  # global, as sys.modules is


def install(version: str = VERSION) -> None:
    """Makes this library importable as `flash_attn` until uninstall().

    Afterwards `import flash_attn`, `from flash_attn.bert_padding import unpad_input` and importlib.metadata's version
    of it work, on a CPU too. transformers accepts attn_implementation="flash_attention_2" without a GPU. Libraries may
    cache that flash_attn is missing: install first, then import them. A second call only changes the version. If a
    step fails, all changes are reverted.

    Args:
        version: the release to imitate. Before 2.7 unpad_input() returns four results, since then five.

    Raises:
        RuntimeError: another flash_attn is installed.

    Example:
        >>> install()
        >>> from flash_attn import flash_attn_func
        >>> q = torch.randn(1, 5, 2, 16)
        >>> flash_attn_func(q, q, q, causal=True).shape
        torch.Size([1, 5, 2, 16])
        >>> uninstall()
    """
    global _installed  # noqa: PLW0603
    with _LOCK:
        if _installed is not None and _installed[0] == version:
            return
        uninstall()
        if (other := another(NAME)) is not None:
            raise RuntimeError(
                f"flash_attn.install: expected no other flash_attn, got {other} (import that one, or remove it first)"
            )
        _installed = version, together(partial(_changed, version))


def uninstall() -> None:
    """Reverts install() in all threads; does nothing if nothing is installed.

    Functions that programs have imported continue to work.

    Example:
        >>> uninstall()
    """
    global _installed
    with _LOCK:
        if _installed is not None:
            (_, changes), _installed = _installed, None
            changes.end()


def _changed(version: str, changes: Changes) -> None:
    """Adds the modules of flash_attn `version` to sys.modules, and makes transformers accept them."""
    changes.play(modules_of(version), version)
    changes.when_loaded("transformers.utils.import_utils", lambda module: _admit(changes, module))
    changes.when_loaded("transformers.modeling_flash_attention_utils", lambda module: _admit_devices(changes, module))


def modules_of(version: str) -> dict[str, ModuleType]:
    """Returns full name -> module for every module of flash_attn `version` that a program can import."""
    modules = make_modules(_CONTENTS, _absent)
    if tuple(int(n) for n in re.findall(r"\d+", version)[:2]) < (2, 7):
        vars(modules[f"{NAME}.bert_padding"])["unpad_input"] = _unpad_input_to_four
    vars(modules[NAME]).update(__version__=version, __all__=list(_FUNCTIONS))
    return modules


@functools.wraps(bert_padding.unpad_input)
def _unpad_input_to_four(hidden_states: Any, attention_mask: Any) -> Any:
    return bert_padding.unpad_input(hidden_states, attention_mask)[:4]


def _absent(module: ModuleType, name: str) -> Any:
    raise AttributeError(f"fusion_attention's {module.__name__} has no {name} (docs/with_flash_attn.md)")


def _always(*_: Any, **__: Any) -> bool:
    return True


def _admit(changes: Changes, module: ModuleType) -> None:
    """Patches transformers' import_utils, so that its check for flash-attn returns True, also without CUDA."""
    if hasattr(module, "is_flash_attn_2_available"):
        changes.set(module, "is_flash_attn_2_available", _always)


def _admit_devices(changes: Changes, module: ModuleType) -> None:
    """Adds the CPU to the devices on which transformers accepts flash-attn, if there is no CUDA device."""
    _admit(changes, module)
    compatible = getattr(module, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", {}).get(2)
    if isinstance(compatible, dict) and not torch.cuda.is_available():
        changes.set(compatible, "general_availability_check", _always)
        devices = compatible.get("supported_devices", ())
        changes.set(compatible, "supported_devices", (*devices, (_always, "cpu")))
