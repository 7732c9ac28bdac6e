"""The C API: headers and libraries under CANN's names, so that C and C++ programs written for it run here unchanged.

environment.py says where headers and libraries lie. Imports neither torch nor records by itself.
"""
