"""Explains refused calls: reads Python source (parser.py) or a chip's log (cann_logs.py), and lists the broken rules of
the operator's definition (explanation.py)."""
