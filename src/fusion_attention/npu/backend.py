"""The device "npu" of torch's PrivateUse1: built, loaded, and asked whether it is in force.

Refuses to know what install() changes besides (install.py), and attention.
"""

from __future__ import annotations

_in_force = False


def in_force() -> bool:
    """Whether tensors on device "npu" are tensors of a device of their own; otherwise "npu" is read as another name."""
    return _in_force
