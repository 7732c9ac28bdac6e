"""Calls as somebody wrote them down: Python text (written.py), what a chip's log says of one (logs.py), and which rules
of the record they break (explanation.py)."""
