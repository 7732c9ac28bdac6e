"""Writing of attention calls with inputs and outputs to files (capture.py), and reading of these files (reader.py)."""
