"""The intermediate representation between interfaces and kernels: parameters, sequence lengths and tensors of a call.

No term of CANN appears here or in a lower layer.
"""
