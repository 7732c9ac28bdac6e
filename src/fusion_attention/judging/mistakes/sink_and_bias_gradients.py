"""Mistakes in gradients that are sums over all sequences: of sinks and of biases."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from fusion_attention.judging.editable_call import Setting
from fusion_attention.judging.expected_error import LEFT, PROGRAM
from fusion_attention.judging.measure import of_total
from fusion_attention.judging.outputs import Output, Wanted, totals
from fusion_attention.judging.verdict import Explanation

Tensor = torch.Tensor
_SEQUENCES = 8  # largest number of sequences whose single contributions are tried
_NAMES = {"dsink": ("sink-gradient", "The gradient of the sink is wrong.", "dsink = -sum(P(sink) * delta)."),
          "dpse": ("bias-gradient", "The gradient of the bias is wrong.",
                   "dbias = dS, times the scale if the bias is added before it.")}  # fmt: skip
NAMES = tuple(_NAMES.values())


def explained(setting: Setting, outputs: Sequence[Output], failing: Sequence[str]) -> tuple[Explanation, ...]:
    """Returns the mistakes that explain a call's wrong gradients of sinks and of a bias, which are sums over all
    sequences. failing: the names of the wrong outputs."""
    results = []
    for o in (o for o in outputs if o.view is None and o.name in failing):
        right, mine = totals(setting, o, PROGRAM), o.tensor.double()
        error = float((mine - right.value).norm())
        for detail, wanted in _ways(setting, o, mine, right):
            tally = of_total(setting, o, wanted)
            if tally.passes and float((mine - wanted.value).norm()) <= LEFT * error:
                name, means, fix = _NAMES[o.kind]
                results.append(Explanation(name, detail, means, fix, (o.name,), tally.z, confirmed=True))
    return tuple(results)


def _ways(setting: Setting, o: Output, mine: Tensor, right: Wanted) -> Iterator[tuple[str, Wanted]]:
    value, variance = right.value, right.variance
    if mine.isfinite().all() and value.any():
        factor = float((mine * value).sum() / value.square().sum())
        factors = float(f"{factor:.1g}"), float(f"{factor:.2g}"), factor
        ways = {by: Wanted(by * value, max(by**2, 1.0) * variance) for by in factors}
        factor = next((by for by, wanted in ways.items() if of_total(setting, o, wanted).passes), factor)
        detail = "the other sign" if factor == -1 else "zeros" if not factor else f"{factor:.4g} times the right one"
        yield detail, ways[factor]
    if o.kind == "dsink":
        for word, by in (("next", -1), ("previous", 1)):
            yield f"that of the {word} head", Wanted(value.roll(by), variance.roll(by))
    count = len(setting.extents)
    for b in range(count if 1 < count <= _SEQUENCES else 0):
        length = np.where(np.arange(count) == b, setting.extents.q_len, 0)
        one = totals(setting.of_extents(q_len=length), o, PROGRAM)
        yield f"of sequence {b} alone", one
        yield f"without sequence {b}", Wanted(value - one.value, variance)
