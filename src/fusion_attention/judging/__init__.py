"""Judges the results of a call by the formulas of its operator, and explains errors by well-known kernel mistakes."""
