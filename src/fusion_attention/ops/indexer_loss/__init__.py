"""The lightning indexer's KL loss with its gradients, and our own indexer_loss()."""
