"""Dense attention: forward, backward, and recomputation of rows with infinite or NaN elements."""
