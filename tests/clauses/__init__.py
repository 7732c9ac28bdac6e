"""Pages of CANN, one table per page: statements of the page, calls that show each, and the results that they must give.

A table is checked against its page by reading both: parameters are spelled as the page's prototype spells them, and
what a call computes is compared with the page's formula, written here in float64 and nowhere else (near.py).
"""
