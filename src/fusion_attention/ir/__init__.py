"""The intermediate representation between interfaces and kernels: a problem, its sequence lengths and its operands.

No term of CANN appears here or in a lower layer.
"""
