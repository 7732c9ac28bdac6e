"""Integration with torch: eager calls with autograd, and registered operators for traces and transforms (dispatch.py)."""
