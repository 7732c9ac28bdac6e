"""Indices of tensors (Q, K, V, ...) in the table of their strides, as compile-time constants for Triton kernels."""

import triton.language as tl

from fusion_attention.backends.triton.common.layout_table import VIEWS

AT = {name: n for n, name in enumerate(VIEWS)}
Q, K, V, OUT, MAX, SUM = (tl.constexpr(AT[name]) for name in ("q", "k", "v", "out", "max", "sum"))
Q_ROPE, K_ROPE, BIAS = (tl.constexpr(AT[name]) for name in ("q_rope", "k_rope", "bias"))
BLOCKED, BITS, FLAT = (tl.constexpr(AT[name]) for name in ("blocked", "drop_bits", "flat"))
DOUT, DLSE, DQ, DK, DV = (tl.constexpr(AT[name]) for name in ("dout", "dlse", "dq", "dk", "dv"))
DQ_ROPE, DK_ROPE, DBIAS = (tl.constexpr(AT[name]) for name in ("dq_rope", "dk_rope", "dbias"))
SCALE_K, OFFSET_K = tl.constexpr(AT["scale_k"]), tl.constexpr(AT["offset_k"])
SCALE_V, OFFSET_V = tl.constexpr(AT["scale_v"]), tl.constexpr(AT["offset_v"])
IDS = tl.constexpr(AT["ids"])
INDICES, WEIGHTS, VALUES = (tl.constexpr(AT[name]) for name in ("indices", "weights", "values"))
DVALUES, DWEIGHTS, TARGET = (tl.constexpr(AT[name]) for name in ("dvalues", "dweights", "target"))
INDEX_Q, INDEX_K, INDEX_MAX, INDEX_SUM = (
    tl.constexpr(AT[name]) for name in ("index_q", "index_k", "index_max", "index_sum")
)
K_COMPRESSED, V_COMPRESSED, IDS_COMPRESSED = (
    tl.constexpr(AT[name]) for name in ("k_compressed", "v_compressed", "ids_compressed")
)
