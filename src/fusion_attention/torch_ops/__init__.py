"""Integration with torch: eager calls with autograd; registered operators for traces and transforms (dispatch.py)."""
