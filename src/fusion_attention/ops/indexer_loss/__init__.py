"""Records of the lightning indexer's KL losses with gradients, from CANN and of this library (indexer_loss())."""
