"""Masks to look at: which keys a row sees in every sparse mode, as text, SVG, PNG and a page that one can play with."""

from __future__ import annotations

from fusion_attention.explorer.draw import gallery as gallery
from fusion_attention.explorer.page import page as page
