"""Code used by all kernels and launches: layout tables, rows in blocks of columns, pages, biases, tile shapes."""
