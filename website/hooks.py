"""Implements mkdocs' hooks: generated pages and tables, pictures in pages, the mask explorer, and search weights."""

import re
from pathlib import Path
from typing import Any

from fusion_attention.cli.op_pages import groups
from fusion_attention.ops.auxiliary_definitions.definitions import CONTRACTS
from website.everything import generated, with_tables

# Sections of the operators' pages that would be found for every word.
QUIET = re.compile(r'(<h2 id="(?:rules|limits|notes|hints|doubts|shapes|parameters|call|example|support)[^"]*")')
PICTURE = re.compile(r'<p><img alt="([^"]*)" src="(?:\.\./)*pictures/(\w+)\.svg"\s*/?></p>')


def operators() -> list[dict[str, list[str]] | str]:
    """Returns the operators' pages by family, in the order of their index."""
    families = [{title: [f"ops/{name}.md" for name in names]} for title, names in groups(sorted(CONTRACTS)).items()]
    return ["ops/index.md", "ops/versions.md", *families]


def on_config(config: Any) -> Any:
    """Inserts the operators where mkdocs.yml contains "ops/"."""
    config.nav = [{"Operators": operators()} if entry == {"Operators": "ops/"} else entry for entry in config.nav]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the generated files."""
    from mkdocs.structure.files import File

    for name, text in generated().items():
        if file := files.get_file_from_path(name):  # README's picture, which git holds
            files.remove(file)
        files.append(File.generated(config, name, content=text))
    return files


def on_post_build(config: Any) -> None:
    """Builds the mask explorer from the library's rules."""
    from fusion_attention.explorer.page import page

    (Path(config.site_dir) / "assets" / "explorer.html").write_text(page(), encoding="utf-8")


def _of_the_page(name: str) -> str:
    """Removes a picture's colours and background, which the page then defines."""
    text = generated()[f"pictures/{name}.svg"]
    text = re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r'<rect class="f-bg ground"[^>]*/>', "", text)
    return text.replace("head-", f"{name}-head-")  # ids are the page's


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Inserts tables into a page and sets its search weight: high for vocabulary pages, low for measurements."""
    boost = {"words.md": 4, "rulings.md": 0.5, "dev/design.md": 0.5}
    boost |= dict.fromkeys(("dev/lab_book.md", "dev/testing.md", "dev/release.md"), 0.4)
    uri = page.file.src_uri
    if uri in boost or uri.startswith("ops/npu_"):
        page.meta.setdefault("search", {"boost": boost.get(uri, 2)})
    return with_tables(markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Embeds pictures so that they use the page's colours; lets tables be wider than the page."""

    def inside(match: re.Match[str]) -> str:
        picture_html = _of_the_page(match[2])
        tall = f"{match[2]}_tall"
        if f"pictures/{tall}.svg" in generated():
            picture_html = _of_the_page(tall).replace('class="fa-pic"', 'class="fa-pic fa-tall"', 1) + picture_html
        return f'<figure class="fa-figure fa-{match[2]}">{picture_html}</figure>'

    html = PICTURE.sub(inside, html)
    if page.file.src_uri.startswith("ops/"):
        html = QUIET.sub(r"\1 data-search-exclude", html)
        html = re.sub(r"<td>(yes|no)</td>", r'<td class="fa-\1">\1</td>', html)
    return html
