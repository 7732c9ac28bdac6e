"""Every generated file of docs/ but the operators' pages, which the package's own command writes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from website import accuracy, ascend, charts, house, masks, pictures, reference
from website.svg import Picture, site_stylesheet

PICTURES: dict[str, Callable[[], Picture]] = {
    "hourglass": house.hourglass,
    "hourglass_tall": house.hourglass_tall,
    "floors": house.floors,
    "beside_sdpa": charts.beside_sdpa,
    "beside_sdpa_tall": partial(charts.beside_sdpa, tall=True),
    "beside_masks": charts.beside_masks,
    "beside_masks_tall": partial(charts.beside_masks, tall=True),
    "accuracy": accuracy.tiles,
    "accuracy_tall": partial(accuracy.tiles, tall=True),
    "ascend_calls": ascend.calls,
    "ascend_calls_tall": partial(ascend.calls, tall=True),
    "bands": masks.bands,
    "sparse_modes": masks.gallery,
    "layouts": pictures.layouts,
    "packing": pictures.packing,
    "paged_cache": pictures.pages,
    "training_stages": pictures.stages,
}


def generated() -> dict[str, str]:
    """Text by name inside docs/."""
    found = {f"pictures/{name}.svg": draw().render() for name, draw in PICTURES.items()}
    found["assets/pictures.css"] = site_stylesheet()
    found[ascend.PAGE], found[accuracy.PAGE] = ascend.page(), accuracy.page()
    return found | reference.generated()
