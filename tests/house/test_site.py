"""The built site, and how a browser shows it: nothing from the network, words that find their pages, formulas."""

import functools
import html
import html.parser
import http.server
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.sources import ROOT

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("material") is None, reason="mkdocs-material is not installed: make docs"
    ),
]
browser = pytest.mark.skipif(not CHROMIUM, reason="no Chromium: apt-get install chromium")
# A word that people search for -> a page, and a heading that answers.
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
    """Built strictly: a page that is missing, or a link that is dead, is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert run.returncode == 0, run.stderr
    return folder


class Loads(html.parser.HTMLParser):
    """What a page asks for while it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "img", "iframe", "source") and given.get("src"):
            self.found.append(str(given["src"]))
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.found.append(str(given["href"]))


def test_nothing_comes_from_the_network(site: Path) -> None:
    for path in site.rglob("*.html"):
        loads = Loads()
        loads.feed(path.read_text(encoding="utf-8"))
        assert not [target for target in loads.found if re.match(r"(https?:)?//", target)], path
    for path in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//", path.read_text(encoding="utf-8")), path
    assert (site / "assets" / "explorer.html").stat().st_size < 500_000


def test_the_words_that_people_search_for_are_indexed(site: Path) -> None:
    found = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    for word, (page, heading) in WORDS.items():
        sections = [entry for entry in found if entry["location"].startswith(page) and heading in entry["title"]]
        assert any(word.lower() in f"{entry['title']} {entry['text']}".lower() for entry in sections), word


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """The site, served on this machine."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/wait":  # a browser's own clock stands still until an answer comes: workers get time
                time.sleep(0.1)
                self.send_response(204)
                self.end_headers()
            else:
                super().do_GET()

        def log_message(self, format: str, *args: object) -> None: ...

    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def shown(address: str, profile: Path, seconds: int = 60) -> str:
    """The document as a browser has it when its scripts are done."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-extensions", "--hide-scrollbars"]
    command += [f"--user-data-dir={profile}", "--window-size=1400,1000", f"--virtual-time-budget={seconds * 1000}"]
    run = subprocess.run([*command, "--dump-dom", address], capture_output=True, text=True, check=False, timeout=240)
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout


def answer_of(text: str) -> Any:
    """What a page of ours has noted."""
    answer = re.search(r'<pre id="answer">(.*?)</pre>', text, re.DOTALL)
    assert answer, text[:500]
    return json.loads(html.unescape(answer[1]))


# Opens pages side by side in frames of a width, and notes what each asks for in breadth and what of it is drawn.
PROBE = """<!doctype html><body><pre id="answer">wait</pre><script>
const pages = PAGES, found = {}
async function look(page, width) {
  const frame = document.createElement("iframe")
  frame.style.cssText = `width:${width}px;height:800px;border:0`
  document.body.append(frame)
  await new Promise((done) => { frame.onload = done; frame.src = page })
  await new Promise((done) => setTimeout(done, 300))
  const inside = frame.contentDocument
  found[`${page} ${width}`] = [inside.documentElement.scrollWidth, inside.querySelectorAll(".arithmatex").length,
    inside.querySelectorAll(".arithmatex .katex").length, inside.querySelectorAll(".katex-error").length]
  frame.remove()
}
(async () => {
  for (const [page, width] of pages) await look(page, width)
  document.getElementById("answer").textContent = JSON.stringify(found)
})()
</script></body>"""


@browser
def test_no_page_is_wider_than_its_window_and_every_formula_is_set(site: Path, address: str, tmp_path: Path) -> None:
    pages = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html") if "assets" not in path.parts)
    chosen = [page for page in pages if not page.startswith("ops/aclnn") and page != "404.html"]
    asked = [(page, width) for page in chosen for width in (WIDTHS if page.count("/") == 0 else WIDTHS[:1])]
    (site / "probe.html").write_text(PROBE.replace("PAGES", json.dumps(asked)))
    found = answer_of(shown(f"{address}/probe.html", tmp_path))
    assert len(found) == len(asked)
    assert not {name: got for name, got in found.items() if got[0] > int(name.split()[1])}, "wider than the window"
    assert not {name: got for name, got in found.items() if got[1] != got[2] or got[3]}, "formulas that are not set"
    assert sum(got[1] for got in found.values()) > 40


# Asks the site's own search for each word, and notes where its first results lead.
SEARCH = """<!doctype html><body><pre id="answer">wait</pre><script>
const words = WORDS, found = {}
async function look(word) {
  const frame = document.createElement("iframe")
  document.body.append(frame)
  frame.src = `index.html?q=${encodeURIComponent(word)}`
  for (let turn = 0; turn < 100 && !found[word]?.length; turn++) {
    await fetch("/wait")
    const links = frame.contentDocument?.querySelectorAll("a.md-search-result__link") ?? []
    found[word] = [...links].slice(0, 3).map((link) => link.getAttribute("href"))
  }
  frame.remove()
}
(async () => {
  for (const word of words) await look(word)
  document.getElementById("answer").textContent = JSON.stringify(found)
})()
</script></body>"""


@browser
def test_a_word_finds_its_page_first(site: Path, address: str, tmp_path: Path) -> None:
    (site / "search.html").write_text(SEARCH.replace("WORDS", json.dumps(list(WORDS))))
    found = answer_of(shown(f"{address}/search.html", tmp_path))
    wrong = {word: found[word] for word, (page, _) in WORDS.items() if f"/{page}" not in "".join(found[word][:1])}
    assert not wrong
