"""Generates files of the site that are not in git: operator pages, the reference, pictures, and tables in pages."""

import re
from collections.abc import Callable
from functools import cache, partial

from fusion_attention.cli import op_pages
from fusion_attention.contract.doc_pages import versions
from fusion_attention.ops.auxiliary_definitions.definitions import CONTRACTS
from website import accuracy, ascend, charts, masks, mistakes, overview_diagram, pictures, reference
from website.svg import Picture, site_stylesheet

PICTURES: dict[str, Callable[[], Picture]] = {
    "overview": overview_diagram.overview,
    "overview_tall": overview_diagram.overview_tall,
    "beside_sdpa": charts.beside_sdpa,
    "beside_sdpa_tall": partial(charts.beside_sdpa, tall=True),
    "beside_masks": charts.beside_masks,
    "beside_masks_tall": partial(charts.beside_masks, tall=True),
    "accuracy": accuracy.tiles,
    "accuracy_tall": partial(accuracy.tiles, tall=True),
    "ascend_calls": ascend.calls,
    "ascend_calls_tall": partial(ascend.calls, tall=True),
    "bands": masks.bands,
    "compressed_keys": masks.two_sources,
    "sparse_modes": masks.gallery,
    "layouts": pictures.layouts,
    "packing": pictures.packing,
    "paged_cache": pictures.pages,
    "training_stages": pictures.stages,
}


# A comment inside a page, in whose place its table stands.
TABLES: dict[str, Callable[[], str]] = {
    "functions": ascend.table,
    "coverage": ascend.coverage,
    "worst tiles": accuracy.table,
    "mistakes": mistakes.table,
}
MARK = re.compile(r"<!-- table: ([\w ]+) -->")


def operators() -> dict[str, str]:
    """Returns a page for each record, their index, and tables of the parameters of all versions."""
    texts = {name: op_pages.page(record) for name, record in CONTRACTS.items()}
    texts |= {"index": op_pages.index(CONTRACTS), "versions": versions(CONTRACTS.values())}
    return {f"ops/{name}.md": text.rstrip() + "\n" for name, text in texts.items()}


@cache
def generated() -> dict[str, str]:
    """Returns texts by path inside docs/."""
    results = {f"pictures/{name}.svg": draw().render() for name, draw in PICTURES.items()}
    results["assets/pictures.css"] = site_stylesheet()
    return results | reference.generated() | operators()


def with_tables(markdown: str) -> str:
    """Inserts generated tables into a page."""
    return MARK.sub(lambda mark: TABLES[mark[1]](), markdown)
