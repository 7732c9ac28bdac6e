"""The lightning indexer: scores, the choice of keys, gradients, losses."""
