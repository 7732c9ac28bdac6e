"""The mutations of what several ranks compute together; part of mutations.py's."""

from mutant import package

BITS = "distributed/test_attention.py::test_gathered_keys_give_the_bits_of_one_process"
EVERY = "distributed/test_attention.py::test_every_schedule_is_as_good_as_one_process"
SHARED, APART = "distributed/test_selections.py::test_ranks_find_what_one_process_does", "distributed/test_cache.py"
RANKS = [
    package("late parts of a sequence go to ranks in the order of early ones", "distributed/layout.py",
          "*reversed(range(ranks))", "*range(ranks)",
          "distributed/test_sharding.py::test_causal_bands_load_all_ranks_alike"),
    package("a sum over ranks leaves one out", "distributed/groups.py",
          "for shard in parts[1:]:", "for shard in parts[2:]:", "distributed/test_groups.py::test_what_passes_arrives"),
    package("ranks that say different things go on", "distributed/groups.py",
          "if [function, message] != heard[0][:2]:", "if function != heard[0][0]:",
          "distributed/test_groups.py::test_ranks_that_say_different_things_all_raise"),
    package("gradients of keys that ranks added pass for those of one process", "distributed/schedules.py",
          "if not m.deterministic:", "if True:", BITS),
    package("keys that go round meet no sink", "distributed/schedules.py",
          "    if m.full.sink is not None:\n        for b,", "    if m.full is None:\n        for b,", EVERY),
    package("a key head that two ranks had gets the gradient of one", "distributed/ulysses.py",
          "heads[place] + gradient if place in heads else gradient", "gradient", EVERY),
    package("a block of keys stays while the next ones come", "distributed/schedules.py",
          "del of_block", "m.call.call_cache[step] = of_block",
          "distributed/test_attention.py::test_a_ring_holds_two_blocks_of_keys_whatever_its_size"),
    package("a rank's rows count from its own first", "distributed/sharded_call.py",
          "edge[b] + first, edge[b])", "edge[b], edge[b])", SHARED),
    package("lists of a rank's keys begin where rows read no more", "distributed/lists.py",
          "& (slot < read)", "", SHARED),
    package("equal choices merge in the other order", "distributed/topk.py",
          "indices.sort(dim=-1, stable=True)", "indices.sort(dim=-1, stable=True, descending=True)",
          "distributed/test_selections.py::test_the_order_of_candidates"),
    package("every rank adds the sink", "distributed/decode.py",
          '{**args, "sink": None, ', "{**args, ", f"{APART}::test_decoding_finds_what_one_process_does"),
    package("a rank reads behind a sequence's last token", "api/cache.py",
          " - max((local[-1] + 1) * size - tokens, 0)", "", f"{APART}::test_every_rank_holds_the_tokens_of_its_pages"),
]  # fmt: skip

PARTS, CUTS = "distributed/test_pieces.py::test_pieces_have_the_bits_of_the_whole", "distributed/test_pieces.py"
LONG = f"{CUTS}::test_long_pieces_begin_where_the_whole_ones_tiles_do"
MERGED = "training/test_ring_update.py"
PIECES = [
    package("a part's tiles begin where the part does", "ir/tiles.py",
          "ahead = extents.part.first_row % size", "ahead = 0 * extents.part.first_row", LONG),
    package("a part's kernel is chosen by its own length", "backends/cpu/decode.py",
          "q_len, kv_len = extents.chosen_by", "q_len, kv_len = extents.q_len, extents.kv_len", LONG),
    package("dropout of golden's parts counts from their own first key", "ir/problem.py",
          "slice(key, key + int(self.kv_len[b]))", "slice(0, int(self.kv_len[b]))",
          f"{CUTS}::test_golden_knows_parts"),
    package("a pair whose first rows see nothing is left out", "distributed/chunk_pairs.py",
          "np.minimum(e.q_len, e.kv_len - e.lo) - 1", "np.minimum(e.q_len, e.kv_len) - 1", PARTS),
    package("a mean weighs beside a row with keys", "ir/merge.py",
          "more.out.masked_fill((theirs == 0)[..., None], 0.0)", "more.out", f"{MERGED}::test_what_is_merged"),
    package("packed statistics of a ring are always token by token", "npu/merging.py",
          'input_softmax_layout != "TND"', 'input_softmax_layout == "BSH"',
          f"{MERGED}::test_two_steps_are_the_whole"),
]  # fmt: skip
