"""Dense attention: forward, backward, and rows with infinite or NaN elements computed again."""
