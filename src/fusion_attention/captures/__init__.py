"""capture(): writes attention calls with inputs and outputs to files (capture.py), and reads them (reader.py)."""
