"""explain(): reads an operator call that raised an error, as Python text (call_parser.py) or as a log of the Ascend
chip (cann_logs.py), and lists the violated rules of the operator (explanation.py)."""
