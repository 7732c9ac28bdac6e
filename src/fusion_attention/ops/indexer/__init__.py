"""The lightning indexer: which keys a row selects, its gradients, and our own lightning_indexer()."""
