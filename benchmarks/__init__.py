"""Times this library and its alternatives in alternating runs of one process."""
