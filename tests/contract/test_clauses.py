"""Pages of CANN, clause by clause: prototypes, and calls with what the page says of them (tests/clauses)."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from clauses import score_grad_v4, score_v4, table
from clauses.pages import PAGES
from clauses.table import KINDS, TYPES, Check, Page, bytes_of, called, outputs_of, record_of, wrong

from fusion_attention import aclnn
from fusion_attention.acl import state
from fusion_attention.contract import Attr

pytestmark = pytest.mark.usefixtures("runtime")
RULINGS = Path(__file__).parents[2] / "docs" / "rulings.md"
# Pages most of whose clauses follow from their parameters or are another page's: one in so many runs every day.
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
def test_the_clause_holds(page: Page, text: str) -> None:
    results = [f"{check}: {why}" for check in page.clauses[text] if (why := wrong(page, check))]
    assert not results, "\n".join([text, *results])


def spellings(name: str) -> list[str]:
    """A parameter's name, and what is left of it without what pages add to names."""
    results = [name.lower().replace("_", "")]
    for added in ("optional", "out", "in"):
        results.append(results[-1].removesuffix(added))
    return results


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_the_prototype_is_the_page_s(page: Page) -> None:
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
def test_every_page_is_checked_throughout(page: Page) -> None:
    assert all(page.clauses.values())
    named = {name for check in page.checks() for name in (*check.over, *check.names)}
    assert {p.name for p in page.prototype} <= named, "no call is about these"


# ------------------------------------------------------------------------------------------------------------- breaking

SECOND = aclnn._second
Broken = Callable[[dict[str, Any]], None]


def missed(page: Page, wanted: Callable[[Check], bool]) -> list[str]:
    """Of the first checks of a kind, one in every clause that has one: those that find nothing wrong."""
    results = [next(filter(wanted, checks), None) for checks in page.clauses.values()]
    checks = [check for check in results if check is not None]
    assert checks
    return [str(check) for check in checks if not wrong(page, check)]


def nothing(outputs: dict[str, torch.Tensor]) -> None:
    """Leaves every output as it was."""
    for tensor in outputs.values():
        bytes_of(tensor).fill_(0xFF)


def scaled(outputs: dict[str, torch.Tensor]) -> None:
    """All of it is larger by an eighth, and not zero."""
    for tensor in outputs.values():
        tensor.mul_(1.125).add_(0.001) if tensor.is_floating_point() else tensor.bitwise_xor_(64)


def last_row(outputs: dict[str, torch.Tensor]) -> None:
    """The last number of the last output is another one."""
    tensor = [tensor for tensor in outputs.values() if tensor.numel()][-1]
    at = (-1,) * tensor.dim()
    tensor[at] = torch.nan if tensor.is_floating_point() else tensor[at] ^ 64


@pytest.mark.sampled(15)
@pytest.mark.parametrize("breaking", [nothing, scaled, last_row], ids=lambda f: f.__name__)
@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_a_wrong_result_is_noticed(page: Page, breaking: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs: dict[str, Any] = {}

    def second(op: Any, *arguments: Any) -> int:
        ret = SECOND(op, *arguments)
        breaking(outputs)
        return ret

    def prepared(page: Page, args: dict[str, Any], *second: Any) -> Any:
        outputs.clear()
        outputs.update({name: args[name] for name in outputs_of(page) if isinstance(args[name], torch.Tensor)})
        return called(page, args, *second)

    monkeypatch.setattr(aclnn, "_second", second)
    monkeypatch.setattr(table, "called", prepared)
    assert not missed(page, lambda check: not check.codes)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_a_call_that_is_not_refused_is_noticed(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aclnn, page.operator + "GetWorkspaceSize", lambda *_: (0, 0, None))
    monkeypatch.setattr(aclnn, "_second", lambda *_: 0)
    assert not missed(page, lambda check: bool(check.codes))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_a_refusal_for_another_reason_is_noticed(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    for code, text in ((561002, "no such parameter"), (161000, "query")):

        def first(*_: Any, code: int = code, text: str = text) -> tuple[int, int, None]:
            state.note(f"{page.operator}: {text}: expected something else")
            return code, 0, None

        monkeypatch.setattr(aclnn, page.operator + "GetWorkspaceSize", first)
        assert not missed(page, lambda check: bool(check.codes) and check.second is None), text


@pytest.mark.sampled(6)
@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_a_refusal_that_writes_is_noticed(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    def writing(page: Page, args: dict[str, Any], *second: Any) -> Any:
        result = called(page, args, *second)
        for name in outputs_of(page):
            if isinstance(args[name], torch.Tensor) and args[name].numel():
                bytes_of(args[name])[0] = 0
        return result

    monkeypatch.setattr(table, "called", writing)
    assert not missed(page, lambda check: bool(check.codes))


def test_rulings_exist() -> None:
    numbers = {int(number) for number in re.findall(r"^## (\d+)\.", RULINGS.read_text(encoding="utf-8"), re.MULTILINE)}
    texts = "\n".join(text for page in PAGES for text in page.clauses)
    assert {int(number) for number in re.findall(r"\(ruling (\d+)\)\.$", texts, re.MULTILINE)} <= numbers
    assert texts.count("ruling") == len(re.findall(r"\(ruling \d+\)\.$", texts, re.MULTILINE))
