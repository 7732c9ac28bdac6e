"""Definitions of the lightning indexer's KL losses with gradients: CANN's, and this library's indexer_loss()."""
