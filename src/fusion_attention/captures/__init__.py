"""Recording of attention calls to files (capture.py) and reading of these files (reader.py)."""
