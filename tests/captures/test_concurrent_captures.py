"""Concurrent captures, in threads and processes, ended in any order, lose no call and leave no wrapper."""

import contextlib
import gc
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support.installed_state import Recorded

import fusion_attention as fa
from fusion_attention.captures.capture import HOOKED
from fusion_attention.npu import training
from fusion_attention.torch_ops import attention_forward


@pytest.fixture(autouse=True)
def nothing_stays_wrapped() -> Iterator[None]:
    before = [getattr(owner, name) for owner, name in HOOKED]
    yield
    assert [getattr(owner, name) for owner, name in HOOKED] == before


def small() -> torch.Tensor:
    q = torch.ones(1, 2, 1, 8)
    return fa.attention(q, q, q)


def numbers(folder: Path) -> list[int]:
    return sorted(int(file.name.split("-")[0]) for file in folder.glob("*-*"))


def test_calls_on_meta_tensors_are_not_captured(tmp_path: Path) -> None:
    q = torch.empty(1, 2, 1, 8, device="meta")
    with fa.capture(tmp_path) as recorded:
        assert fa.attention(q, q, q).shape == q.shape
        assert training.npu_fusion_attention(q, q, q, 1, "BSND")[0].shape == q.shape
        small()
    assert len(recorded.files) == len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("there", "first"),
    [
        (["9999-x.safetensors"], 10000),
        (["0007-attention.safetensors", "10000-x.safetensors"], 10001),
        (["notes.txt", "12-x.safetensors", "0003.safetensors", "000a-x.safetensors", "0004-x.safetensors.bak"], 0),
        ([f"{'9' * 40}-x.safetensors", "٣٣٣٣-x.safetensors"], 0),
    ],
    ids=["four digits", "five digits", "other names", "no numbers"],
)
def test_file_numbers_continue_after_existing_files(there: list[str], first: int, tmp_path: Path) -> None:
    for name in there:
        (tmp_path / name).touch()
    with fa.capture(tmp_path) as recorded:
        small()
        small()
    assert [file.name for file in recorded.files] == [f"{n:04}-attention.safetensors" for n in (first, first + 1)]
    assert len(list(tmp_path.iterdir())) == len(there) + 2


def test_capture_never_overwrites_files_of_another_process(tmp_path: Path) -> None:
    """Another process has written, or is about to write, the files with the next numbers."""
    with fa.capture(tmp_path) as recorded:
        (tmp_path / "0000-attention.safetensors").write_text("theirs")
        (tmp_path / "0001-attention.part").write_text("theirs")
        small()
    assert [file.name[:4] for file in recorded.files] == ["0002"]
    assert (tmp_path / "0000-attention.safetensors").read_text() == "theirs"
    assert (tmp_path / "0001-attention.part").read_text() == "theirs"
    assert len(list(tmp_path.iterdir())) == 3


def test_forked_process_captures_into_separate_files(tmp_path: Path) -> None:
    with fa.capture(tmp_path) as recorded:
        small()
        child = os.fork()
        for _ in range(20):
            small()
        if not child:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    assert len(recorded.files) == 21
    assert numbers(tmp_path) == list(range(41))
    assert all(fa.replay(file).worst == 0.0 for file in tmp_path.iterdir())


def test_captured_calls_do_not_list_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = []
    for name in ("listdir", "scandir"):
        there = getattr(os, name)
        monkeypatch.setattr(os, name, lambda path, there=there: listed.append(path) or there(path))
    with fa.capture(tmp_path) as recorded:
        assert len(listed) == 1
        for _ in range(5):
            small()
    assert len(listed) == 1
    assert len(recorded.files) == 5


def test_failed_write_leaves_no_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with fa.capture(tmp_path) as recorded:
        with monkeypatch.context() as patch:
            patch.setattr(safetensors.torch, "save_file", full)
            with pytest.raises(OSError, match="No space"):
                small()
        assert not list(tmp_path.iterdir())
        small()
    assert len(recorded.files) == 1


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run work(0), work(1), ... at once in threads, and raise their exceptions."""
    start = threading.Barrier(count, timeout=60)

    def begin(i: int) -> None:
        torch.set_num_threads(1)
        start.wait()
        work(i)

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(begin, range(count)))


def test_calls_of_concurrent_threads_are_all_captured(tmp_path: Path) -> None:
    def work(_: int) -> None:
        for _ in range(25):
            small()

    with fa.capture(tmp_path) as recorded:
        in_threads(8, work)
    assert numbers(tmp_path) == list(range(200))
    assert sorted(recorded.files) == sorted(tmp_path.iterdir())


def test_captures_in_concurrent_threads_record_the_calls_of_their_thread(tmp_path: Path) -> None:
    """A capture may also record calls of other threads, so counts are lower bounds."""

    def work(i: int) -> None:
        for folder in (tmp_path / str(i), tmp_path / "all"):
            for _ in range(3):
                with fa.capture(folder) as recorded:
                    small()
                    small()
                assert len(recorded.files) >= 2
                assert all(file.exists() for file in recorded.files)

    in_threads(8, work)
    for i in range(8):
        assert len(numbers(tmp_path / str(i))) == len(set(numbers(tmp_path / str(i)))) >= 6
    assert len(numbers(tmp_path / "all")) == len(set(numbers(tmp_path / "all"))) >= 48


def test_recursive_decorated_function_in_threads_captures_each_call_once(tmp_path: Path) -> None:
    recorder = fa.capture(tmp_path)

    @recorder
    def work(depth: int) -> None:
        small()
        if depth:
            work(depth - 1)

    in_threads(8, lambda i: work(3))
    assert len(recorder.files) == 32
    small()
    assert numbers(tmp_path) == list(range(32))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_overlapping_captures_may_end_in_any_order(order: tuple[int, ...], tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b", tmp_path / "a"]
    recorders = [fa.capture(folder) for folder in folders]
    for recorder in recorders:
        recorder.__enter__()
    small()
    for ended in order:
        recorders[ended].__exit__(None, None, None)
        small()
    for place, ended in enumerate(order):
        assert len(recorders[ended].files) == 1 + place
    assert numbers(tmp_path / "a") == list(range(len(recorders[0].files) + len(recorders[2].files)))
    assert numbers(tmp_path / "b") == list(range(len(recorders[1].files)))


def test_nested_captures_in_one_folder_share_file_numbers(tmp_path: Path) -> None:
    q = torch.ones(1, 2, 1, 8)
    with fa.capture(tmp_path), fa.capture(tmp_path):
        small()
        training.npu_fusion_attention(q, q, q, 1, "BSND")
        with fa.capture(tmp_path / "elsewhere" / ".."):
            small()
            training.npu_fusion_attention(q, q, q, 1, "BSND")
    assert numbers(tmp_path) == list(range(10))


def test_captures_in_suspended_generators_record_until_closed(tmp_path: Path) -> None:
    def calls(folder: Path) -> Iterator[int]:
        with fa.capture(folder) as recorded:
            while True:
                small()
                yield len(recorded.files)

    one, other = calls(tmp_path / "one"), calls(tmp_path / "other")
    assert (next(one), next(other), next(one)) == (1, 1, 3)
    one.close()  # type: ignore[attr-defined]
    assert next(other) == 3
    del other
    gc.collect()
    small()
    assert len(numbers(tmp_path / "one")) == 3
    assert len(numbers(tmp_path / "other")) == 3


def test_capture_object_can_be_reentered_and_reused(tmp_path: Path) -> None:
    recorder = fa.capture(tmp_path)
    recorder.__exit__(None, None, None)
    with recorder:
        with recorder, contextlib.ExitStack() as stack:
            stack.enter_context(recorder)
            small()
        small()
    small()
    with recorder:
        small()
    assert [file.name[:4] for file in recorder.files] == ["0000", "0001", "0002"]


def test_capture_into_uncreatable_folder_raises_and_patches_no_function(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError), fa.capture(tmp_path / "file"):
        pass
    assert attention_forward.forward.__qualname__ == "forward"


def test_capture_below_another_wrapper_stops_recording_after_exit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrapper below another one cannot be removed; it must stop recording, also for later captures."""
    before, calls = attention_forward.forward, []
    with fa.capture(tmp_path) as recorded:
        below = attention_forward.forward
        monkeypatch.setattr(
            attention_forward, "forward", lambda *args, **how: calls.append(args) or below(*args, **how)
        )
        small()
    small()
    with fa.capture(tmp_path) as again:
        small()
    assert (len(calls), len(recorded.files), len(again.files)) == (3, 1, 1)
    monkeypatch.setattr(attention_forward, "forward", before)


def test_relative_capture_folder_survives_chdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with fa.capture("calls") as recorded:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        small()
    assert recorded.files == [tmp_path / "calls" / "0000-attention.safetensors"]
    assert recorded.files[0].exists()


def test_writing_captures_is_invisible_to_torch_modes(tmp_path: Path) -> None:
    with Recorded() as alone:
        small()
    with fa.capture(tmp_path), Recorded() as beside:
        small()
    assert beside.names == alone.names
