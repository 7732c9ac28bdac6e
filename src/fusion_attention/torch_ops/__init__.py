"""How torch sees a call: eagerly with a derivative, or as an operator in traces and transforms (see dispatch.py)."""
