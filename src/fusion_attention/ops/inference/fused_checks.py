"""The questions that the rules of fused inference attention ask of a call; each answers True, or says what came."""

from __future__ import annotations

from fusion_attention.ops.inference import checks

FUNCTIONS = checks.FUNCTIONS
