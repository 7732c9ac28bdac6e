"""explain(): reads a refused call as Python text (parser.py) or its log from the chip (cann_logs.py), and lists the
violated rules of the operator's definition (explanation.py)."""
