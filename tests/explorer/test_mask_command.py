"""`fusion-attention mask`: pictures, numbers, files, and errors of invalid options."""

import io
import json
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image
from support.commands import run

from fusion_attention import Band
from fusion_attention.explorer import gallery
from fusion_attention.explorer.draw import LIGHT, OUTSIDE, VISIBLE, cells_of, is_seen, png, svg, text
from fusion_attention.explorer.page import fragment, page, server
from fusion_attention.explorer.visible import BAND, Setting
from fusion_attention.explorer.words import RULES

SVG = "{http://www.w3.org/2000/svg}"


def invoke(*arguments: Any) -> tuple[int, str]:
    """(exit code, text without box characters and line breaks) of `fusion-attention mask`."""
    outcome = run("mask", *arguments)
    return outcome.code, " ".join(outcome.line.translate(str.maketrans("│╭╮╰╯─", "      ")).split())


def report(*arguments: Any) -> dict[str, Any]:
    outcome = run("mask", *arguments, "--json")
    assert outcome.code == 0, outcome
    result: dict[str, Any] = json.loads(outcome.out)
    return result


def test_json_rows_equal_the_visible_keys_of_the_band() -> None:
    result = report("window(2, 1)", "--q", 5, "--kv", 8)
    visible = Band.window(2, 1).visible(5, 8)
    rows = result["items"][0]["rows"]
    assert [[first <= j < end for j in range(8)] for first, end in rows] == visible.tolist()
    assert result["seen"] == int(visible.sum())
    assert result["title"] == "Band.window(2, 1)"
    assert "sparse_mode=4, pre_tockens=2" in result["interfaces"]["training"]["call"]


@pytest.mark.parametrize(
    ("words", "band"),
    [
        ("causal", Band.causal()),
        ("Band.causal('start')", Band.causal("start")),
        ("fa.Band.window(3, 0)", Band.window(3, 0)),
        ("Band(lo=-2, hi=4)", Band(-2, 4)),
        ("prefix_causal([3])", Band.prefix_causal([3])),
        ("full", Band.full()),
    ],
)
def test_bands_are_parsed_from_text(words: str, band: Band) -> None:
    result = report(words, "--q", 6, "--kv", 9)
    assert result["title"] == repr(band)
    assert [first <= j < end for first, end in result["items"][0]["rows"] for j in range(9)] == (
        band.visible(6, 9).flatten().tolist()
    )


def test_json_of_a_packed_mode_lists_the_formula_of_each_sequence() -> None:
    result = report(7, "--q", "3,5", "--kv", "6,5", "--next", -1)
    assert [item["formula"] for item in result["items"]] == ["0 ≤ j ≤ min(5, i + 3)", "0 ≤ j ≤ min(4, i - 1)"]
    verdicts = {name: interface["verdict"] for name, interface in result["interfaces"].items()}
    assert verdicts == {"own": "ok", "training": "chip", "inference": "refused", "two_phase": "chip"}
    assert "actual_seq_qlen=[3, 8]" in result["interfaces"]["training"]["call"]


def test_infinite_band_edges_are_null_in_json() -> None:
    item = report(3, "--q", 2, "--kv", 4)["items"][0]
    assert (item["lo"], item["hi"], item["prefix"]) == (None, 3, 0)


def test_mask_command_prints_picture_rule_call_and_error() -> None:
    code, shown = invoke(6, "--q", 4, "--kv", 6, "--prefix", 1)
    assert code == 0
    assert " ".join(RULES["6"].split()) in shown
    assert "561002 prefix: expected per sequence a prefix between" in shown
    assert "fa.Band.prefix_causal([1])" in shown
    code, shown = invoke(3, "--q", 5, "--kv", 3, "--mask", "none", "--interface", "training")
    assert "runs, and warns" in shown
    assert "a training operator without atten_mask ignores sparse_mode" in shown
    assert "import torch_npu" in shown


def test_mask_without_a_mode_shows_all_modes() -> None:
    code, shown = invoke()
    assert code == 0
    assert all(" ".join(rule.split())[:30] in shown for rule in RULES.values())


def test_mask_files_npy_and_txt_are_read(tmp_path: Path) -> None:
    mask = np.array([[0, 1, 0], [1, 1, 1]], bool)
    np.save(tmp_path / "mask.npy", mask)
    (tmp_path / "mask.txt").write_text("0,1,0\n1 1 1\n")
    for name in ("mask.npy", "mask.txt"):
        result = report(1, "--q", 2, "--kv", 3, "--mask", tmp_path / name)
        assert result["seen"] == 2
        assert "mask[[0, 1, 1, 1], [1, 0, 1, 2]] = True" in result["interfaces"]["training"]["before"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["12"], "expected a mode (0 to 9) or a Band"),
        (["-3"], "No such option"),
        (["window(1"], "expected a mode (0 to 9) or a Band"),
        (["window(__import__('os').getpid(), 0)"], "expected a mode (0 to 9) or a Band"),
        (["Band.resolve(1, 2)"], "expected a mode (0 to 9) or a Band"),
        (["(" * 9000], "expected a mode (0 to 9) or a Band"),
        (["Band(lo=1.5)"], "expected a mode (0 to 9) or a Band"),
        (["Band(align='middle')"], 'expected "start" or "end"'),
        (["Band(lo=-1, prefix=(2,))"], "expected no left edge beside a prefix"),
        (["prefix_causal([1, 2])", "--q", "4"], "expected 1 numbers as in --q, got 2"),
        (["window(1, 0)", "--pre", "2"], "a Band has its own edges"),
        (["3", "--q", "4,x"], "expected integers separated by commas"),
        (["3", "--q", "-4"], "expected 1 to 64 numbers from 0 to"),
        (["3", "--q", "99999999999"], "expected 1 to 64 numbers from 0 to"),
        (["3", "--q", "4", "--kv", "4,5"], "expected 1 numbers as in --q, got 2"),
        (["3", "--q", "0", "--kv", "0"], "expected at least one row and one key"),
        (["4", "--pre", "9" * 20], "9223372036854775807"),
        (["3", "--q", "9999", "--kv", "9999"], "expected at most 16777216 cells"),
        (["3", "--prefix", "2"], "mode 3 has no prefix"),
        (["6", "--q", "4"], "mode 6 needs a prefix"),
        (["3", "--mask", "/nowhere.npy"], "only modes 0, 1, 5 and 9 read a mask"),
        (["1", "--mask", "/nowhere.npy"], "cannot read /nowhere.npy"),
        (["1", "--mask", "/nowhere.txt"], "cannot read /nowhere.txt"),
        (["3", "--interface", "sideways"], "expected one of own, training, inference, two_phase"),
        (["Band(hi=3, prefix=(2,))", "--interface", "training"], "has no call with this mask"),
        (["--svg", "x.svg"], "a picture needs a mode"),
    ],
)
def test_invalid_arguments_print_one_error_sentence(arguments: list[str], message: str) -> None:
    code, shown = invoke(*arguments)
    assert code == 2
    assert message in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize("content", [b"", b"0 2\n", b"01\n0\n", b"\xff\xfe", b"\x93NUMPY\x01", b"0 1 x"])
@pytest.mark.parametrize("name", ["mask.txt", "mask.npy"])
def test_refuses_files_that_are_not_a_mask(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    code, shown = invoke(1, "--mask", tmp_path / name)
    assert code == 2
    assert "expected a matrix [rows, keys] of 0 and 1" in shown


def test_pickled_npy_files_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "mask.npy", np.array([[{"a": 1}]], object), allow_pickle=True)
    code, shown = invoke(1, "--mask", tmp_path / "mask.npy")
    assert (code, "expected a matrix" in shown) == (2, True)


# ------------------------------------------------------------------------------------------------------------ pictures

SETTING = Setting(5, (5,), (7,), prefix=(3,), mask="own", own=((0, 1), (1, 0)))


def pixels(data: bytes) -> np.ndarray:
    """Pixels [height, width, 4] of a PNG."""
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGBA"))


def test_png_and_svg_files_show_the_mask(tmp_path: Path) -> None:
    arguments = (3, "--q", 4, "--kv", 6, "--svg", tmp_path / "a" / "m.svg", "--png", tmp_path / "m.png")
    assert invoke(*arguments)[0] == 0
    visible = Band.causal().visible(4, 6)
    drawn = pixels((tmp_path / "m.png").read_bytes())
    scale = drawn.shape[0] // 4
    colours = drawn[scale // 2 :: scale, scale // 2 :: scale]
    blue = [int(LIGHT[VISIBLE][i : i + 2], 16) for i in (1, 3, 5)]
    assert np.array_equal((colours[..., :3] == blue).all(-1), visible.numpy())
    tree = ElementTree.parse(tmp_path / "a" / "m.svg")
    counts = {path.get("class"): str(path.get("d")).count("M") for path in tree.iter(f"{SVG}path")}
    assert counts == {"fa-k1": 24 - int(visible.sum()), "fa-k3": int(visible.sum())}
    assert tree.findtext(f"{SVG}title") == "sparse_mode 3: causal, lower right"


def test_large_svg_merges_cells_into_runs() -> None:
    cells = cells_of(Setting(3, (900,), (900,)))
    assert cells is not None
    assert svg(cells, "large").count("M") < 2000
    assert pixels(png(cells)).shape == (900, 900, 4)


@pytest.mark.parametrize("width", [1, 7, 20, 200])
def test_text_picture_fits_the_width(width: int) -> None:
    for s in (SETTING, Setting(3, (300,), (77,)), Setting(3, (3,), (900,))):
        cells = cells_of(s)
        assert cells is not None
        for ascii_only in (False, True):
            lines = text(cells, width, ascii_only)
            assert max(map(len, lines)) <= width
            assert len(lines) <= 64
            assert not ascii_only or "".join(lines).isascii()


def test_visible_key_is_never_blank_in_text_picture() -> None:
    cells = np.full((400, 400), 1, np.uint8)
    cells[17, 233] = VISIBLE
    assert sum(line.strip(" ") != "" for line in text(cells, 50)) == 1


def test_the_gallery_has_every_mode() -> None:
    result = gallery()
    assert list(result) == [f"mode_{mode}.svg" for mode in range(10)]
    assert all(ElementTree.fromstring(picture).get("role") == "img" for picture in result.values())
    assert len(set(result.values())) == 10


def test_cells_between_packed_sequences_are_outside() -> None:
    cells = cells_of(Setting(3, (2, 3), (4, 1), packed=True))
    assert cells is not None
    assert (cells[:2, 4:] == OUTSIDE).all()
    assert (cells[2:, :4] == OUTSIDE).all()
    assert is_seen(cells).sum() == 3 + 4 + 1


# ------------------------------------------------------------------------------------------------------- explorer page


def test_explorer_page_is_written_and_served(tmp_path: Path) -> None:
    assert invoke("--explorer", tmp_path / "new" / "explorer.html")[0] == 0
    assert (tmp_path / "new" / "explorer.html").read_text(encoding="utf-8") == page()
    running = server()
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    try:
        root = f"http://127.0.0.1:{running.server_address[1]}"
        assert urllib.request.urlopen(f"{root}/?x#y", timeout=10).read().decode() == page()
        for path in ("/etc/passwd", "/../pyproject.toml", "/page.py"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(root + path, timeout=10)
    finally:
        running.shutdown()
        running.server_close()
        thread.join()


def test_serve_prints_url_and_stops_on_interrupt() -> None:
    command = [sys.executable, "-m", "fusion_attention", "mask", "4", "--q", "5", "--pre", "2", "--serve"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as running:
        try:
            assert running.stdout
            first_line = running.stdout.readline().strip()
            assert first_line.endswith("/#mode=4&q=5&kv=5&pre=2")
            assert urllib.request.urlopen(first_line, timeout=120).read().decode() == page()
            running.send_signal(signal.SIGINT)
            assert running.wait(120) == 0
            assert running.stderr
            assert running.stderr.read() == ""
        finally:
            running.kill()


def test_unwritable_output_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, shown = invoke("--explorer", tmp_path / "file" / "explorer.html")
    assert code == 2
    assert "cannot write" in shown


def test_url_fragment_encodes_the_setting() -> None:
    assert fragment(SETTING) == "#mode=5&q=5&kv=7&prefix=3&mask=own&own=01/10"
    band = Setting(BAND, (4, 2), (6, 2), packed=True, pre=3, next=0, align="start")
    assert fragment(band) == "#mode=band&q=4,2&kv=6,2&packed=1&pre=3&next=0&align=start"
