"""`verify` reads captures, msprobe folders, .npz, .safetensors and .npy, and reports errors of invalid files."""

import json
import os
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from support.commands import content_of, run

import fusion_attention as fa
from fusion_attention.judging import loaders
from fusion_attention.npu import npu_fusion_attention

SCALE = 0.25


def call(scale: float = SCALE) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(inputs, outputs) of one call."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, 12, 2, 16) for _ in range(3))
    out = npu_fusion_attention(q, k, v, 2, "BSND", scale=scale)[0]
    return {"query": q, "key": k, "value": v}, {"attention_out": out}


def verify(*args: Any) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `fusion-attention verify`."""
    return run("verify", *args, "--no-backends")


def refused(*args: Any, what: str) -> None:
    """Assert exit code 2 and one line of stderr that contains `what`."""
    code, _, error = verify(*args)
    assert code == 2, error
    lines = error.strip().splitlines()
    assert len(lines) == 1, error
    assert what in lines[0], error


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    inputs, _ = call()
    with fa.capture(tmp_path / "calls") as recorded:
        npu_fusion_attention(*inputs.values(), 2, "BSND", scale=SCALE, atten_mask=torch.ones(12, 12).triu(1).bool())
    return recorded.files[0]


VALUES = ("head_num=2", "input_layout=BSND", f"scale={SCALE}")
OPTIONS = ("--op", "npu_fusion_attention", *(word for value in VALUES for word in ("--set", value)))


def test_verify_accepts_a_capture_and_diagnoses_a_wrong_scale(capture: Path, tmp_path: Path) -> None:
    assert verify(capture)[0] == 0
    tensors, text = content_of(capture)
    attributes = json.loads(text["attributes"]) | {"scale": 1.0}
    broken = tmp_path / "broken.safetensors"
    safetensors.torch.save_file(tensors, broken, {**text, "attributes": json.dumps(attributes)})
    code, printed, _ = verify(broken, "--html", tmp_path / "page.html")
    assert code == 1
    assert "scale-default" in printed
    page = (tmp_path / "page.html").read_text()
    assert "scale-default" in page
    assert "data:image/png;base64," in page
    assert "http" not in page.replace("http-equiv", "")
    code, printed, _ = verify(broken, "--json")
    result = json.loads(printed)["calls"][0]
    assert (code, result["verdict"], result["mistakes"][0]["name"]) == (1, "wrong", "scale-default")
    assert verify(capture.parent, broken, "--no-diagnose")[0] == 1


def msprobe(folder: Path, scale: float, kind: str = ".pt", **changes: Any) -> Path:
    """Folder with a call in msprobe's format."""
    inputs, outputs = call(scale)
    data = folder / "step0" / "rank0" / "dump_tensor_data"
    data.mkdir(parents=True)
    name = "NPU.npu_fusion_attention.0.forward"

    def tensor(t: torch.Tensor, place: str) -> dict[str, Any]:
        file = f"{name}.{place}{kind}"
        if kind == ".pt":
            torch.save(t, data / file)
        else:
            np.save(data / file, t.numpy())
        return {"type": "torch.Tensor", "dtype": str(t.dtype), "shape": list(t.shape), "data_name": file}

    args: list[Any] = [tensor(t, f"input.{i}") for i, t in enumerate(inputs.values())]
    args += [{"type": "int", "value": 2}, {"type": "str", "value": "BSND"}]
    entry = {
        "input_args": args,
        "input_kwargs": {"scale": {"type": "float", "value": SCALE}, "atten_mask": {"type": "NoneType", "value": None}},
        "output": [tensor(outputs["attention_out"], "output.0")],
    } | changes
    content = {"task": "tensor", "level": "L1", "framework": "pytorch", "dump_data_dir": "/elsewhere",
               "data": {name: entry, "Torch.add.0.forward": {}}}  # fmt: skip
    (data.parent / "dump.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("kind", [".pt", ".npy"])
def test_verify_reads_msprobe_dumps(kind: str, tmp_path: Path) -> None:
    assert verify(msprobe(tmp_path / "right", SCALE, kind))[0] == 0
    code, printed, _ = verify(msprobe(tmp_path / "wrong", 1.0, kind))
    assert code == 1
    assert "scale-missing" in printed
    assert verify(tmp_path / "wrong" / "step0" / "rank0", "--call", "npu_fusion_attention.0", "--no-diagnose")[0] == 1


def save_npz(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    np.savez(path, **{n: t.numpy() for n, t in tensors.items()})


def save_folder(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    path.mkdir()
    for name, t in tensors.items():
        np.save(path / f"{name}.npy", t.numpy())


SAVES: dict[str, Callable[[Path, dict[str, torch.Tensor]], None]] = {
    "x.npz": save_npz,
    "x.safetensors": lambda path, tensors: safetensors.torch.save_file(tensors, path),
    "x": save_folder,
}


@pytest.mark.parametrize("name", SAVES)
def test_verify_maps_tensor_names_of_npz_safetensors_and_npy_files(name: str, tmp_path: Path) -> None:
    inputs, outputs = call()
    SAVES[name](tmp_path / name, {"a": inputs["query"], "key": inputs["key"], "c": inputs["value"],
                                  "o": outputs["attention_out"]})  # fmt: skip
    pairs = tmp_path / "names.json"
    pairs.write_text(json.dumps({"query": "a", "output.attention_out": "o"}))
    named = (*OPTIONS, "--map", pairs, "--map", "value=c", "--no-diagnose")
    assert verify(tmp_path / name, *named)[0] == 0
    assert verify(tmp_path / name, *named, "--set", "scale=0.9")[0] == 1
    refused(
        tmp_path / name,
        *OPTIONS,
        what="lacks query, value; no output to judge (results: attention_out, softmax_max, softmax_sum); the file has",
    )
    refused(tmp_path / name, *OPTIONS, "--map", "query=b", what="has no tensor 'b'")
    refused(tmp_path / name, *OPTIONS, "--map", "qery=a", what="no parameter qery")
    refused(tmp_path / name, what="say which operator")


def test_verify_refuses_missing_invalid_and_incomplete_files(tmp_path: Path, capture: Path) -> None:
    refused(tmp_path / "absent", what="no such file")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", what="no captures, no dump.json")
    noise = tmp_path / "noise.safetensors"
    noise.write_bytes(b"\xff" * 64)
    refused(noise, what="not a readable .safetensors file")
    (truncated := tmp_path / "cut.safetensors").write_bytes(capture.read_bytes()[:-1])
    refused(truncated, what="cut.safetensors")
    bad = tmp_path / "bad.npz"
    bad.write_bytes(b"PK\x03\x04 and nothing")
    refused(bad, *OPTIONS, what="not a readable .npz file")
    inputs, outputs = call()
    save_npz(bad, inputs | outputs)
    refused(bad, "--op", "npu_fusion", what="did you mean")
    refused(bad, "--op", "fft", what="has no definition here")
    refused(bad, *OPTIONS, "--set", "colour=3", what="no parameter colour")
    refused(bad, *OPTIONS, "--set", "colour", what="expected PARAMETER=VALUE")
    refused(bad, *OPTIONS, "--standard", "mine", what="--standard")
    save_npz(bad, outputs)
    refused(bad, *OPTIONS, what="lacks query, key, value")
    save_npz(bad, inputs)
    refused(bad, *OPTIONS, what="no output")
    save_npz(bad, {**inputs, "key": torch.zeros(1, 12, 3, 16), **outputs})
    refused(bad, *OPTIONS, what="not a call of npu_fusion_attention")
    save_npz(bad, {**inputs, "attention_out": torch.zeros(3, 4)})
    refused(bad, *OPTIONS, what="attention_out")
    refused(bad, *OPTIONS, "--html", tmp_path / "no" / "page.html", what="attention_out")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a pipe has no name here")
@pytest.mark.parametrize("name", ["pipe.safetensors", "pipe.npz", "dump.json"])
def test_verify_refuses_named_pipes_without_blocking(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    end = os.open(tmp_path / name, os.O_RDWR)
    closing = threading.Timer(5, os.close, [end])  # a reader of the pipe waits no longer than this
    closing.start()
    refused(tmp_path if name == "dump.json" else tmp_path / name, *OPTIONS, what="not one that can be read to its end")
    closing.cancel()
    os.close(end)


def test_verify_refuses_invalid_bits(capture: Path, tmp_path: Path) -> None:
    tensors, text = content_of(capture)
    wrong = tmp_path / "wrong.safetensors"
    for bits in ({"atten_mask": [1 << 50]}, {"atten_mask": [-1, 12]}, {"query": [12]}, {"atten_mask": "x"}, {"x": [1]}):
        safetensors.torch.save_file(tensors, wrong, {**text, "bits": json.dumps(bits)})
        refused(wrong, what="bits")


class Trap:
    """Object with a pickle that creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_verify_never_runs_pickles_without_unsafe_pickle_option(tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    folder = msprobe(tmp_path / "dump", SCALE)
    data = folder / "step0" / "rank0" / "dump_tensor_data"
    torch.save(Trap(sprung), data / "NPU.npu_fusion_attention.0.forward.input.1.pt")
    refused(folder, what="--unsafe-pickle")
    assert not sprung.exists()
    verify(folder, "--unsafe-pickle")
    assert sprung.exists()
    sprung.unlink()
    boxed = np.array([Trap(sprung)], dtype=object)
    (tmp_path / "np").mkdir()
    np.save(tmp_path / "np" / "query.npy", boxed, allow_pickle=True)
    refused(tmp_path / "np", *OPTIONS, what="query.npy")
    np.savez(tmp_path / "x.npz", query=boxed)
    refused(tmp_path / "x.npz", *OPTIONS, what="x.npz")
    assert not sprung.exists()


@pytest.mark.parametrize(
    ("name", "what"),
    [
        *((name, "leaves the folder") for name in ("../../../../secret.pt", "/etc/x.pt", "link.pt")),
        ("absent.pt", "no such file"),
        *((name, "data_name") for name in ("", 3, "x.txt", "a\0b.pt")),
    ],
)
def test_verify_refuses_dump_paths_outside_the_folder(name: Any, what: str, tmp_path: Path) -> None:
    torch.save(torch.zeros(3), tmp_path / "secret.pt")
    folder = msprobe(tmp_path / "dump", SCALE, input_kwargs={"pse": {"type": "torch.Tensor", "data_name": name}})
    (folder / "step0" / "rank0" / "dump_tensor_data" / "link.pt").symlink_to(tmp_path / "secret.pt")
    refused(folder, what=what)


DEEP = "[" * 5000


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "not JSON"),
        (DEEP, "not JSON"),
        ("[]", "no object 'data'"),
        ('{"data": 3}', "no object 'data'"),
        ('{"data": {}}', "names no call"),
        ('{"task": "statistics", "data": {}}', "holds no tensors"),
        ('{"data": {"NPU.npu_fusion_attention.0.forward": {"input_args": 3}}}', "expected lists"),
        ('{"data": {"NPU.npu_fusion_attention.0.forward": {}}}', "no output"),
        (
            '{"data": {"NPU.npu_fusion_attention.0.forward": {"input_args": [{"type": "torch.Tensor"}]}}}',
            "without data",
        ),
        ('{"data": {"NPU.npu_fusion_attention.0.forward": {"input_kwargs": {"x": 1}}}}', "no parameter x"),
        (f'{{"data": {{"NPU.npu_fusion_attention.0.forward": {{"input_args": {"[" * 40 + "]" * 40}}}}}}}', "deep"),
    ],
)
def test_verify_refuses_malformed_dump_json(text: str, what: str, tmp_path: Path) -> None:
    (tmp_path / "dump.json").write_text(text)
    refused(tmp_path, what=what)


def test_verify_refuses_oversized_files_before_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = tmp_path / "bomb.npz"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("query.npy", b"\0" * (1 << 20))
    monkeypatch.setattr(loaders, "LIMIT", 1 << 19)
    refused(bomb, *OPTIONS, what="GiB of values, more than")


def test_verify_error_messages_are_short_and_printable(capture: Path, tmp_path: Path) -> None:
    tensors, text = content_of(capture)
    for operator in ("x" * 100_000, "a\nb\x1b[31m"):
        safetensors.torch.save_file(tensors, wrong := tmp_path / "wrong.safetensors", {**text, "operator": operator})
        refused(wrong, what="has no definition here")
        assert len(sentence := verify(wrong)[2].strip()) < 1100
        assert sentence.isprintable()


def test_captures_with_random_bytes_never_crash_verify(tmp_path: Path, capture: Path) -> None:
    """A changed file gives one error sentence (exit code 2) or a verdict (0 or 1)."""
    full = capture.read_bytes()
    for seed in range(30):
        generator = np.random.default_rng(seed)
        forged = bytearray(full)
        for _ in range(4):
            forged[int(generator.integers(min(len(forged), 2500)))] = int(generator.integers(256))
        (file := tmp_path / "forged.safetensors").write_bytes(forged)
        code, _, error = verify(file, "--no-diagnose")
        assert code in (0, 1, 2)
        assert (code == 2) == (len(error.strip().splitlines()) == 1), error
