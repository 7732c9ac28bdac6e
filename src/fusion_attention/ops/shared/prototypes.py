"""Construction of operator definitions for CANN's operators."""

from functools import partial

from fusion_attention.contract import Op

# Declared.on_device of operators whose lengths are tensors on the device.
ON_DEVICE = r"actualSeq|cuSeq|(?i:seqUsed)|cmpResidual|startPos"
# Makes the definition of an operator of CANN; its versions are made with Op.version().
of_cann = partial(Op, blank_is_absent=True)
