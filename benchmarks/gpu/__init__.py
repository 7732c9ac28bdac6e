"""Times the Triton kernels beside torch's functions on a GPU: `python -m benchmarks.gpu`, `make bench-gpu`.

Needs torch with CUDA, triton and this package's Python sources; draws the chart if matplotlib is installed.
"""
