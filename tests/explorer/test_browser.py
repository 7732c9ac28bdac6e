"""The explorer in a real browser: cells and drawing, mouse and keyboard, widths and themes, and speed."""

import json
import random
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support.browser import CHROMIUM, MISSING, Browser
from support.explorer_settings import random_setting

from fusion_attention import Band
from fusion_attention.explorer.draw import cells_of
from fusion_attention.explorer.page import fragment, page
from fusion_attention.explorer.violations import remarks_on, verdict
from fusion_attention.explorer.visible import BAND, Setting
from fusion_attention.explorer.words import NAMES
from fusion_attention.ir.mask import UNLIMITED

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=MISSING)]
SHOWN = 220
WIDTHS = (390, 900, 1440)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("explorer") / "explorer.html"
    path.write_text(page(), encoding="utf-8")
    return path.as_uri()


@pytest.fixture(scope="module")
def running() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture
def browser(running: Browser) -> Iterator[Browser]:
    running.errors.clear()
    yield running
    assert running.errors == []


def go(browser: Browser, setting: str) -> None:
    """Shows a setting in the page that is open."""
    browser.run(f"location.hash = {json.dumps(setting)}; 1")
    browser.frame()
    browser.frame()


def cells(browser: Browser) -> str:
    result: str = browser.run("Array.from(matrix.cells).join('')")
    return result


def shown_setting(rng: random.Random) -> Setting:
    """Random setting that the page's controls can show."""
    s = random_setting(rng)
    q_len, kv_len = (tuple(max(n, 1) for n in lengths) for lengths in (s.q_len, s.kv_len))
    pre, next_ = (UNLIMITED if abs(n) > 500 else n for n in (s.pre, s.next))
    s = replace(s, q_len=q_len, kv_len=kv_len, pre=pre, next=next_)
    if s.mode == BAND:
        s = replace(s, mask="zeros", own=None, pre=UNLIMITED if s.prefix else pre, next=0 if s.prefix else next_)
    elif s.mode not in (0, 1, 5, 9) and s.mask != "none":
        s = replace(s, mask="zeros", own=None)
    return replace(s, own=None) if s.mask != "own" else s


def test_browser_shows_cells_title_and_verdict_of_the_library(browser: Browser, address: str) -> None:
    browser.open(address)
    rng = random.Random(7)
    words = browser.run("VERDICTS")
    for _ in range(SHOWN):
        s, interface = shown_setting(rng), rng.choice(("own", "training", "inference", "two_phase"))
        go(browser, f"{fragment(s)}&interface={interface}")
        wanted = cells_of(s, interface)
        state = "none" if wanted is None else verdict(remarks_on(s, interface))
        assert browser.run("$('verdict').textContent") == words[state], (s, interface)
        assert browser.run("$('refused').hidden") is (state not in ("refused", "none"))
        if wanted is not None:
            assert cells(browser) == "".join(map(str, wanted.ravel().tolist())), (s, interface)
        if s.mode != BAND:
            assert browser.run("$('title').textContent") == f"sparse_mode {s.mode}: {NAMES[str(s.mode)]}"


def test_canvas_pixels_show_the_band(browser: Browser, address: str) -> None:
    """The test reads canvas pixels, because the page's list of cells could be right and the drawing wrong."""
    browser.open(f"{address}#mode=band&q=7&kv=12&pre=3&next=1&interface=own")
    colours = browser.run(
        "(() => { const read = (j, i) => matrix.context.getImageData((LEFT + (j + 0.4) * matrix.cell) * matrix.ratio, "
        "(TOP + (i + 0.4) * matrix.cell) * matrix.ratio, 1, 1).data.slice(0, 3).join(); "
        "return Array.from({length: 84}, (_, at) => read(at % 12, Math.floor(at / 12))); })()"
    )
    visible = Band.window(3, 1).visible(7, 12).flatten().tolist()
    assert [colour == "79,70,229" for colour in colours] == visible
    assert {colour for colour, is_seen in zip(colours, visible, strict=True) if not is_seen} == {"233,235,242"}


def test_mouse_and_arrow_keys_select_modes(browser: Browser, address: str) -> None:
    browser.open(f"{address}#mode=3&q=6&kv=8")
    browser.click('.mode[data-mode="4"]')
    browser.frame()
    assert browser.run("$('title').textContent") == "sparse_mode 4: band, lower right"
    browser.key("ArrowRight")
    browser.frame()
    assert browser.run("[$('title').textContent, document.activeElement.dataset.mode]") == [
        "sparse_mode 5: prefix, full mask",
        "5",
    ]


def test_sliders_change_mask_and_code(browser: Browser, address: str) -> None:
    browser.open(f"{address}#mode=4&q=6&kv=8&pre=2&next=0")
    browser.run("$('pre').focus(); 1")
    for _ in range(3):
        browser.key("ArrowRight")
    browser.run("$('Skv0').focus(); 1")
    browser.key("ArrowLeft")
    browser.frame()
    assert cells(browser) == "".join(
        str(3 if is_visible else 1) for is_visible in Band.window(5, 0).visible(6, 7).flatten().tolist()
    )
    assert "pre_tockens=5" in browser.run("$('code').textContent")
    browser.click("#free-pre")
    browser.frame()
    assert "pre_tockens" not in browser.run("$('code').textContent")


def test_sequences_are_added_to_and_removed_from_a_packed_batch(browser: Browser, address: str) -> None:
    browser.open(f"{address}#mode=3&q=4&kv=4")
    browser.click("#packed")
    browser.click("#more")
    browser.frame()
    assert browser.run("[x.q_len.length, $('formulas').children.length, matrix.rows]") == [3, 3, 8]
    for _ in range(9):
        browser.run("$('more').hidden || $('more').click(); 1")
    browser.frame()
    assert browser.run("x.q_len.length") == 8
    browser.click(".drop")
    browser.frame()
    assert browser.run("x.q_len.length") == 7
    go(browser, "#mode=3&q=512,512,512,512&kv=512,512,512,512&packed=1")
    assert browser.run("[matrix.rows, matrix.keys]") == [1024, 1024]


def test_mouse_and_keyboard_edit_mask_cells(browser: Browser, address: str) -> None:
    browser.open(f"{address}#mode=0&q=4&kv=4&mask=zeros")
    x, y = browser.run(
        "(() => { $('matrix').scrollIntoView({block: 'center'}); const b = $('matrix').getBoundingClientRect(); "
        "return [b.x + LEFT + 2.5 * matrix.cell, b.y + TOP + 1.5 * matrix.cell]; })()"
    )
    browser.mouse("Pressed", x, y)
    browser.mouse("Released", x, y)
    browser.frame()
    assert cells(browser) == "3333332333333333"
    assert "mask[[1], [2]] = True" in browser.run("$('code').textContent")
    browser.run("$('matrix').focus(); 1")
    browser.key("ArrowRight")
    browser.key(" ")
    browser.frame()
    assert cells(browser) == "3333332233333333"
    assert re.search(r"row 1 has keys 0 to 3 in its band; key 3: removed", browser.run("$('live').textContent"))


def test_page_names_interfaces_with_different_visible_keys(browser: Browser, address: str) -> None:
    """One query row outside TND: inference ignores mode and window, training does not."""
    browser.open(f"{address}#mode=4&q=1&kv=8&pre=2&next=0")
    assert browser.run("$('elsewhere').textContent") == "Other keys are seen at: Inference."
    assert cells(browser) == "11111333"
    browser.click("#tab-inference")
    browser.frame()
    assert cells(browser) == "33333333"
    assert "one-token queries see every key except in layout TND" in browser.run("$('remarks').textContent")


def test_a_refused_call_shows_no_numbers(browser: Browser, address: str) -> None:
    browser.open(f"{address}#mode=7&q=6&kv=8&next=0")
    shown = browser.run("[$('counts').textContent, $('formulas').hidden, $('refused').textContent]")
    assert shown == ["Nothing is computed.", True, "torch_npu.npu_fusion_attention refuses this call"]


def test_table_lists_first_and_last_key_of_each_row(browser: Browser, address: str) -> None:
    browser.open(f"{address}#mode=3&q=3&kv=2")
    browser.click("#rows summary")
    browser.frame()
    lines = browser.run("Array.from($('table').querySelectorAll('tr'), (row) => row.innerText.split('\\t').join())")
    assert lines == ["row,first key,last key", "0,none,none", "1,0,0", "2,0,1"]
    assert "1 row sees no key" in browser.run("$('counts').textContent")


@pytest.mark.parametrize(
    "setting",
    ["#mode=x&q=1", "#mode=3&q=0,-4,1e9&kv=&pre=NaN", "#mode=6&prefix=9999,x", "#mode=1&own=01/x", "#%%%",
     "#mode=9&q=9&kv=3"],
)  # fmt: skip
def test_invalid_url_settings_still_show_a_mask(browser: Browser, address: str, setting: str) -> None:
    browser.open(address + setting)
    assert browser.run("matrix.rows > 0 && $('title').textContent !== ''")


def test_every_control_has_an_accessible_name(browser: Browser, address: str) -> None:
    for setting in ("#mode=7&q=4,6&kv=6,8&packed=1&next=-1", "#mode=band&q=4&kv=5&prefix=2", "#mode=0&q=4&kv=5&pre=1"):
        browser.open(address + setting)
        browser.call("Accessibility.enable")
        nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
        roles = {"button", "slider", "spinbutton", "checkbox", "radio", "tab", "tabpanel", "image", "tablist"}
        named = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in nodes if not n["ignored"]]
        assert [role for role, name in named if role in roles | {"radiogroup"} and not name] == []
        assert sum(role == "radio" for role, _ in named) >= 14
        sliders = [name for role, name in named if role == "slider"]
        assert len(set(sliders)) == len(sliders) > 1


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_page_fits_the_window_width_in_light_and_dark_theme(
    browser: Browser, address: str, width: int, dark: bool
) -> None:
    for setting in ("#mode=7&q=4,6,5&kv=6,8,5&packed=1&next=2", "#mode=9&q=5&kv=9", "#mode=4&q=512&kv=512&pre=64"):
        browser.open(address + setting, width=width, height=900, dark=dark)
        assert browser.run("document.documentElement.scrollWidth") == width
        body = browser.run("getComputedStyle(document.body).backgroundColor")
        assert body == ("rgb(14, 16, 22)" if dark else "rgb(246, 246, 250)")
        small = browser.run(
            "Array.from(document.querySelectorAll('button:not([hidden]), input'), (e) => e.getBoundingClientRect())"
            ".filter((box) => box.width && Math.min(box.width, box.height) < 16).length"
        )
        assert small == 0
    browser.click("#theme")
    browser.frame()
    assert browser.run("document.documentElement.dataset.theme") == ("light" if dark else "dark")


def test_embedded_explorer_follows_the_host_page_theme(browser: Browser, tmp_path: Path) -> None:
    """The documentation embeds the explorer at full height, in the host's theme and without a header."""
    (tmp_path / "explorer.html").write_text(page(), encoding="utf-8")
    (tmp_path / "host.html").write_text('<body data-md-color-scheme="slate"><iframe src="explorer.html" width="900">')
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser.open(f"http://127.0.0.1:{server.server_address[1]}/host.html")
        inside = "document.querySelector('iframe').contentDocument"
        assert browser.run(f"{inside}.documentElement.dataset.theme") == "dark"
        browser.run("document.body.dataset.mdColorScheme = 'default'; 1")
        browser.frame()
        assert browser.run(f"{inside}.documentElement.dataset.theme") == "light"
        assert browser.run(f"{inside}.querySelector('.bar').offsetHeight") == 0
        assert browser.run(f"document.querySelector('iframe').offsetHeight >= {inside}.body.offsetHeight")
        server.shutdown()


def test_first_picture_is_drawn_within_a_second(browser: Browser, address: str) -> None:
    times = []
    for _ in range(3):
        browser.open(address)
        browser.run("new Promise((done) => setTimeout(done, 100))")
        times.append(browser.run("performance.getEntriesByName('first picture')[0].startTime"))
    assert min(times) < 1000


DRAGGED = ("#mode=4&q=512&kv=512&pre=64&next=0", "#mode=0&q=512&kv=512&pre=64&next=0&mask=triangle")
# Script that moves the slider at every frame, because a driver's mouse waits for each response.
DRAG = """
new Promise((done) => {
  let drawn = 0, moves = 0, first = 0;
  const before = Matrix.prototype.draw, slider = $("pre");
  Matrix.prototype.draw = function () { drawn++; before.call(this); };
  requestAnimationFrame(function move(time) {
    first ||= time;
    slider.value = 24 + (moves++ % 80);
    slider.dispatchEvent(new Event("input"));
    if (time - first < 1500) return requestAnimationFrame(move);
    Matrix.prototype.draw = before;
    done((1000 * drawn) / (time - first));
  });
})
"""


@pytest.mark.parametrize("setting", DRAGGED)
def test_dragging_a_slider_redraws_512x512_cells_at_30_fps(browser: Browser, address: str, setting: str) -> None:
    browser.open(address + setting)
    browser.frame()
    assert max(browser.run(DRAG) for _ in range(3)) >= 30


def test_dragging_a_slider_with_the_mouse_changes_the_mask(browser: Browser, address: str) -> None:
    browser.open(address + DRAGGED[0])
    x, y = browser.middle("#pre")
    browser.mouse("Pressed", x, y)
    for step in range(20):
        browser.mouse("Moved", x + step, y)
    browser.mouse("Released", x, y)
    browser.frame()
    pre = browser.run("x.pre")
    assert pre > 64
    assert cells(browser).count("3") == int(Band.window(pre, 0).visible(512, 512).sum())
