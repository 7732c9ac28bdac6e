"""The explorer as one HTML file without dependencies, and a local server of this page.

Functions of `visible`, `violations`, `words` and `calls` compute the visible keys, refusals and calls in the page.
python_to_javascript.py translates them to JavaScript when the page is made.
"""

import functools
import json
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from fusion_attention.explorer import calls, violations, visible, words
from fusion_attention.explorer.draw import example
from fusion_attention.explorer.python_to_javascript import Program
from fusion_attention.ir.mask import UNLIMITED
from fusion_attention.ops import RECORDS

_HERE = Path(__file__).parent
# Python functions that page.js and matrix.js call.
ENTRIES = (
    *(visible.Setting, visible.picture, visible.mask_row, visible.edges_of, visible.as_mode, visible.own_band),
    *(violations.remarks, violations.names_of, violations.verdict, calls.call, words.formula, words.reads),
)
TABLES = ("NAMES", "RULES", "USES")


@functools.cache
def rules() -> str:
    """Returns the page's JavaScript: runtime.js, translated functions, and the operators' argument rules."""
    program = Program({violations.respell: "py.respell"})
    for entry in ENTRIES:
        program.name(entry)
    for name in TABLES:
        program.name(getattr(words, name), name)
    tables = {api: [_table(program, api, packed) for packed in (False, True)] for api in violations.OPERATORS}
    tables_text = ",\n".join(f"  {api}: [\n{two[0]},\n{two[1]}\n  ]" for api, two in tables.items())
    examples = json.dumps({str(mode): asdict(example(mode)) for mode in visible.MODES})
    return "\n".join(
        [
            _read("runtime.js"),
            program.text,
            f"const ASKED = {{\n{tables_text}\n}};",
            f"const EXAMPLES = {examples};",
            _read("facade.js"),
        ]
    )


def _table(program: Program, api: str, packed: bool) -> str:
    """Returns a JavaScript object with the argument rules of an interface's (api) operator, whose expressions become
    functions. program: the translated functions; packed: True for packed sequences."""
    operator = violations.OPERATORS[api][packed]
    record = RECORDS[operator]

    def compiled(text: str, record: Any) -> str:
        return program.expression(text, record.functions)

    lines = []
    for rule in violations.table(api, packed, compiled):
        fields = {name: value for name, value in rule.items() if name not in ("when", "check")}
        lines.append(f"{{ ...{json.dumps(fields)}, when: {rule['when'] or 'null'}, check: {rule['check']} }}")
    spelled = json.dumps(violations.spelled(record))
    return f'{{ operator: "{operator}", spelled: {spelled}, rules: [\n' + ",\n".join(lines) + "\n] }"


@functools.cache
def page() -> str:
    """Returns the mask explorer's HTML page, without references to other files or the network."""
    parts = {"style": _read("page.css"), "rules": rules(), "script": _read("matrix.js") + _read("page.js")}
    text = _read("page.html")
    for name, text_of_part in parts.items():
        assert "</script" not in text_of_part
        text = text.replace(f"/* {name} */", text_of_part)
    return text


def _read(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


class _Page(BaseHTTPRequestHandler):
    """The HTTP request handler of the explorer's server, which serves one page."""

    def do_GET(self) -> None:
        """Answers a request: the page for /, otherwise 404. It never reads a file of this machine."""
        is_served = self.path.split("?")[0] in ("/", "/index.html")
        data = page().encode() if is_served else b"not here\n"
        self.send_response(200 if is_served else 404)
        self.send_header("Content-Type", "text/html; charset=utf-8" if is_served else "text/plain")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing, so that the terminal shows only the page's address."""


def server(port: int = 0) -> ThreadingHTTPServer:
    """Returns an HTTP server of the explorer's page for clients on this machine only; port 0: any free one."""
    return ThreadingHTTPServer(("127.0.0.1", port), _Page)


def address(running: ThreadingHTTPServer, s: visible.Setting | None = None) -> str:
    """Returns the URL of the page, on the server `running`, that shows the mask of `s`; None: a default mask."""
    return f"http://127.0.0.1:{running.server_address[1]}/{fragment(s) if s else ''}"


def fragment(s: visible.Setting) -> str:
    """Returns call arguments as the fragment of the page's URL: "#mode=4&q=5&kv=8&pre=2&next=1"."""
    given: dict[str, Any] = {"mode": "band" if s.mode == visible.BAND else s.mode}
    given |= {"q": _commas(s.q_len), "kv": _commas(s.kv_len)}
    if s.packed:
        given["packed"] = 1
    given |= {name: n for name, n in (("pre", s.pre), ("next", s.next)) if n < UNLIMITED}
    if s.prefix:
        given["prefix"] = _commas(s.prefix)
    if s.align != "end":
        given["align"] = s.align
    if s.mask != "zeros":
        given["mask"] = s.mask
    if s.own is not None:
        given["own"] = "/".join("".join(str(int(cell)) for cell in row) for row in s.own)
    return "#" + urlencode(given, safe=",/")


def _commas(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))
