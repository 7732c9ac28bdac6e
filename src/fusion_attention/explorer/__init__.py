"""Masks to look at: which keys a row sees in every sparse mode, as text, SVG, PNG and a page that one can play with."""
