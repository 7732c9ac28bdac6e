"""Tests the tables of tests/clauses: prototypes of CANN's pages, and calls that show each statement of a page."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from clauses import score_grad_v4, score_v4
from clauses.checks import KINDS, TYPES, Page, record_of, wrong
from clauses.pages import PAGES

from fusion_attention import aclnn
from fusion_attention.contract import Attr

pytestmark = pytest.mark.usefixtures("runtime")
RULINGS = Path(__file__).parents[2] / "docs" / "rulings.md"
# Most clauses of these pages are generated or copied from another page: make test runs one in this many.
DAILY = dict.fromkeys(PAGES[7:], 4) | dict.fromkeys((score_v4.PAGE, score_grad_v4.PAGE), 100)
ROWS = [
    pytest.param(page, text, id=f"{page.operator.removeprefix('aclnn')}-{text}",
                 marks=pytest.mark.slow if n % DAILY.get(page, 1) else ())
    for page in PAGES
    for n, text in enumerate(page.clauses)
]  # fmt: skip


def by_name(page: Page) -> str:
    return page.operator.removeprefix("aclnn")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("page", "text"), ROWS)
def test_clause_of_cann_page_holds(page: Page, text: str) -> None:
    results = [f"{check}: {why}" for check in page.clauses[text] if (why := wrong(page, check))]
    assert not results, "\n".join([text, *results])


def spellings(name: str) -> list[str]:
    """Returns a parameter's name in lower case without underscores, and the same without CANN's suffixes."""
    results = [name.lower().replace("_", "")]
    for added in ("optional", "out", "in"):
        results.append(results[-1].removesuffix(added))
    return results


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_operator_parameters_match_prototype_of_cann_page(page: Page) -> None:
    params, cann = record_of(page).params, record_of(page).cann
    assert len(params) == len(page.prototype)
    for ours, p in zip(page.prototype, params, strict=True):
        assert cann[p.shown] == ours.name
        assert isinstance(p, KINDS[ours.kind]), ours
        assert not isinstance(p, Attr) or p.type is TYPES[ours.kind], ours
        assert p.shown == (ours.shown or p.shown), ours
        assert ours.shown or p.shown.replace("_", "") in spellings(ours.name), (ours, p.shown)
        assert not ours.default or p.default == TYPES[ours.kind](ours.default), (ours, p.default)


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_clauses_of_cann_page_cover_every_parameter(page: Page) -> None:
    assert all(page.clauses.values())
    named = {name for check in page.checks() for name in (*check.over, *check.names)}
    assert {p.name for p in page.prototype} <= named, "no call is about these"


@pytest.mark.sampled(12)
@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_clause_checks_detect_wrong_results(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    second = aclnn._second

    def scaled(op: Any, workspace: Any, size: Any, executor: Any, stream: Any) -> int:
        """Runs phase 2, then falsifies the outputs: floats by an eighth and an offset, integers by one bit."""
        args = executor.job.args
        ret = second(op, workspace, size, executor, stream)
        for tensor in (args[p.name] for p in op.tensors(output=True) if isinstance(args[p.name], torch.Tensor)):
            tensor.mul_(1.125).add_(0.001) if tensor.is_floating_point() else tensor.bitwise_xor_(64)
        return ret

    monkeypatch.setattr(aclnn, "_second", scaled)
    computed = [next((check for check in checks if not check.codes), None) for checks in page.clauses.values()]
    assert any(computed)
    assert [check for check in computed if check is not None and not wrong(page, check)] == []


def test_rulings_named_in_clauses_exist_in_rulings_page() -> None:
    numbers = {int(number) for number in re.findall(r"^## (\d+)\.", RULINGS.read_text(encoding="utf-8"), re.MULTILINE)}
    texts = "\n".join(text for page in PAGES for text in page.clauses)
    assert {int(number) for number in re.findall(r"\(ruling (\d+)\)\.$", texts, re.MULTILINE)} <= numbers
    assert texts.count("ruling") == len(re.findall(r"\(ruling \d+\)\.$", texts, re.MULTILINE))
