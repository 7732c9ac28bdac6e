"""Converts docstrings and signatures to Markdown, for operator pages and for the site's reference."""

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

WIDTH = 84
# Module names that pages omit before the names of types.
_FROM = re.compile(r"\b(?:collections\.abc|typing|torch(?=\.Tensor))\.")
SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Source", "Example")
_SECTION = re.compile(rf"^({'|'.join(SECTIONS)}):[ \t]*(.*)$")
_ANNOTATED = re.compile(r"Annotated\[(\w+(?:\[\w+\])?), [^]]*\]")  # marks tensors that a function writes


def signature(function: Callable[..., Any], name: str) -> str:
    """Returns a function's signature as text in Python's syntax, under a name; long ones have several lines."""
    try:
        result = inspect.signature(function)
    except (TypeError, ValueError):
        return f"{name}(...)"
    shown = [p for key, p in result.parameters.items() if key != "self"]
    given, kinds = [_FROM.sub("", str(p)) for p in shown], [p.kind for p in shown]
    keyword = [i for i, kind in enumerate(kinds) if kind is inspect.Parameter.KEYWORD_ONLY]
    if keyword and inspect.Parameter.VAR_POSITIONAL not in kinds:
        given.insert(keyword[0], "*")
    given = [_ANNOTATED.sub(r"\1", text) for text in given if not text.startswith("**foreign")]
    given = [re.sub(r""": (?:ForwardRef\()?(['"])([^'"]*)\1\)?""", r": \2", text) for text in given]
    back = inspect.Signature.empty if inspect.isclass(function) else result.return_annotation
    end = ")" if back is inspect.Signature.empty else f") -> {back if isinstance(back, str) else _name(back)}"
    end = _ANNOTATED.sub(r"\1", _FROM.sub("", end))
    return "\n".join(filled(f"{name}(", given, end))


def filled(head: str, arguments: list[str], end: str = ")") -> list[str]:
    """Returns the lines, at most WIDTH long, of a call or signature: `head`, comma-separated arguments, `end`."""
    if len(head) + len(", ".join(arguments)) + len(end) <= WIDTH:
        return [f"{head}{', '.join(arguments)}{end}"]
    lines = [head]
    for argument in arguments:
        if len(lines) > 1 and len(lines[-1]) + len(argument) + 2 < WIDTH:
            lines[-1] += f" {argument},"
        else:
            lines.append(f"    {argument},")
    return [*lines, end]


def _name(annotation: Any) -> str:
    return getattr(annotation, "__name__", str(annotation)) if isinstance(annotation, type) else str(annotation)


def sections(text: str) -> dict[str, str]:
    """Splits a docstring; returns {heading ("Args", ...): text}; text before the first heading is under ""."""
    result, current = {"": ""}, ""
    for line in inspect.cleandoc(text).splitlines():
        heading = _SECTION.match(line)
        if heading:
            current = heading[1]
            result[current] = heading[2] and heading[2] + "\n"
        else:
            result[current] += line + "\n"
    return {name: body.strip("\n") if not name else textwrap.dedent(body).strip("\n") for name, body in result.items()}


def prose(text: str, root: str) -> str:
    """Converts text to Markdown: indented lines are code, and special characters of all other lines are escaped. root:
    the relative path from the page to docs/, "../" or ""."""
    lines: list[str] = []
    code = False
    for line in text.splitlines():
        indented = line.startswith("    ")
        if indented and not code:
            code = not lines or not lines[-1]
        elif line and not indented:
            code = False
        lines.append(line if indented and code else markdown(line.strip() if indented else line, root))
    return "\n".join(lines)


def markdown(line: str, root: str) -> str:
    """Escapes a line of text for Markdown, except `code`, and links pages docs/NAME.md as {root}NAME.md."""
    parts = re.split(r"(`[^`]*`)", line)
    return "".join(fragment if fragment.startswith("`") else _escaped(fragment, root) for fragment in parts)


def _escaped(text: str, root: str) -> str:
    text = re.sub(r"([*_<>\[\]|])", r"\\\1", text)
    unescaped = re.compile(r"docs/((?:[\w/]|\\_)+)\.md")

    def link(match: re.Match[str]) -> str:
        target = match[1].replace("\\_", "_")
        return f"[{match[1].rsplit('/', 1)[-1]}]({root}{target}.md)"

    return unescaped.sub(link, text)


def arguments(text: str, root: str, names: Iterable[str] = ()) -> list[str]:
    """Converts the entries of a docstring's section Args or Raises to a Markdown list. root: relative path from the
    page to docs/; names: the function's parameters; an entry may describe several."""
    entries: list[list[str]] = []
    alternatives = "|".join(map(re.escape, names))
    if alternatives:
        text = re.sub(rf"(?<=[.;]) (?=(?:{alternatives})(?:, (?:{alternatives}))*: )", "\n", text)
    for line in text.splitlines():
        if not line.startswith(" ") and re.match(r"^[\w*., ]+:", line):
            entries.append([line])
        elif entries:
            entries[-1].append(line.strip())
        elif line.strip():
            entries.append([line])
    lines = []
    for entry in entries:
        names, _, meaning = " ".join(entry).partition(":")
        shown = ", ".join(f"`{name.strip()}`" for name in names.split(","))
        lines.append(f"* {shown}: {markdown(meaning.strip(), root)}" if meaning else f"* {markdown(names, root)}")
    return lines


def parameters(function: Any) -> list[str]:
    """Returns the parameter names of a function or class."""
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


def body(function: Any, root: str) -> list[str]:
    """Converts a function's docstring to lines of Markdown; root: relative path from the page to docs/."""
    text, names = inspect.getdoc(function) or "", parameters(function)
    result = sections(text)
    lines = [prose(result[""], root), ""] if result[""] else []
    for name, title in (("Args", "Arguments"), ("Attributes", "Attributes"), ("Raises", "Raises")):
        if name in result:
            lines += [f"**{title}**", "", *arguments(result[name], root, names), ""]
        if name == "Attributes":
            for back in ("Returns", "Yields"):
                if result.get(back):
                    lines += [f"**{back}** {prose(result[back], root)}", ""]
    if result.get("Example"):
        lines += ["```pycon", result["Example"], "```", ""]
    return lines
