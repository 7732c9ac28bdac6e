"""Draws valid and invalid settings of the mask explorer, and runs its rules in Python and in JavaScript."""

import json
import random
from dataclasses import asdict
from typing import Any

from fusion_attention.explorer import calls, draw, violations, visible, words
from fusion_attention.explorer.visible import BAND, INTERFACES, MODES, PREFIX_MODES, Setting
from fusion_attention.ir.mask import UNLIMITED

COUNTS = (UNLIMITED, UNLIMITED - 1, 0, 1, 2, 3, 7, -1, -2, -5, -UNLIMITED, 40)


def random_setting(rng: random.Random, longest: int = 12, modes: tuple[int, ...] = MODES) -> Setting:
    """Draws any mode and lengths, also invalid prefixes, windows outside of the scores and masks that are too small."""
    mode, packed = rng.choice(modes), rng.random() < 0.5
    items = rng.randint(1, 4) if packed else 1
    q_len = tuple(rng.randint(0 if packed else 1, longest) for _ in range(items))
    kv_len = tuple(rng.randint(0 if packed else 1, longest) for _ in range(items))
    q_len, kv_len = (q_len, kv_len) if max(q_len) and max(kv_len) else ((3,) * items, (4,) * items)
    prefix = tuple(rng.randint(0, longest) for _ in range(items)) if mode in PREFIX_MODES or rng.random() < 0.3 else ()
    pre, next_ = rng.choice(COUNTS), rng.choice(COUNTS)
    if mode == BAND and prefix:
        pre = UNLIMITED
    elif mode != BAND and mode not in PREFIX_MODES:
        prefix = ()
    mask = rng.choice(("none", "zeros", "triangle", "own"))
    matrix = None
    if mask == "own":
        rows, columns = (rng.choice((longest, 2)) for _ in range(2))
        matrix = tuple(tuple(int(rng.random() < 0.4) for _ in range(columns)) for _ in range(rows))
    align = rng.choice(("start", "end")) if mode == BAND else "end"
    return Setting(mode, q_len, kv_len, packed, pre, next_, prefix, align, mask, matrix)


def by_python(s: Setting) -> dict[str, Any]:
    """Returns all results of the Python rules for a setting, by interface."""
    results: dict[str, Any] = {}
    for interface in INTERFACES:
        p = visible.picture(s, interface)
        cells = draw.cells_of(s, interface)
        results[interface] = {
            "picture": p,
            "cells": "" if cells is None else "".join(map(str, cells.ravel().tolist())),
            "remarks": violations.remarks_on(s, interface),
            "call": calls.call(s, interface),
            "formulas": [words.formula(p, b) for b in range(len(s.q_len))] if p else [],
        }
    return results


# JavaScript that returns the same results as JSON, with the page's functions.
BY_SCRIPT = """
function everything(given) {
  const s = settingOf(given), found = {};
  for (const interface of ["own", "training", "inference", "two_phase"]) {
    const p = picture(s, interface), rows = s.q_len.reduce((a, b) => a + b, 0), keys = s.kv_len.reduce((a, b) => a + b,
    0); const cells = new Uint8Array(p ? rows * keys : 0); if (p) paintKinds(s, p, cells, keys); found[interface] = {
    picture: p, cells: Array.from(cells).join(""), remarks: remarksOn(s, interface), call: call(s, interface),
      formulas: p ? s.q_len.map((_, b) => formula(p, b)) : [] };
  }
  return JSON.stringify(found);
}
"""


def argument(s: Setting) -> str:
    return json.dumps(asdict(s))
