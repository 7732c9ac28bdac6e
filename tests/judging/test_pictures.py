"""Pictures of wrong places in a result, the progress bar of a long verdict, and the page docs/find_the_bug.md."""

import io
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from rich.console import Console
from support.sources import ROOT

import fusion_attention as fa
from fusion_attention.judging import progress
from fusion_attention.judging.error_heatmap import PAGE, TERMINAL, Surface, grid
from fusion_attention.judging.report import page


def surface(z: torch.Tensor) -> Surface:
    """Surface of one sequence; z [heads, rows] is wrong above 2."""
    return Surface([z], [z > 2], "heads", "rows")


@pytest.mark.parametrize("shape", [(1, 1), (16, 64), (17, 65), (40, 1000), (3, 129)])
@pytest.mark.parametrize("most", [TERMINAL, PAGE])
def test_heatmap_marks_a_wrong_element_in_the_right_cell(shape: tuple[int, int], most: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    for _ in range(5):
        head, row = (int(torch.randint(n, (), generator=generator)) for n in shape)
        z = torch.ones(shape)
        z[head, row] = 50.0
        g = grid(surface(z), 0, most)
        assert g.z.shape[0] <= most[0]
        assert g.z.shape[1] <= most[1]
        assert g.wrong.nonzero().tolist() == [[head // g.steps[0], row // g.steps[1]]]
        assert float(g.z[g.wrong]) == 50.0
        assert all(step & (step - 1) == 0 for step in g.steps)  # cells begin where tiles do


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_heatmap_marks_nan_and_infinity_separately(value: float) -> None:
    q = torch.randn(2, 70, 3, 16)
    out = fa.attention(q, q, q)
    out[1, 64:, 2] = value
    out[1, :2, 0] *= 1.01
    judgement = fa.judge("attention", dict.fromkeys("qkv", q), {"out": out})
    title, ticks, *heads = judgement.pictures().splitlines()
    assert title.startswith("out, sequence 1 of 2: worst z of 2 rows; · within the bound, █ ")
    assert title.endswith(", ! not finite")
    assert re.fullmatch(r" +0 +32 +64 +rows", ticks)
    assert [line.split()[-1] for line in heads] == ["█" + 34 * "·", 35 * "·", 32 * "·" + "!!!"]
    assert judgement._repr_html_().count("data:image/png;base64,") == 1
    assert page([judgement]).count("data:image/png;base64,") == 2  # the sequence that is right, too


def test_right_outputs_have_no_heatmap() -> None:
    q = torch.randn(1, 20, 2, 16)
    judgement = fa.judge("attention", dict.fromkeys("qkv", q), {"out": fa.attention(q, q, q)})
    assert judgement.pictures() == ""
    assert "png" not in judgement._repr_html_()


def test_bias_gradient_heatmap_has_rows_by_keys() -> None:
    q, k = torch.randn(1, 40, 2, 8), torch.randn(1, 64, 2, 8)
    bias = torch.zeros(1, 2, 40, 64, requires_grad=True)
    out = fa.attention(q, k, k, bias=bias)
    dout = torch.randn_like(out)
    (gradient,) = torch.autograd.grad(out, bias, dout)
    inputs = {"q": q, "k": k, "v": k, "bias": bias.detach(), "dout": dout}
    assert fa.judge("attention", inputs, {"dpse": gradient}).passes
    wrong = gradient.clone()
    wrong[0, 1, 8:16, 16:32] *= 2
    title, _, *rows = fa.judge("attention", inputs, {"dpse": wrong}).pictures().splitlines()
    assert "worst z of 4 rows by 16 keys" in title
    marks = [line.split()[-1] for line in rows]
    assert [i for i, line in enumerate(marks) if set(line) != {"·"}] == [2, 3]
    assert all(line[0] == "·" != line[1] and line[2:] == "··" for line in marks[2:4])


def test_progress_bar_is_shown_only_after_two_seconds_on_a_terminal() -> None:
    for seconds, terminal, drawn in ((1.9, True, False), (2.1, True, True), (9.0, False, False)):
        text = io.StringIO()
        clock = mock.patch.object(progress.time, "monotonic", side_effect=[0.0, *[seconds] * 100])
        with clock, progress.Bar("call", Console(file=text, force_terminal=terminal)) as watch:
            assert list(progress.over(watch, "measured", "abc")) == ["a", "b", "c"]
        assert ("call measured" in text.getvalue()) == drawn


def form(line: str) -> str:
    """A printed line; in lines of right outputs # replaces numbers, which depend on the processor's roundings."""
    return re.sub(r"[\d.]+(e[+-]\d+)?x?", "#", re.sub(r" +", " ", line)) if "│ right" in line else line.rstrip()


@pytest.mark.slow
def test_docs_page_shows_the_output_of_the_find_the_bug_example(tmp_path: Path) -> None:
    written = (ROOT / "docs" / "find_the_bug.md").read_text(encoding="utf-8").partition("## Gradients")[0]
    script = ROOT / "examples" / "find_the_bug.py"
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert result.returncode == 0, result.stderr
    printed = [form(line) for line in result.stdout.splitlines()]
    shown = [block for block in re.findall(r"```text\n(.*?)```", written, re.S) if "│" in block]
    assert len(shown) == 2
    assert [line for block in shown for line in block.splitlines() if form(line) not in printed] == []
    (diff,) = re.findall(r"```diff\n(.*?)```", written, re.S)
    source = script.read_text(encoding="utf-8")
    assert all(line[1:].strip() in source for line in diff.splitlines())


def test_mask_is_drawn_with_the_error_heatmap() -> None:
    q = torch.randn(2, 32, 2, 16)
    out = fa.attention(q, q, q, band=fa.Band.causal())
    out[1, 3] = 0
    judgement = fa.judge("attention", {**dict.fromkeys("qkv", q), "band": fa.Band.causal()}, {"out": out})
    title, ticks, *rows = judgement.pictures().splitlines()[-10:]
    assert title.startswith("the mask of sequence 1: ")
    assert re.fullmatch(r"rows +0 +16 +keys", ticks)
    assert [line.split()[0] for line in rows] == [str(row) for row in range(0, 32, 4)]
    assert [line.split()[1] for line in rows] == [(row + 1) * "█" + (31 - row) * "·" for row in range(0, 32, 4)]
    assert "the mask of sequence 1" in page([judgement])
    assert "the mask" not in fa.judge("attention", dict.fromkeys("qkv", q), {"out": out}).pictures()
