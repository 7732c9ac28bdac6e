"""Calls as text: Python source (parser.py), a chip's log (cann_logs.py), and the rules
of the record they break (explanation.py)."""
