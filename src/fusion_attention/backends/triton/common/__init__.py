"""What all kernels and launches share: layout tables, rows in parts, pages, biases, shapes of tiles."""
