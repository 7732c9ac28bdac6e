"""What is compiled ahead of time of the backward of attention to lists, and sums per key."""

from __future__ import annotations

from support.ahead_run import Config

CONFIGS: dict[str, Config] = {}
EVERYDAY: tuple[str, ...] = ()
# Runs that keep bytes on the stack, and why no tile that keeps none is taken.
SPILLED: dict[str, str] = {}
