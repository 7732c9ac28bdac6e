"""`verify` with files of any names: single outputs, gradients without statistics, nested dicts, bands as text."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from support.commands import run

import fusion_attention as fa
from fusion_attention.judging import outputs
from fusion_attention.judging.naming import value_of
from fusion_attention.ops import RECORDS

CAUSAL = ("--op", "attention", "--set", "band=causal")


def verify(*args: Any) -> tuple[int, str]:
    """(exit code, printed line) of `fusion-attention verify`."""
    outcome = run("verify", "--no-backends", "--no-diagnose", *args)
    return outcome.code, outcome.line


@pytest.fixture(scope="module")
def call() -> dict[str, torch.Tensor]:
    """Tensors [B, S, N, D] of a causal call with two key heads, in plain torch: inputs, outputs, dout and gradients."""
    generator = torch.Generator().manual_seed(3)
    q, k, v, dout = (torch.randn(2, 40, n, 16, generator=generator) for n in (4, 2, 2, 4))
    inputs = [t.requires_grad_() for t in (q, k, v)]
    scores = q.transpose(1, 2) @ k.transpose(1, 2).repeat_interleave(2, 1).mT * 0.25
    scores = scores.masked_fill(torch.ones(40, 40).triu(1).bool(), -torch.inf)
    out = (scores.softmax(-1) @ v.transpose(1, 2).repeat_interleave(2, 1)).transpose(1, 2)
    dq, dk, dv = torch.autograd.grad(out, inputs, dout)
    results = {"q": q, "k": k, "v": v, "out": out, "softmax_lse": scores.logsumexp(-1), "dout": dout,
               "dq": dq, "dk": dk, "dv": dv}  # fmt: skip
    return {name: t.detach() for name, t in results.items()}


@pytest.mark.parametrize("kind", ["npz", "safetensors", "pt"])
def test_verify_judges_forward_and_backward_results_of_a_file(
    kind: str, call: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    file = tmp_path / f"call.{kind}"

    def save(tensors: dict[str, torch.Tensor]) -> None:
        if kind == "npz":
            np.savez(file, **{n: t.numpy() for n, t in tensors.items()})
        elif kind == "pt":
            torch.save(tensors, file)
        else:
            safetensors.torch.save_file({n: t.contiguous() for n, t in tensors.items()}, file)

    save(call)
    code, printed = verify(file, *CAUSAL)
    assert code == 0, printed
    assert "call." + kind + ": forward right" in printed
    assert "call." + kind + ": backward right" in printed
    save({**call, "dk": call["dk"] * 1.01})
    assert verify(file, *CAUSAL)[0] == 1


@pytest.mark.parametrize("name", ["out", "softmax_lse", "dq", "dk", "dv"])
@pytest.mark.parametrize("with_out", [True, False])
def test_any_single_output_or_gradient_can_be_judged(name: str, with_out: bool, call: dict[str, torch.Tensor]) -> None:
    """Without `out` in the inputs, delta is computed from the right output."""
    inputs: dict[str, Any] = {n: call[n] for n in ("q", "k", "v")} | {"band": fa.Band.causal()}
    if name.startswith("d"):
        inputs |= {"dout": call["dout"]} | ({"out": call["out"]} if with_out else {})
    shown = "lse" if name == "softmax_lse" else name
    assert fa.judge("attention", inputs, {shown: call[name]}).passes
    wrong = call[name].clone()
    wrong[1, 3, 1] *= 1.001
    judgement = fa.judge("attention", inputs, {shown: wrong})
    assert judgement.failing() == [shown]
    assert "sequence 1 of 2" in str(judgement)


@pytest.mark.parametrize("names", [("dq", "dk", "dv"), ("dk",)])
def test_key_gradients_summed_over_row_blocks_are_judged_right(
    names: tuple[str, ...], call: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "PAIRS", 500)
    inputs = {n: call[n] for n in ("q", "k", "v", "dout")} | {"band": fa.Band.causal()}
    judgement = fa.judge("attention", inputs, {n: call[n] for n in names})
    assert judgement.grade == "as exact as a kernel that sums in float32"  # not by the second pass, of keys alone


def test_wrong_input_out_makes_correct_dq_wrong_but_not_dv(call: dict[str, torch.Tensor]) -> None:
    """dq depends on delta = sum(dout * out) of the given out; dv does not."""
    inputs = {n: call[n] for n in ("q", "k", "v", "dout")} | {"band": fa.Band.causal(), "out": call["out"] * 0}
    assert not fa.judge("attention", inputs, {"dq": call["dq"]}).passes
    assert fa.judge("attention", inputs, {"dv": call["dv"]}).passes


def test_rows_without_keys_may_have_infinite_lse_and_zero_gradients(call: dict[str, torch.Tensor]) -> None:
    """The lse of such rows is -inf here and inf in flash-attn."""
    q, k, v, dout = (call[n] for n in ("q", "k", "v", "dout"))
    band = fa.Band(hi=-1)
    _, lse = fa.attention(q, k, v, band=band, return_lse=True)
    assert bool(lse[0, 0, :2].isinf().all())
    inputs = {"q": q, "k": k, "v": v, "band": band}
    for empty in (lse, lse.masked_fill(lse.isinf(), torch.inf)):
        assert fa.judge("attention", inputs, {"lse": empty}).passes
    finite = lse.nan_to_num(neginf=0.0)
    assert not fa.judge("attention", inputs, {"lse": finite}).passes
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    gradients = torch.autograd.grad(fa.attention(*leaves, band=band), leaves, dout)
    judgement = fa.judge("attention", {**inputs, "dout": dout}, dict(zip(("dq", "dk", "dv"), gradients, strict=True)))
    assert judgement.passes, judgement


def test_verify_reads_nested_dicts_and_reports_unused_entries(call: dict[str, torch.Tensor], tmp_path: Path) -> None:
    file = tmp_path / "call.pt"
    inputs = {n: call[n] for n in ("q", "k", "v")} | {"scale": 0.25, "q_len": [40, 40]}
    grads = {"dk": call["dk"].clone(), "dout": call["dout"]}
    content = {"inputs": inputs, "mine": {"o": call["out"]}, "grads": grads, "step": 7, "none": None}
    torch.save(content, file)
    code, printed = verify(file, *CAUSAL, "--map", "out=mine.o")
    assert code == 0, printed
    assert "left alone: step" in printed
    assert "2 of 2 right" in printed
    grads["dk"] *= 2
    torch.save(content, file)
    code, printed = verify(file, *CAUSAL, "--map", "out=mine.o", "--diagnose")
    assert (code, "output-factor (2 times)" in printed) == (1, True), printed
    torch.save({"a": {"q": call["q"]}, "b": {"q": call["q"]}, "k": call["k"], "v": call["v"], "out": call["out"]}, file)
    code, printed = verify(file, *CAUSAL)
    assert code == 2
    assert "lacks q; the file has a.q, b.q, k, out, v" in printed


@pytest.mark.parametrize(
    ("text", "band"),
    [
        ("causal", fa.Band.causal()),
        ("Band.causal(align='start')", fa.Band.causal("start")),
        ("window(7,0)", fa.Band.window(7)),
        ("window(5, right=3)", fa.Band.window(5, 3)),
        ("prefix_causal([4, 9])", fa.Band.prefix_causal([4, 9])),
        ("full", fa.Band.full()),
    ],
)
def test_band_written_as_text_is_parsed(text: str, band: fa.Band) -> None:
    assert value_of(RECORDS["attention"], "band", text) == band


@pytest.mark.parametrize(
    "text", ["causl", "window(x)", "window(", "__import__('os')", "full.real", "3", "window(1,2,3,4)"]
)
def test_invalid_band_text_is_refused(text: str) -> None:
    with pytest.raises(fa.JudgeError, match=r"attention: band: expected full, causal, window\(left, right\)"):
        value_of(RECORDS["attention"], "band", text)


def test_packed_lse_is_accepted_in_flash_attn_layout(call: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """softmax_lse is [N, T] in flash-attn, and lse is [T, N] here."""
    packed = {n: call[n].flatten(0, 1) for n in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")}
    lse = call["softmax_lse"].transpose(0, 1).flatten(1)
    torch.save({**packed, "softmax_lse": lse}, tmp_path / "call.pt")
    code, printed = verify(tmp_path / "call.pt", *CAUSAL, "--set", "layout=TND", "--set", "q_len=40,40")
    assert code == 0, printed
    torch.save({**packed, "lse": lse.mT.contiguous()}, tmp_path / "call.pt")
    assert verify(tmp_path / "call.pt", *CAUSAL, "--set", "layout=TND", "--set", "q_len=[40, 40]")[0] == 0


NAN = float("nan")
WRONG: list[tuple[dict[str, Any], int, str]] = [
    ({"k": None, "v": None}, 2, "the call lacks k, v; the file has dk, dout, dq, dv, out, q, softmax_lse"),
    ({"dout": None}, 2, "dk, dq, dv cannot be judged without the gradient of a result: dout or dlse"),
    ({"dout": torch.ones(2, 40, 4, 8)}, 2, "gradient of out: expected float32 [2, 40, 4, 16], got"),
    ({"out": torch.ones(2, 4, 40, 16)}, 2, "axes in another order"),
    ({"q": torch.full((2, 40, 4, 16), NAN)}, 2, "q: every number is NaN"),
    ({"out": torch.full((2, 40, 4, 16), NAN)}, 1, "note: out: every number is NaN"),
    ({"out": torch.randn(2, 40, 4, 16, generator=torch.Generator().manual_seed(5)) * 3}, 1,
     "note: out: further from the right result than zeros are: is it a result of this call?"),
    ({"dq": None, "dk": None, "dv": None, "other": torch.ones(3)}, 0, "left alone: other"),
    ({"out": "text"}, 2, "out: expected a tensor, got str"),
    ({"q": torch.ones(2, 40, 4, 8)}, 2, "not a call of attention"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "code", "text"), WRONG)
def test_verify_reports_missing_wrong_and_nan_tensors(
    changes: dict[str, Any], code: int, text: str, call: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    content = {name: value for name, value in (call | changes).items() if value is not None}
    torch.save(content, tmp_path / "call.pt")
    got, printed = verify(tmp_path / "call.pt", *CAUSAL)
    assert (got, text in printed) == (code, True), printed


def test_verify_refuses_unreadable_pt_and_npz_files(call: dict[str, torch.Tensor], tmp_path: Path) -> None:
    file = tmp_path / "call.pt"
    torch.save(call, file)
    content = file.read_bytes()
    for size in (0, 100, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:size])
        code, printed = verify(file, *CAUSAL)
        assert (code, "not a readable .pt file" in printed) == (2, True), printed
    torch.save({**call, "path": tmp_path}, file)
    code, printed = verify(file, *CAUSAL)
    assert (code, "save a dict of tensors, numbers and strings" in printed) == (2, True), printed
    torch.save(call["q"], file)
    assert "one tensor is no call: save a dict" in verify(file, *CAUSAL)[1]
    deep: Any = call["q"]
    for _ in range(30):
        deep = {"x": deep}
    torch.save(deep, file)
    assert "nested more than" in verify(file, *CAUSAL)[1]
    np.savez(tmp_path / "call.npz", q=np.zeros(4, "V2"))
    assert "numpy has no bfloat16" in verify(tmp_path / "call.npz", *CAUSAL)[1]
