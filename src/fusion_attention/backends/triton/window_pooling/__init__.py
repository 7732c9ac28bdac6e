"""Kernels that pool windows of rows."""
