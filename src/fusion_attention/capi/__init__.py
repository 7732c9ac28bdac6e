"""The C face: headers and libraries under CANN's names, so that C and C++ programs written for it run here unchanged.

headers.py writes the operators' declarations from their records; environment.py says where headers and libraries lie.
Loads neither torch nor records by itself.
"""
