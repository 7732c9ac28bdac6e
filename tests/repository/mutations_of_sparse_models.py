"""The mutations of sparse models of transformers; part of mutations.py's."""

from mutant import package

MODELS = "integrations/test_sparse_models.py::test_logits_and_gradients"
TRAINING = "integrations/test_sparse_training.py"
LATENT = "integrations/sparse_latent.py"
SPARSE_MODELS = [
    package("sparse models: rows that are dense with a mask read all keys", LATENT,
          "if end > first:", "if end < first:", MODELS),
    package("sparse models: lists of dense rows serve later rows", LATENT,
          "chosen = lists[:, end - first :]", "chosen = lists[:, : lists.shape[1] - end + first]", MODELS),
    package("sparse models: a list of blocks omits the incomplete block", "integrations/sparse_blocks.py",
          "incomplete = (((position + 1) % ratio > 0) & real)", "incomplete = (((position + 1) % ratio < 0) & real)",
          MODELS),
    package("sparse models: a window of one key more", "integrations/sparse_compressed.py",
          "Band.window(module.sliding_window - 1)", "Band.window(module.sliding_window)", MODELS),
    package("sparse models: rows return in the order of the calls", "integrations/sparse_sequences.py",
          "self.q_order.argsort(1)", "self.q_order", MODELS),
    package("sparse models: weights that are asked for are not computed", "integrations/sparse_models.py",
          "if asks_for_weights(layer, given):", "if asks_for_weights(layer, given) and layer.training:",
          f"{TRAINING}::test_weights_are_those_of_eager"),
    package("sparse models: the loss of an indexer is that of rows without lists", LATENT,
          "loss = indexer_loss(q, k, lse, *index, lists, **words)",
          "loss = indexer_loss(q, k, lse, *index, None, **words)", f"{TRAINING}::test_the_loss_of_an_indexer"),
]  # fmt: skip
