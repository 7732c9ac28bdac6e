"""Code that all Triton kernels share: tables of strides, loads of rows, pages of KV caches, biases, tile shapes."""
