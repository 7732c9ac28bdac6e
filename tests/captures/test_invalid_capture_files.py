"""replay(): a truncated, foreign or mislabelled file gives one error, which names the file and the field."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support.commands import content_of

import fusion_attention as fa
from fusion_attention import npu
from fusion_attention.npu import npu_fusion_attention


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    with fa.capture(tmp_path) as recorded:
        q = rows(2, 5, 4, 16)
        npu_fusion_attention(q, q, q, 4, "BSND", scale=0.25, keep_prob=0.5)
    return recorded.files[0]


def rewrite(file: Path, **changes: Any) -> None:
    tensors, text = content_of(file)
    for name, value in changes.items():
        if isinstance(value, torch.Tensor):
            tensors[name.replace("__", ".")] = value
        elif value is None:
            text.pop(name)
        else:
            text[name] = value if isinstance(value, str) else json.dumps(value)
    safetensors.torch.save_file(tensors, file, text)


def refused(file: Path, what: str) -> None:
    """Assert that replay() raises a short CaptureError with the file's name."""
    with pytest.raises(fa.CaptureError, match=what) as caught:
        fa.replay(file)
    assert str(file) in str(caught.value)
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize("size", [0, 3, 8, 100, 700, -1])
def test_replay_refuses_truncated_file(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])
    refused(file, r"0000-.*: not a readable .safetensors file")


def test_replay_refuses_files_not_written_by_capture(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no tensors here" * 9)
    safetensors.torch.save_file({"weight": torch.ones(2)}, tmp_path / "model")
    for name, what in (("text", "not a readable"), ("model", "not one that capture")):
        refused(tmp_path / name, what)
    with pytest.raises(FileNotFoundError, match="nothing"):
        fa.replay(tmp_path / "nothing")
    with pytest.raises(OSError, match="Not a file"):
        fa.replay(tmp_path)


def test_capture_into_removed_folder_warns_and_returns_the_result(tmp_path: Path) -> None:
    q = torch.randn(1, 4, 2, 16)
    with fa.capture(tmp_path / "gone") as recorded:
        (tmp_path / "gone").rmdir()
        with pytest.warns(UserWarning, match="gone no longer exists, so this call of attention is not written"):
            out = fa.attention(q, q, q)
    assert torch.equal(out, fa.attention(q, q, q))
    assert recorded.files == []


DEEP = "[" * 100_000 + "]" * 100_000
THREE = ["attention_out", "softmax_max", "softmax_sum"]
REQUIRED = {"head_num": 4, "input_layout": "BSND"}
BAND = [-(2**40), 1, "end", []]


def strides(**given: Any) -> dict[str, Any]:
    return {name: [320, 64, 16, 1] for name in ("query", "key", "value")} | given


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"operator": "npu_fusion_attention_v9"}, "operator 'npu_fusion_attention_v9' has no definition here"),
        ({"operator": "../../etc/passwd"}, "has no definition here"),
        ({"operator": "npu_fusion_attention_grad"}, "not one of npu_fusion_attention_grad: .*dy: expected a value"),
        ({"operator": "attention"}, "tensors: expected names of parameters, got 'key'"),
        ({"version": "3"}, "format version '3', and this library reads 1 and 2"),
        ({"seed": None}, "not one that capture"),
        ({"seed": "x"}, "seed: expected JSON"),
        ({"seed": 1.5}, "seed: expected an integer, got 1.5"),
        ({"seed": 2**64}, "seed: expected an integer of 64 bits"),
        ({"seed": "9" * 5000}, "seed: expected JSON|seed: expected an integer of 64 bits"),
        ({"attributes": "{"}, "attributes: expected JSON"),
        ({"attributes": DEEP}, "attributes: expected JSON"),
        ({"attributes": [1]}, r"attributes: expected an object, got \[1\]"),
        ({"attributes": {"scale": 1.0}}, "not one of npu_fusion_attention"),
        ({"attributes": REQUIRED | {"head_num": 3}}, "not one of npu_fusion_attention: .*head_num"),
        ({"attributes": {"color": 3}}, "attributes: expected names of parameters .*, got 'color'"),
        ({"attributes": REQUIRED | {"scale": [1.0]}}, r"attributes: scale: expected a number or a string, got \[1.0\]"),
        ({"attributes": REQUIRED | {"head_num": 10**40}}, "attributes: head_num: expected an integer of 64 bits"),
        ({"arrays": []}, "arrays: expected an object"),
        ({"arrays": {"prefix": ["a"]}}, "arrays: prefix: expected a list of integers of 64 bits"),
        ({"arrays": {"prefix": [4.5, 16]}}, r"arrays: prefix: expected a list of integers .*, got \[4.5, 16\]"),
        ({"arrays": {"prefix": [1, 2**63]}}, "arrays: prefix: expected a list of integers"),
        ({"arrays": {"heads": [1]}}, "arrays: expected names of parameters .*, got 'heads'"),
        ({"outputs": ["attention_out", "dq"]}, "outputs: expected names of tensors .*, got 'dq'"),
        ({"outputs": [*THREE, "softmax_sum"]}, "outputs: expected names of tensors .*each once, got 'softmax_sum'"),
        ({"outputs": [["attention_out"]]}, "outputs: expected names of tensors"),
        ({"outputs": {}}, "outputs: expected a list"),
        ({"outputs": []}, "strides: expected the names of all input tensors .*output.attention_out"),
        ({"strides": "x"}, "strides: expected JSON"),
        ({"strides": []}, "strides: expected an object"),
        ({"strides": {}}, "strides: expected the names of all input tensors and no others"),
        ({"strides": strides(query="x")}, "strides: query: expected an integer >= 0 for each axis .*, got 'x'"),
        ({"strides": strides(key=[320, 64, 16, -1])}, "strides: key: expected an integer >= 0 for each axis"),
        ({"strides": strides(key=[320, 64, 16, 2**64])}, "strides: key: expected an integer >= 0"),
        ({"strides": strides(key=[64, 16, 1])}, "strides: key: expected an integer >= 0 for each axis"),
        ({"strides": strides(value=None)}, "strides: value: expected an integer >= 0"),
        ({"query": torch.ones(2, 5, 4, 8)}, "not one of npu_fusion_attention: "),
        ({"extra": torch.ones(1)}, r"strides: expected the names of all input tensors .*, got \['extra'\]"),
        ({"extra": torch.ones(1), "strides": strides(extra=[1])}, "tensors: expected names of parameters, got 'extra'"),
        ({"key[0]": torch.ones(1), "strides": strides(**{"key[0]": [1]})}, "parameters that are lists of .*got 'key'"),
        ({"output__dq": torch.ones(1), "outputs": [*THREE, "dq"]}, "no output dq"),
    ],
)
def test_replay_refuses_file_with_invalid_metadata_field(file: Path, changes: dict[str, Any], what: str) -> None:
    rewrite(file, **changes)
    refused(file, what)


@pytest.mark.parametrize(
    "band",
    [
        *(3, {}, [], BAND[:3], [*BAND, 1], ["a", *BAND[1:]], [True, *BAND[1:]], [1.0, *BAND[1:]], [10**40, *BAND[1:]]),
        *([*BAND[:2], "middle", []], [*BAND[:2], 3, []], [*BAND[:3], 3], [*BAND[:3], ["a"]], [*BAND[:3], [[1]]]),
        [0, 1, "end", [3]],
    ],
    ids=str,
)
def test_replay_refuses_file_with_invalid_band(band: Any, tmp_path: Path) -> None:
    q = rows(2, 5, 4, 16)
    with fa.capture(tmp_path) as recorded:
        fa.attention(q, q, q, band=fa.Band.prefix_causal([1, 2]))
    (file,) = recorded.files
    attributes = json.loads(content_of(file)[1]["attributes"])
    assert attributes["band"] == [*BAND[:3], [1, 2]]
    rewrite(file, attributes={**attributes, "band": band})
    refused(file, "attributes: band: expected the fields of a Band")


@pytest.mark.parametrize(
    "names", [["k[1]"], ["k[0]", "k[2]"], ["k[0]", "k[01]"], ["k[0]", "k[]"], ["k[0", "k[1]"], ["k", "k[0]"]]
)
def test_replay_refuses_file_with_invalid_names_of_list_elements(names: list[str], tmp_path: Path) -> None:
    q, keys = rows(2, 1, 4, 16), [rows(1, 3, 2, 16), rows(1, 5, 2, 16)]
    with fa.capture(tmp_path) as recorded:
        fa.decode_attention(q, (keys, keys))
    (file,) = recorded.files
    assert fa.replay(file).worst == 0.0
    tensors, text = content_of(file)
    steps = json.loads(text["strides"])
    lists = [(tensors.pop(name), steps.pop(name)) for name in ("k[0]", "k[1]")]
    for name, (tensor, stride) in zip(names, lists, strict=False):
        tensors[name], steps[name] = tensor, stride
    safetensors.torch.save_file(tensors, file, {**text, "strides": json.dumps(steps)})
    refused(file, r"tensors: expected (names of a list's members|names that have no value yet).*, got 'k")


def test_replay_reports_differences_of_changed_outputs(file: Path) -> None:
    tensors = safetensors.torch.load_file(file)
    out, top = tensors["output.attention_out"], tensors["output.softmax_max"]
    rewrite(file, output__attention_out=out + 0.5, output__softmax_max=top[:1].clone())
    again = fa.replay(file)
    rounded = torch.finfo(out.dtype).eps * (1 + out.abs().max())
    assert abs(again.differences["attention_out"] - 0.5) <= rounded
    assert again.differences["softmax_max"] == float("inf")
    assert again.differences["softmax_sum"] == 0.0
    rewrite(file, output__attention_out=torch.full_like(out, torch.nan))
    assert fa.replay(file).differences["attention_out"] == float("inf")


def dense() -> None:
    q = rows(2, 5, 4, 16)
    fa.attention(q, q, q, band=fa.Band.prefix_causal([1, 2]), bias=rows(5, 5), keep_prob=0.5)


def packed() -> None:
    q, ends = rows(10, 4, 16), [3, 10]
    npu.npu_fusion_attention_v2(q, q, q, 4, "TND", actual_seq_qlen=ends, actual_seq_kvlen=ends, sink=rows(4))


def gradient() -> None:
    q = rows(2, 5, 4, 16)
    out, top, total, *_ = npu.npu_fusion_attention(q, q, q, 4, "BSND")
    saved = {"softmax_max": top, "softmax_sum": total, "attention_in": out}
    npu.npu_fusion_attention_grad(q, q, q, q, 4, "BSND", **saved)


def decoding() -> None:
    cache = fa.PagedKVCache(2, 16, 6, page_size=4, stored="int8")
    cache.append([cache.allocate()], rows(1, 7, 2, 16), rows(1, 7, 2, 16))
    fa.decode_attention(rows(1, 1, 4, 16), cache)


def selecting() -> None:
    lists = fa.lightning_indexer(rows(1, 5, 3, 8), rows(1, 5, 1, 8), rows(1, 5, 3), 3)[0]
    fa.sparse_attention(rows(1, 5, 4, 16), rows(1, 5, 1, 16), None, lists)


# Forged JSON values for any field. The call, not the file, determines how much memory is allocated.
HOSTILE = [
    *(None, True, False, -1, 0, 1, 3, 4.5, 2**31, 2**63 - 1, -(2**63), 2**64, 10**40),
    *(float("nan"), float("inf"), 1e300),
    *("", "x", "BSND", "TND", [], [0], [3, 10], [10, 3], [4.5], ["a"], [[1]], {}, {"a": 1}, [10**40], [True]),
]


def forged(value: Any, chance: random.Random) -> Any:
    """Copy of a JSON value with one random value or key replaced or deleted."""
    if isinstance(value, (dict, list)) and value and chance.random() < 0.8:
        copy: Any = dict(value) if isinstance(value, dict) else list(value)
        key = chance.choice(list(value)) if isinstance(value, dict) else chance.randrange(len(value))
        what = chance.random()
        if what < 0.2:
            del copy[key]
        elif what < 0.3 and isinstance(copy, dict):
            copy[chance.choice(["query", "k", "band", "seed", "x", "prefix", "k[0]"])] = copy.pop(key)
        else:
            copy[key] = forged(value[key], chance)
        return copy
    return chance.choice(HOSTILE)


def poisoned(tensor: torch.Tensor, chance: random.Random) -> torch.Tensor:
    """Copy of a tensor with another shape, dtype or content."""
    dtypes = (torch.float32, torch.float16, torch.int32, torch.int64, torch.bool, torch.uint8)
    changes: list[Callable[[], torch.Tensor]] = [
        lambda: tensor[..., :1],
        lambda: tensor[:0],
        tensor.flatten,
        lambda: tensor.reshape(1, *tensor.shape),
        lambda: tensor.to(chance.choice(dtypes)),
        lambda: torch.full_like(tensor, chance.choice([-1, 0, 1, 100])),
    ]
    return chance.choice(changes)().contiguous().clone()


@pytest.mark.filterwarnings("ignore::fusion_attention.ContractWarning")
@pytest.mark.parametrize("call", [dense, packed, gradient, decoding, selecting], ids=lambda call: call.__name__)
def test_randomly_changed_files_replay_or_raise_capture_error(call: Callable[[], None], tmp_path: Path) -> None:
    """Half of 150 changes flip a bit of the file; the others forge JSON fields or tensors."""
    with fa.capture(tmp_path) as recorded:
        call()
    chance = random.Random(call.__name__)
    ends = {"replayed": 0, "refused": 0}
    for turn in range(150):
        file = chance.choice(recorded.files)
        there = file.read_bytes()
        header = int.from_bytes(there[:8], "little") + 8
        if turn % 2:
            place = chance.randrange(header if turn % 4 == 1 else len(there))
            there = there[:place] + bytes([there[place] ^ 1 << chance.randrange(8)]) + there[place + 1 :]
            (tmp_path / "forged").write_bytes(there)
        else:
            tensors, text = content_of(file)
            if chance.random() < 0.7:
                field = chance.choice(["attributes", "arrays", "strides", "outputs", "seed"])
                text[field] = json.dumps(forged(json.loads(text[field]), chance))
            else:
                name = chance.choice(list(tensors))
                tensors[name] = poisoned(tensors[name], chance)
            safetensors.torch.save_file(tensors, tmp_path / "forged", text)
        try:
            fa.replay(tmp_path / "forged")
            ends["replayed"] += 1
        except fa.CaptureError as error:
            assert str(tmp_path / "forged") in str(error)  # noqa: PT017
            ends["refused"] += 1
    assert min(ends.values()) > 20, ends


def test_replay_on_meta_device_raises(tmp_path: Path) -> None:
    q = torch.ones(1, 2, 1, 8)
    with fa.capture(tmp_path) as recorded:
        fa.attention(q, q, q)
    with pytest.raises(fa.BackendError, match="replay: device: expected one with memory"):
        fa.replay(recorded.files[0], device="meta")
