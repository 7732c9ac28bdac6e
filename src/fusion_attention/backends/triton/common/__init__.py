"""Code that all kernels and launches share: layout tables, rows in blocks of columns, pages, biases, tile shapes."""
