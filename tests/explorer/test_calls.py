"""Calls that the explorer writes run, see the drawn keys, and raise the errors that the page shows."""

import random
import warnings
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from support.explorer_settings import random_setting

import fusion_attention as fa
from fusion_attention import acl, npu
from fusion_attention.contract import ContractError, ContractWarning
from fusion_attention.explorer.calls import call
from fusion_attention.explorer.draw import cells_of, is_seen
from fusion_attention.explorer.violations import OPERATORS, remarks_on, rules_of, verdict
from fusion_attention.explorer.visible import INTERFACES, MODES, Setting

SETTINGS = 24  # of every mode and interface; a third of them in two phases, which run the code of training


@pytest.fixture(autouse=True)
def _as_torch_npu() -> Iterator[None]:
    npu.install()
    yield
    npu.uninstall()
    acl.finalize()


def message(operator: str, remark: dict[str, Any]) -> str:
    """Error text of a remark, without CANN's name of the parameter."""
    got = f", got {remark['got']}" if remark["got"] else ""
    advice = f" ({remark['advice']})" if remark["advice"] else ""
    return f"{operator}: {remark['param']}: expected {remark['expected']}{got}{advice}"


def prepare(s: Setting, before: str) -> dict[str, Any]:
    """Tensors made by a call's text: q and k are zero, and a value row is the one-hot vector of its key's number."""
    names: dict[str, Any] = {}
    exec(before, names)
    q, k, v = (names[name] for name in ("q", "k", "v") if name in names) if "q" in names else (
        names[name] for name in ("query", "key", "value")
    )  # fmt: skip
    q.zero_()
    k.zero_()
    positions = torch.cat([torch.arange(n) for n in s.kv_len])
    rows = torch.eye(v.shape[-1])[positions][:, None]
    v.copy_(rows.expand(-1, v.shape[-2], -1) if s.packed else rows[None].expand(1, -1, v.shape[-2], -1))
    return names


def check_seen(s: Setting, interface: str, out: torch.Tensor) -> None:
    """Assert that each output row has exactly the picture's visible keys; a row without keys: zeros or a mean."""
    cells = cells_of(s, interface)
    assert cells is not None
    weights = (out if s.packed else out[0]).float().cpu().numpy()
    starts_q, starts_k = ([0, *accumulate(n)] for n in (s.q_len, s.kv_len))
    for b, (rows, keys) in enumerate(zip(s.q_len, s.kv_len, strict=True)):
        wanted = is_seen(cells[starts_q[b] :][:rows, starts_k[b] :][:, :keys])
        got = weights[starts_q[b] :][:rows, :, :keys] > 0
        empty = ~wanted.any(1)
        assert np.array_equal(got[~empty], np.broadcast_to(wanted[:, None], got.shape)[~empty]), (s, interface, b)
        assert (got[empty].all(-1) | ~got[empty].any(-1)).all()


def params_named(failures: Any, operator: str, interface: str) -> set[str]:
    """Messages of the failures that the explorer's rules include."""
    rules = {rule.id for rule in rules_of(operator, interface)}
    domain = [rule.expected for rule in rules_of(operator, interface) if rule.stage == "domains"]
    results = set()
    for failure in failures:
        if failure.rule.id in rules if failure.rule else failure.expected in domain:
            got = {"got": failure.got, "param": failure.param, "expected": failure.expected, "advice": failure.advice}
            results.add(message(operator, got))
    return results


def refusal(text: str, names: dict[str, Any]) -> tuple[Any, list[str]]:
    """(failures or None, texts of warnings) of a call."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            exec(text, names)
            failures = None
        except ContractError as error:
            failures = error.failures
    return failures, [str(w.message) for w in warned if issubclass(w.category, ContractWarning)]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("interface", ["own", "training", "inference"])
def test_generated_calls_match_the_drawn_mask_and_verdict(mode: int, interface: str) -> None:
    rng = random.Random(f"{mode} {interface}")
    for _ in range(SETTINGS):
        s = random_setting(rng, longest=7, modes=(mode,))
        text, result = call(s, interface), remarks_on(s, interface)
        if text is None or "your_mask" in text["before"]:
            continue
        names = prepare(s, text["before"])
        failures, warned = refusal(text["call"], names)
        if interface == "own":
            assert failures is None, (s, failures)
            check_seen(s, interface, names["out"])
            continue
        operator = OPERATORS[interface][s.packed]
        by_level = {
            level: {message(operator, r) for r in result if r["level"] in level} for level in ("meaning", "note")
        }
        assert (failures is not None) is (verdict(result) == "refused"), (s, result, failures)
        if failures is not None:
            assert params_named(failures, operator, interface) == by_level["meaning"]
            continue
        check_seen(s, interface, names["out"])
        assert by_level["note"] <= set(warned)
        with fa.strict():
            failures, _ = refusal(text["call"], names)
        limits = {message(operator, r) for r in result if r["level"] in ("limit", "doubt")}
        assert params_named(failures or (), operator, interface) == limits, (s, result, failures)


@pytest.mark.parametrize("mode", MODES)
def test_two_phase_calls_match_the_drawn_mask_and_error_code(mode: int) -> None:
    rng = random.Random(mode)
    for _ in range(SETTINGS // 3):
        s = random_setting(rng, longest=7, modes=(mode,))
        text, result = call(s, "two_phase"), remarks_on(s, "two_phase")
        if text is None or "your_mask" in text["before"]:
            continue
        names = prepare(s, text["before"])
        failures, _ = refusal(text["call"], names)
        assert failures is None
        refused = [remark for remark in result if remark["level"] in ("meaning", "limit", "doubt")]
        assert names["ret"] == (refused[0]["code"] if refused else 0), (s, result, acl.get_recent_err_msg())
        if not refused:
            check_seen(s, "two_phase", names["out"])


def test_every_explorer_interface_has_an_operator() -> None:
    assert {"own", *OPERATORS} == set(INTERFACES)
