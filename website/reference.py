"""Generates the reference of the Python API from signatures and docstrings."""

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

from fusion_attention.cli import docstring_markdown

ROOT = "../"  # from a page of reference/ to docs/


@dataclass(frozen=True)
class Page:
    """A page: its title, its introduction, and its (module, names); "*" stands for the module's __all__."""

    title: str
    words: str
    shown: tuple[tuple[str, tuple[str, ...]], ...]


PAGES = {
    "attention": Page(
        "attention and decode_attention",
        "Dense attention, padded or packed, and attention over a cache. Their parameters as tables, with every rule: "
        "[attention](../ops/attention.md), [decode_attention](../ops/decode_attention.md).",
        (("fusion_attention", ("attention", "decode_attention")),),
    ),
    "band": Page(
        "Band",
        "Which keys a row sees, without a mask tensor.\n\n![Bands](../pictures/bands.svg)",
        (("fusion_attention", ("Band",)),),
    ),
    "cache": Page(
        "PagedKVCache",
        "Keys and values in pages, shared between sequences until one of them writes ([guide](../decode.md)).\n\n"
        "![A cache with three sequences](../pictures/paged_cache.svg)",
        (("fusion_attention", ("PagedKVCache", "CacheFullError")),),
    ),
    "sparse": Page(
        "Sparse attention",
        "The indexer, attention over the keys that it chooses, and the loss that teaches it "
        "([guide](../sparse_attention.md)).",
        (
            ("fusion_attention", ("lightning_indexer", "sparse_attention", "compressed_attention", "pack_lists")),
            ("fusion_attention", ("indexer_loss", "divided_rope")),
        ),
    ),
    "nn": Page(
        "Layers (fusion_attention.nn)",
        "Layers that learn to choose their keys ([guide](../training_dsa.md)).",
        (("fusion_attention.nn", ("*",)),),
    ),
    "settings": Page(
        "Settings and errors",
        "What holds where a call says nothing, and what a wrong call raises.",
        (("fusion_attention", ("use_backend", "strict", "ContractError", "ContractWarning", "BackendError")),),
    ),
    "captures": Page(
        "Captures",
        "Calls recorded and computed again ([guide](../captures.md)).",
        (("fusion_attention", ("capture", "replay", "Replay", "CaptureError")),),
    ),
    "integrations": Page(
        "Integrations",
        "Other libraries' calls, answered here: [transformers](../with_transformers.md), [SDPA](../with_sdpa.md), "
        "[flash-attn](../with_flash_attn.md), [FlexAttention](../with_flex_attention.md).",
        (
            ("fusion_attention.integrations.transformers", ("register", "unregister", "indexer_loss")),
            ("fusion_attention.integrations.transformers_cache", ("PagedCache",)),
            ("fusion_attention.integrations.sdpa", ("*",)),
            ("fusion_attention.integrations.flash_attn", ("*",)),
            ("fusion_attention.integrations.flex_attention", ("*",)),
        ),
    ),
    "npu": Page(
        "torch_npu (fusion_attention.npu)",
        "What makes `import torch_npu` work without the chip ([guide](../torch_npu.md)). Its operators have "
        "[pages of their own](../ops/index.md).",
        (("fusion_attention.npu", ("install", "uninstall", "strict")),),
    ),
    "acl": Page(
        "acl: the two-phase interface",
        "CANN's runtime in Python ([guide](../two_phase.md)); the operators of `aclnn` have "
        "[pages of their own](../ops/index.md).",
        (("fusion_attention.acl", ("*",)), ("fusion_attention.acl.rt", ())),
    ),
}
# Functions of a module without an __all__.
PUBLIC = {
    "fusion_attention.acl.rt": (
        "malloc", "free", "malloc_host", "free_host", "memcpy", "memset", "set_device", "reset_device", "get_device",
        "create_stream", "destroy_stream", "synchronize_stream", "synchronize_device", "get_mem_info",
    ),
}  # fmt: skip


def names_of(module: Any, names: tuple[str, ...]) -> list[str]:
    """Returns the functions and classes of a module for a page."""
    if names == ("*",):
        names = tuple(module.__all__)
    names = names or PUBLIC[module.__name__]
    return [name for name in names if callable(getattr(module, name)) and inspect.getdoc(getattr(module, name))]


def _methods(cls: type) -> list[str]:
    """Returns the public methods and properties that a class itself defines, in source order."""
    inherited = {name for base in cls.__mro__[1:] if base.__module__.startswith("torch") for name in vars(base)}
    lines = []
    for name, value in vars(cls).items():
        inner = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        called = inner.fget if isinstance(inner, property) else inner
        hidden = name.startswith("_") or (name in inherited and name != "forward") or isinstance(value, type)
        if hidden or not inspect.getdoc(called):
            continue
        if isinstance(inner, property):
            lines += [f"### {cls.__name__}.{name}", "", *docstring_markdown.body(called, ROOT)]
        elif inspect.isfunction(inner):
            signature = docstring_markdown.signature(getattr(cls, name), f"{cls.__name__}.{name}")
            lines += [
                f"### {cls.__name__}.{name}",
                "",
                "```pyi",
                signature,
                "```",
                "",
                *docstring_markdown.body(called, ROOT),
            ]
    return lines


def entry(module: str, name: str) -> list[str]:
    """Formats a function or a class below a heading."""
    thing = getattr(importlib.import_module(module), name)
    short = module.removeprefix("fusion_attention").removeprefix(".")
    called = f"{short.rsplit('.', 1)[-1]}.{name}" if short in ("acl.rt",) else name
    lines = [f"## {called}", ""]
    if not (inspect.isclass(thing) and issubclass(thing, BaseException)):
        lines += ["```pyi", docstring_markdown.signature(thing, called), "```", ""]
    lines += [f"`from {module} import {name}`", "", *docstring_markdown.body(thing, ROOT)]
    return lines + (_methods(thing) if inspect.isclass(thing) else [])


def render(page: Page) -> str:
    """Returns a page as Markdown."""
    lines = [f"# {page.title}", "", page.words, ""]
    for module, names in page.shown:
        for name in names_of(importlib.import_module(module), names):
            lines += entry(module, name)
    return "\n".join(lines).rstrip() + "\n"


def index() -> str:
    """Returns the page that lists the contents of every page."""
    words = "The Python API, from its docstrings. Operators by CANN's names and torch_npu's have their rules on "
    lines = ["# Reference", "", f"{words}[pages of their own](../ops/index.md).", ""]
    for file, page in PAGES.items():
        lines += [f"## [{page.title}]({file}.md)", "", "| name | what it is |", "|---|---|"]
        for module, names in page.shown:
            result = importlib.import_module(module)
            for name in names_of(result, names):
                first = (inspect.getdoc(getattr(result, name)) or "").split("\n\n")[0].replace("\n", " ").strip()
                short = "rt." if module.endswith(".rt") else ""
                anchor = (short.replace(".", "") + name).lower()
                lines.append(f"| [`{short}{name}`]({file}.md#{anchor}) | {docstring_markdown.markdown(first, ROOT)} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def generated() -> dict[str, str]:
    """Returns texts by path inside docs/."""
    return {"reference/index.md": index(), **{f"reference/{name}.md": render(page) for name, page in PAGES.items()}}
