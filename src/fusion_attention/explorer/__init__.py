"""The mask explorer: the visible keys of every sparse mode as text, SVG, PNG and an interactive page."""

from fusion_attention.explorer.draw import gallery as gallery
from fusion_attention.explorer.page import page as page
