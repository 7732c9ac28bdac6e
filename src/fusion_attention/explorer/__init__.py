"""The mask explorer: draws the visible keys of sparse modes and bands as text, SVG, PNG or an interactive web page."""

from fusion_attention.explorer.draw import gallery as gallery
from fusion_attention.explorer.page import page as page
