"""The C API: headers and libraries under CANN's names, so that C and C++ programs written for CANN run unchanged.

environment.py has the paths of headers and libraries. This package imports neither torch nor operator definitions.
"""
