"""The built site in a browser: no network requests, search words that find pages, rendered formulas."""

import functools
import html.parser
import http.server
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest
from support.browser import CHROMIUM, MISSING, Browser
from support.sources import ROOT

from website.svg import PALETTE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("material") is None, reason="mkdocs-material is not installed: make docs"
    ),
]
needs_browser = pytest.mark.skipif(not CHROMIUM, reason=MISSING)
# Search word -> (page, heading) that explains it.
WORDS = {
    "GQA": ("words.html", "GQA"), "varlen": ("words.html", "varlen"), "cu_seqlens": ("words.html", "cu_seqlens"),
    "softmax_scale": ("words.html", "softmax_scale"), "attn_mask": ("words.html", "attn_mask"),
    "sliding window": ("words.html", "Sliding window"), "flash_attention_2": ("words.html", "flash_attention_2"),
    "score_mod": ("words.html", "score_mod"), "npu_fusion_attention": ("ops/npu_fusion_attention.html", ""),
    "PagedKVCache": ("reference/cache.html", "PagedKVCache"), "sparse_mode": ("sparse_modes.html", "Sparse modes"),
}  # fmt: skip
WIDTHS = (390, 820, 1280)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the site; --strict makes missing pages and dead links errors."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert run.returncode == 0, run.stderr
    return folder


class Loads(html.parser.HTMLParser):
    """Collects the addresses that a page loads: scripts, images, style sheets."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "img", "iframe", "source") and given.get("src"):
            self.targets.append(str(given["src"]))
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.targets.append(str(given["href"]))


def test_site_loads_no_resources_from_the_network(site: Path) -> None:
    for path in site.rglob("*.html"):
        loads = Loads()
        loads.feed(path.read_text(encoding="utf-8"))
        assert not [target for target in loads.targets if re.match(r"(https?:)?//", target)], path
    for path in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//", path.read_text(encoding="utf-8")), path
    assert (site / "assets" / "explorer.html").stat().st_size < 500_000


def test_common_search_words_are_in_the_search_index(site: Path) -> None:
    result = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    for word, (page, heading) in WORDS.items():
        sections = [entry for entry in result if entry["location"].startswith(page) and heading in entry["title"]]
        assert any(word.lower() in f"{entry['title']} {entry['text']}".lower() for entry in sections), word


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Address of a local server of the site."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None: ...

    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as result:
        yield result


# Counts of formulas, of rendered formulas, and of formulas with a KaTeX error.
FORMULAS = "[...['.arithmatex', '.arithmatex .katex', '.katex-error']].map(x => document.querySelectorAll(x).length)"


@needs_browser
@pytest.mark.parametrize("width", WIDTHS)
def test_pages_fit_the_window_and_all_formulas_are_rendered(
    width: int, site: Path, address: str, browser: Browser
) -> None:
    pages = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html") if "assets" not in path.parts)
    # A phone's width is tested with all pages except the similar ops/aclnn pages, larger widths with some.
    chosen = [page for page in pages if not page.startswith("ops/aclnn")][:: 1 if width == WIDTHS[0] else 5]
    formulas = 0
    for page in chosen:
        browser.open(f"{address}/{page}", width, dark=width == WIDTHS[1])
        assert browser.run("document.documentElement.scrollWidth") <= width, page
        there, drawn, wrong = browser.run(FORMULAS)
        assert (drawn, wrong) == (there, 0), page
        formulas += there
    assert browser.errors == []
    assert formulas


@needs_browser
@pytest.mark.parametrize("word", WORDS)
def test_search_ranks_the_expected_page_first(word: str, address: str, browser: Browser) -> None:
    browser.open(f"{address}/index.html?{urlencode({'q': word})}")
    first = "document.querySelector('a.md-search-result__link')?.getAttribute('href')"
    result = browser.run(
        "new Promise((done) => { let turns = 0; const look = () => { "
        f"const found = {first}; found || ++turns > 100 ? done(found) : setTimeout(look, 50) }}; look() }})"
    )
    assert result, word
    assert f"/{WORDS[word][0]}" in result


@needs_browser
def test_svg_pictures_follow_the_page_theme(address: str, browser: Browser) -> None:
    ink = "getComputedStyle(document.querySelector('.fa-pic text')).fill"
    for dark, place in ((False, 0), (True, 1)):
        browser.open(f"{address}/layouts.html", dark=dark)
        colour = PALETTE["soft"][place]
        assert browser.run(ink) == f"rgb({', '.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))})"
