"""The mutations of how the Triton back end chooses, refuses and recomputes; part of mutations.py's."""

from __future__ import annotations

from mutant import package

REFUSALS, RUNS = "kernels/test_refusals.py", "backends/test_triton_runs.py"
GPUS = [
    package("Triton: a chip is served by rows that its memory does not hold", "backends/triton/common/shapes.py",
          "major >= least and available >= needed", "major >= least",
          f"{REFUSALS}::test_a_chip_is_served_by_the_rows_of_the_first_whose_memory_it_has"),
    package("Triton: a forward that reads two things keeps all rows", "backends/triton/common/shapes.py",
          'problem.dropout == "bits")) > 1', 'problem.dropout == "bits")) > 2',
          "backends/test_triton_ahead.py::test_a_forward_that_reads_two_things_for_every_score_takes_half_the_rows"),
    package("Triton: any version compiles the kernels", "backends/triton/__init__.py",
          "if TRITONS[0] <= tuple(map(int, result[:2])) <= TRITONS[1]:", "if result:",
          f"{REFUSALS}::test_a_triton_that_the_kernels_were_not_compiled_with_is_refused_by_name"),
    package("Triton: a forward is refused for its backward", "backends/triton/__init__.py",
          "TABLES.get(op_kind, ALL)", "ALL", f"{REFUSALS}::test_a_forward_is_not_refused_for_what_the_backward_takes"),
    package("Triton: strides say nothing of where rows start", "backends/triton/common/layout_table.py",
          "return max(1, (result & -result) // smallest)", "return _WIDE // smallest",
          f"{RUNS}::test_rows_are_read_in_the_widest_pieces_on_which_they_start"),
    package("Triton: an update asks the device that happens to be current", "backends/triton/common/layout_table.py",
          "            with on(table.tensor.device):\n                self._rewrite(make, table)",
          "            self._rewrite(make, table)",
          f"{RUNS}::test_tables_are_written_and_kernels_start_on_the_tensors_device"),
    package("Triton: a layout does not say where rows start", "backends/triton/common/layout_table.py",
          "results.append((start % _LOAD_BYTES, apart,", "results.append((0, apart,",
          f"{RUNS}::test_another_layout_has_another_table"),
    package("Triton: a layout does not say which page table", "backends/triton/common/layout_table.py",
          "view.dim, view.fragment, shares", "view.dim, view.fragment, True",
          f"{RUNS}::test_a_page_table_of_its_own_is_refused_after_runs_that_share_one"),
    package("Triton: what a layout needs is found every timee", "backends/triton/common/launching.py",
          "result = self.by_layout.get(layout)", "result = None",
          f"{RUNS}::test_another_run_on_a_layout_asks_nothing_and_launches_on_its_own_memory"),
    package("Triton: an infinity is formed anew", "backends/triton/dense/recompute.py",
          "INF: tl.constexpr = DEQUANT_V != 0", "INF: tl.constexpr = True",
          "kernels/test_diverged.py::test_an_infinite_value_costs_nothing"),
    package("Triton: a search that ends early decides all of a row", "backends/triton/dense/recompute.py",
          "tl.where(wrong(old, INF), acc * factor, old.to(tl.float32))", "acc * factor",
          "kernels/test_diverged.py::test_what_was_right_in_a_row_with_nan_keeps_its_bits"),
    package("Triton: a sum of NaN goes on", "backends/triton/dense/recompute.py",
          "            turn = tl.where(tl.maximum(more, of_dv) > 0, turn + 1, end)", "            turn += 1",
          "kernels/test_diverged.py::test_what_nan_costs_grows_with_the_rows_alone"),
]  # fmt: skip
