"""The mutations of attention to lists; part of mutations.py's."""

from mutant import package

FORWARD, UPDATES = "kernels/test_sparse_forward.py", "kernels/test_sparse_updates.py"
SHARED_OUT = f"{FORWARD}::test_lists_of_few_tokens_are_shared_out"
SUMS = "kernels/test_key_sum.py::test_rows_are_added_in_their_order_for_any_number_of_chunks"
PREPARED = "torch_ops/test_prepared_calls.py"
LISTS = [
    package("compressed keys are read by the other keys' page table", "ir/places.py",
          'return "compressed_table" if name.endswith("_compressed") else "table"', 'return "table"',
          f"{PREPARED}::test_other_tensors_of_a_prepared_signature"),
    package("an entry of the longest sequence exists in every one", "ops/sparse/checks.py",
          "int(kv_len.min())", "int(kv_len.max())", f"{PREPARED}::test_lists_that_change_in_place"),
    package("a sequence without keys returns its sink as statistics", "ops/sparse/lowered_call.py",
          "int(extents.q_len[b])).fill_(True)", "int(extents.q_len[b])).fill_(False)",
          "sparse/test_sparse.py::test_golden_against_autograd"),
    package("Triton: an entry behind the last block wraps around", "backends/triton/selected/selection.py",
          "tl.minimum(entry, (end + (BLOCK - 1)) // BLOCK) * BLOCK", "entry * BLOCK",
          f"{FORWARD}::test_no_list_makes_a_row_read_outside"),
    package("Triton: a list goes on behind its end", "backends/triton/selected/selection.py",
          "tl.where(entry < 0, n, SELECT)", "tl.where(entry < -1, n, SELECT)",
          f"{FORWARD}::test_cases"),
    package("Triton: slots behind the end of a list weigh as zeros do", "backends/triton/selected/forward.py",
          "s = tl.where(there[None, :], s, -float(\"inf\"))", "s = tl.where(there[None, :], s, 0.0)",
          f"{FORWARD}::test_cases"),
    package("Triton: the page of the turn before, of a list", "backends/triton/selected/forward.py",
          "key, page = key_next, page_next", "key, page = key_next, page", f"{FORWARD}::test_cases"),
    package("Triton: what no float holds weighs nothing in a list", "backends/triton/selected/recompute.py",
          "p, recompute.outlasting(p), counted", "p, p, counted",
          f"{FORWARD}::test_infinite_values_outlast_weights_that_no_float_can_hold"),
    package("Triton: every share of a list is its first", "backends/triton/selected/forward.py",
          "begin = tl.program_id(1) * per", "begin = 0 * per", SHARED_OUT),
    package("Triton: a share of a list goes on to the list's end", "backends/triton/selected/forward.py",
          "tl.minimum(slots, begin + per)", "tl.minimum(slots, slots + per)", SHARED_OUT),
    package("Triton: a key's blocks have no sums of their own", "backends/triton/selected/key_sum.py",
          "row // per == before // per", "row >= before // per", SUMS),
    package("Triton: of a hot key's blocks the last counts", "backends/triton/selected/key_sum.py",
          "acc += tl.load(of_key", "acc = tl.load(of_key", SUMS),
    package("Triton: a graph of the warm-up loss keeps its rows' tiles",
          "backends/triton/indexer/launch_dense_kl_loss.py",
          'm.on(f"rows {t.target}", work.rows)', "layout_table.Copied.of(work.rows(e), device)",
          f"{UPDATES}::test_updated_plans_and_their_graphs_are_fresh_ones"),
    package("Triton: a window never lies across one tile more", "backends/triton/indexer/launch_dense_kl_loss.py",
          "t.end - t.begin + 2 * tile.BN - 2", "t.end - t.begin + tile.BN - 1",
          f"{UPDATES}::test_no_length_takes_more_turns_than_were_planned"),
]  # fmt: skip
