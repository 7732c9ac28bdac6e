"""The lightning indexer, which selects keys for each row: CANN's operators, and this library's lightning_indexer()."""
