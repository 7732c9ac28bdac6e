"""`fusion-attention mask`: draws the keys that a sparse_mode or Band shows, as text, JSON, SVG, PNG or a web page."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from fusion_attention.explorer.visible import Setting

NO_EDGE = 2**31 - 1
EDGE: dict[str, Any] = {"min": -(2**63), "max": 2**63 - 1, "show_default": "no edge"}
LONGEST = 1 << 20
# Largest number of rows of a sequence that the JSON output lists individually.
NAMED_ROWS = 4096
INTERFACE_NAMES = {
    "own": "fusion_attention.attention",
    "training": "torch_npu.npu_fusion_attention",
    "inference": "torch_npu.npu_fused_infer_attention_score_v2",
    "two_phase": "aclnn, in two phases",
}
VERDICTS = {
    "ok": ("green", "legal"),
    "note": ("yellow", "runs, and warns"),
    "chip": ("dark_orange", "computed here; the chip refuses it"),
    "refused": ("red", "refused"),
    "none": ("dim", "no call of this interface has this mask"),
}


def mask(
    mode: str = typer.Argument("", help='A sparse_mode, 0 to 9, or a Band: "window(3, 0)", "causal", "Band(hi=2)".'),
    q: str = typer.Option("6", "--q", metavar="N[,N...]", help="Query rows; several numbers: a packed batch (TND)."),
    kv: str = typer.Option("", "--kv", metavar="N[,N...]", help="Keys; by default as many as query rows."),
    pre: int = typer.Option(NO_EDGE, **EDGE, help="pre_tokens of modes 0 and 4 (in modes 7 and 8 only checked)."),
    next_: int = typer.Option(NO_EDGE, "--next", **EDGE, help="next_tokens of modes 0, 4, 7, 8."),
    prefix: str = typer.Option("", metavar="N[,N...]", help="prefix of modes 5 and 6, one per sequence."),
    packed: bool = typer.Option(False, "--packed", help="Use layout TND for a single sequence too."),
    mask_source: str = typer.Option(
        "zeros", "--mask", metavar="WORD|FILE",
        help="Mask of modes 0, 1, 5 and 9: zeros, triangle, a file (.npy, or lines of 0 and 1); none: no mask.",
    ),
    interface: str = typer.Option(
        "", "--interface", "--face", metavar="NAME",
        help=f"Picture and call of one interface: {', '.join(INTERFACE_NAMES)}.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Intervals, remarks and calls as JSON."),
    svg: Path | None = typer.Option(None, metavar="FILE", dir_okay=False, help="Write the picture as SVG."),
    png: Path | None = typer.Option(None, metavar="FILE", dir_okay=False, help="Write the picture as PNG."),
    explorer: Path | None = typer.Option(
        None, metavar="FILE", dir_okay=False, help="Write the explorer: one HTML file that needs nothing else."
    ),
    serve: bool = typer.Option(False, "--serve", help="Serve the explorer on this machine, with the given settings."),
    port: int = typer.Option(0, min=0, max=65535, help="Port of --serve; 0: a free one."),
) -> None:  # fmt: skip
    """Draw the keys that each row sees in a sparse mode or Band, with its rule, its calls and CANN's restrictions."""
    from rich.console import Console

    given = {
        "mode": mode, "q": q, "kv": kv, "pre": pre, "next": next_, "prefix": prefix, "packed": packed,
        "mask": mask_source,
    }  # fmt: skip
    if explorer:
        from fusion_attention.explorer.page import page

        _write(explorer, page().encode())
    if serve:
        _serve(port, _setting(given) if mode else None)
        return
    if explorer and not mode:
        return
    _check_interface(interface)
    if not mode:
        if as_json or svg or png:
            raise typer.BadParameter("a picture needs a mode: 0 to 9, or a Band", param_hint="MODE")
        _show_gallery(Console())
        return
    from fusion_attention.explorer import draw

    s = _setting(given)
    shown = interface or ("own" if s.mode < 0 else "inference" if s.mode == 9 else "training")
    if svg:
        _write(svg, draw.svg(_cells(s, shown), _title(s)).encode())
    if png:
        _write(png, draw.png(_cells(s, shown)))
    if as_json:
        typer.echo(json.dumps(_report(s, shown), indent=2, ensure_ascii=False))
    elif not (svg or png):
        _show(s, shown, [interface] if interface else list(INTERFACE_NAMES), Console())


# ------------------------------------------------------------------------------------------------------------- options


def _check_interface(name: str) -> None:
    if name and name not in INTERFACE_NAMES:
        raise typer.BadParameter(
            f"expected one of {', '.join(INTERFACE_NAMES)}, got {name!r}", param_hint="--interface"
        )


def _numbers(text: str, option: str, most: int = LONGEST) -> tuple[int, ...]:
    try:
        results = tuple(int(word) for word in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"expected integers separated by commas, got {text!r}", param_hint=option) from None
    if not 1 <= len(results) <= 64 or not all(0 <= n <= most for n in results):
        raise typer.BadParameter(f"expected 1 to 64 numbers from 0 to {most}, got {text[:60]}", param_hint=option)
    return results


def _setting(given: dict[str, Any]) -> Setting:
    """Returns the Setting (lengths, mask mode, edges) that the command's options `given` (by name) describe; raises
    typer.BadParameter if they contradict each other."""
    from fusion_attention.explorer.visible import FULL_MODES, MODES, PREFIX_MODES, Setting

    q_len = _numbers(given["q"], "--q")
    kv_len = _numbers(given["kv"], "--kv") if given["kv"] else q_len
    if len(kv_len) != len(q_len):
        raise typer.BadParameter(f"expected {len(q_len)} numbers as in --q, got {len(kv_len)}", param_hint="--kv")
    if not max(q_len) or not max(kv_len):
        raise typer.BadParameter("expected at least one row and one key", param_hint="--q")
    prefix = _numbers(given["prefix"], "--prefix") if given["prefix"] else ()
    s = Setting(0, q_len, kv_len, given["packed"] or len(q_len) > 1, given["pre"], given["next"], prefix)
    if given["mode"].isdigit() and int(given["mode"]) in MODES:
        s = replace(s, mode=int(given["mode"]))
        if s.mode in PREFIX_MODES and len(prefix) == 1:
            s = replace(s, prefix=prefix * len(q_len))
        elif s.mode not in PREFIX_MODES and prefix:
            raise typer.BadParameter(f"mode {s.mode} has no prefix: modes 5 and 6 do", param_hint="--prefix")
        s = replace(s, prefix=s.prefix if s.mode in PREFIX_MODES else ())
    else:
        s = _of_band(s, given)
    if s.prefix and len(s.prefix) != len(q_len):
        raise typer.BadParameter(f"expected {len(q_len)} numbers as in --q, got {len(s.prefix)}", param_hint="--prefix")
    if s.mode == 6 and not s.prefix:
        raise typer.BadParameter("mode 6 needs a prefix for every sequence", param_hint="--prefix")
    if given["mask"] in ("zeros", "triangle", "none"):
        return replace(s, mask=given["mask"])
    if s.mode not in FULL_MODES:
        expected = "expected none, zeros or triangle: only modes 0, 1, 5 and 9 read a mask from a file"
        raise typer.BadParameter(expected, param_hint="--mask")
    return replace(s, mask="own", own=_read_mask(Path(given["mask"])))


def _of_band(s: Setting, given: dict[str, Any]) -> Setting:
    """Returns a copy of the mask setting `s` with the edges of the Band in given["mode"], text of a constructor call
    such as window(3, 0), parsed and not executed. given: the command's options by name."""
    from fusion_attention.explorer.visible import BAND
    from fusion_attention.ir.mask import INFINITE, Band

    constructors = {name: getattr(Band, name) for name in ("full", "causal", "window", "prefix_causal")}
    constructors["Band"] = Band
    if given["prefix"] or (given["pre"], given["next"]) != (NO_EDGE, NO_EDGE):
        raise typer.BadParameter("a Band has its own edges: window(LEFT, RIGHT), prefix_causal([N])")
    text = given["mode"].removeprefix("fa.").removeprefix("Band.")
    try:
        tree = ast.parse(text if "(" in text else f"{text}()", mode="eval").body
        if not (isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and tree.func.id in constructors):
            raise ValueError
        words = {word.arg or "": ast.literal_eval(word.value) for word in tree.keywords}
        band = constructors[tree.func.id](*map(ast.literal_eval, tree.args), **words)
        edges = [band.lo, band.hi, *band.prefix]
        if not all(type(n) is int and abs(n) <= INFINITE for n in edges) or any(n < 0 for n in band.prefix):
            raise ValueError
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        message = str(error) if isinstance(error, ValueError) and str(error).startswith("Band:") else ""
        wanted = "expected a mode (0 to 9) or a Band such as window(3, 0), causal or prefix_causal([2])"
        raise typer.BadParameter(message or f"{wanted}, got {given['mode'][:60]!r}", param_hint="MODE") from None
    pre = NO_EDGE if band.lo <= -INFINITE else -band.lo
    next_ = NO_EDGE if band.hi >= INFINITE else band.hi - 1
    return replace(s, mode=BAND, pre=pre, next=next_, align=band.align, prefix=band.prefix)


def _read_mask(path: Path) -> list[list[int]]:
    """Returns the rows, lists of 0 and 1, of a mask in a .npy or text file."""
    import numpy as np

    try:
        if path.suffix == ".npy":
            result = np.load(path, allow_pickle=False, mmap_mode="r")
            if result.ndim != 2 or result.size > LONGEST * 16 or result.dtype.kind not in "biu":
                raise ValueError(f"{result.dtype} {list(result.shape)}")
            return (np.asarray(result) != 0).astype(int).tolist()
        with path.open("rb") as file:
            text = file.read(LONGEST * 16 + 1).decode("ascii")
        rows = ["".join(line.replace(",", " ").split()) for line in text.splitlines()]
        found_rows = [[int(sign) for sign in row] for row in rows if row]
        if not found_rows or len({len(row) for row in found_rows}) > 1 or {*text} - set("01 ,\t\r\n"):
            raise ValueError("other signs, or lines of several lengths")
        return found_rows
    except OSError as error:
        raise typer.BadParameter(f"cannot read {path}: {error.strerror or error}", param_hint="--mask") from None
    except (ValueError, EOFError) as error:
        raise typer.BadParameter(
            f"{path}: expected a matrix [rows, keys] of 0 and 1 (.npy, or lines of 0 and 1): {str(error)[:120]}",
            param_hint="--mask",
        ) from None


# --------------------------------------------------------------------------------------------------------------- files


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise typer.BadParameter(f"cannot write {path}: {error.strerror or error}") from None
    typer.echo(f"{path}: {len(data)} bytes", err=True)


def _cells(s: Setting, interface: str) -> Any:
    from fusion_attention.explorer.draw import TooLarge, cells_of

    try:
        cells = cells_of(s, interface)
    except TooLarge as error:
        raise typer.BadParameter(str(error), param_hint="--q") from None
    if cells is None:
        raise typer.BadParameter(f"{INTERFACE_NAMES[interface]} has no call with this mask", param_hint="--interface")
    return cells


def _serve(port: int, s: Setting | None) -> None:
    from fusion_attention.explorer.page import address, server

    try:
        running = server(port)
    except OSError as error:
        raise typer.BadParameter(
            f"cannot serve on port {port}: {error.strerror or error}", param_hint="--port"
        ) from None
    typer.echo(f"{address(running, s)}\nCtrl-C ends it.")
    try:
        running.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        running.server_close()


# -------------------------------------------------------------------------------------------------------------- screen


def _title(s: Setting) -> str:
    from fusion_attention.explorer.visible import BAND, own_band
    from fusion_attention.explorer.words import NAMES

    return repr(own_band(s)) if s.mode == BAND else f"sparse_mode {s.mode}: {NAMES[str(s.mode)]}"


def _report(s: Setting, interface: str) -> dict[str, Any]:
    """Returns the facts about a mask setting (intervals of keys, remarks, calls) as JSON values, for one interface or
    ("") all; infinite edges are null."""
    from fusion_attention.explorer.calls import call
    from fusion_attention.explorer.draw import is_seen
    from fusion_attention.explorer.violations import remarks_on, verdict
    from fusion_attention.explorer.visible import edges_of, picture
    from fusion_attention.explorer.words import RULES, formula
    from fusion_attention.ir.mask import INFINITE

    p = picture(s, interface)
    items: list[dict[str, Any]] = []
    for b in range(len(s.q_len)) if p else ():
        assert p
        edges = {name: None if abs(p[name][b]) >= INFINITE else p[name][b] for name in ("lo", "hi", "prefix")}
        item: dict[str, Any] = {"q_len": s.q_len[b], "kv_len": s.kv_len[b], **edges, "formula": formula(p, b)}
        if s.q_len[b] <= NAMED_ROWS:
            item["rows"] = [edges_of(p, b, i) for i in range(s.q_len[b])]
        items.append(item)
    report: dict[str, Any] = {"mode": None if s.mode < 0 else s.mode, "title": _title(s), "rule": RULES[str(s.mode)]}
    report |= {"interface": interface, "packed": s.packed, "items": items, "mask": p["mask"] if p else None}
    if p and sum(s.q_len) * sum(s.kv_len) <= NAMED_ROWS * NAMED_ROWS:
        report["seen"] = int(is_seen(_cells(s, interface)).sum())
    interfaces = {}
    for name, operator in INTERFACE_NAMES.items():
        text, remarks = call(s, name), remarks_on(s, name)
        state = {"operator": operator, "verdict": "none" if text is None else verdict(remarks), "remarks": remarks}
        interfaces[name] = {**state, **(dict.fromkeys(("before", "call")) if text is None else text)}
    return report | {"interfaces": interfaces}


def _is_ascii(console: Console) -> bool:
    return not (console.encoding or "").lower().startswith("utf")


def _show(s: Setting, interface: str, interfaces: list[str], console: Console) -> None:
    from rich.text import Text

    from fusion_attention.explorer.draw import is_seen, text
    from fusion_attention.explorer.words import RULES

    cells = _cells(s, interface)
    console.print(Text(_title(s), "bold"), Text(f"  as {INTERFACE_NAMES[interface]} computes it", "dim"), sep="")
    console.print(RULES[str(s.mode)], style="italic", width=min(100, console.width))
    console.print()
    lines = text(cells, console.width - 10, _is_ascii(console))
    for number, line in enumerate(lines):
        label = f"row {number:>3}  " if len(lines) == len(cells) else "  "
        console.print(Text(label, "dim") + Text(line, "blue"), no_wrap=True, overflow="crop")
    console.print()
    report, visible_share = _report(s, interface), float(is_seen(cells).mean()) if cells.size else 0.0
    empty = int((~is_seen(cells).any(1)).sum()) if cells.shape[1] else len(cells)
    console.print(
        f"{len(cells)} rows x {cells.shape[1]} keys, {report['seen']} seen ({visible_share:.1%})", highlight=False
    )
    if empty:
        console.print(Text(f"{empty} row{'s see' if empty > 1 else ' sees'} no key", "yellow"))
    for b, item in enumerate(report["items"]):
        name = f"sequence {b}, row i: " if s.packed else "row i: "
        console.print(Text(name, "dim") + Text(item["formula"]))
    for name in interfaces:
        _show_interface(report["interfaces"][name], console, with_setup=len(interfaces) == 1)
    if len(interfaces) > 1:
        console.print()
        console.print(Text("--interface NAME prints one complete call: " + ", ".join(interfaces), "dim"))


def _show_interface(report: dict[str, Any], console: Console, with_setup: bool) -> None:
    from rich.syntax import Syntax
    from rich.text import Text

    colour, state = VERDICTS[report["verdict"]]
    console.print()
    console.print(Text(report["operator"], "bold"), Text(f"  {state}", colour), sep="")
    for remark in report["remarks"]:
        got = f", got {remark['got']}" if remark["got"] else ""
        advice = f" ({remark['advice']})" if remark["advice"] else ""
        code = f"{remark['code']} " if remark["level"] in ("meaning", "limit", "doubt") else ""
        console.print(Text(f"  {code}{remark['param']}: expected {remark['expected']}{got}{advice}", colour))
    if report["call"]:
        call = f"{report['before']}\n{report['call']}" if with_setup else report["call"].split("\nworkspace")[0]
        console.print(Syntax(call, "python", background_color="default", word_wrap=True, padding=(0, 2)))


def _show_gallery(console: Console) -> None:
    """Prints a small picture of every one of CANN's mask modes (sparse_mode), with its rule and its use."""
    from rich.table import Table
    from rich.text import Text

    from fusion_attention.explorer.draw import cells_of, example, text
    from fusion_attention.explorer.visible import BAND, MODES
    from fusion_attention.explorer.words import NAMES, RULES, USES

    table = Table(show_header=False, box=None, padding=(0, 2, 1, 0))
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    for mode in MODES:
        cells = cells_of(example(mode), {9: "inference", BAND: "own"}.get(mode, "training"))
        assert cells is not None
        words = Text(f"{'Band' if mode == BAND else mode}  {NAMES[str(mode)] if mode != BAND else ''}\n", "bold")
        words.append(RULES[str(mode)], "not bold").append(f"\n{USES[str(mode)].capitalize()}.", "not bold dim")
        table.add_row(Text("\n".join(text(cells, 40, _is_ascii(console))), "blue"), words)
    console.print(table)
    console.print(
        "fusion-attention mask MODE --q 5 --kv 8 ... draws one mode with your lengths, its calls and what CANN refuses;"
    )
    console.print("fusion-attention mask --serve opens them as an interactive page.", highlight=False)
