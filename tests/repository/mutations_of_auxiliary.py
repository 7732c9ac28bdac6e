"""The mutations of norms, rotary positions, caches and shapes around attention; part of mutations.py's."""

from __future__ import annotations

from mutant import package

AUXILIARY = [
    package("a norm divides by a sum", "npu/auxiliary/norms.py",
          "(x32 * x32).mean(", "(x32 * x32).sum(",
          "npu/test_auxiliary.py::test_a_function_is_its_formula"),
    package("a norm's gradient leaves out what flows through the mean", "npu/auxiliary/norms.py",
          "(weighed - xhat * (weighed * xhat).mean(axes, keepdim=True))", "weighed",
          "npu/test_auxiliary.py::test_backward_functions_are_autograd_s"),
    package("neighbours turn the other way", "npu/auxiliary/rotary.py",
          "torch.stack((-x[..., 1::2], x[..., ::2]), -1)", "torch.stack((x[..., 1::2], -x[..., ::2]), -1)",
          "npu/test_auxiliary.py::test_a_function_is_its_formula"),
    package("a matrix of a turn stands on the other side", "npu/auxiliary/rotary.py",
          "input32 @ rotate.float()", "input32 @ rotate.float().T",
          "npu/test_auxiliary.py::test_a_matrix_says_how_pairs_turn"),
    package("the first of rows with one place stays", "npu/auxiliary/caches.py",
          "torch.searchsorted(ordered, ordered, right=True) - 1", "torch.searchsorted(ordered, ordered)",
          "npu/test_auxiliary.py::test_of_equal_places_the_last_row_stays"),
    package("rows without a place are stored in the first", "npu/auxiliary/caches.py",
          "place = slot_indices.where(there, slot_indices[top]).clamp(min=0)", "place = slot_indices.clamp(min=0)",
          "npu/test_auxiliary.py::test_rows_without_a_place_are_stored_nowhere"),
    package("rows that do not stay have a gradient", "npu/auxiliary/caches.py",
          "torch.where(stays, rows, rows.detach()[last])", "rows[last]",
          "npu/test_auxiliary.py::test_the_row_that_stays_alone_has_a_gradient"),
    package("a mode says nothing", "ops/auxiliary/caches.py",
          'return mode == "PA_NZ" and chips_width', "return chips_width",
          "npu/test_auxiliary.py::test_a_mode_says_how_a_cache_lies_whose_shape_allows_both"),
    package("a permutation goes the other way back", "npu/auxiliary/shapes.py",
          "back = sorted(range(len(order)), key=order.__getitem__)", "back = order",
          "npu/test_auxiliary.py::test_shapes_go_there_and_back"),
    package("autocast rounds what an auxiliary operator multiplies", "npu/auxiliary/call.py",
          "return torch.autocast(kind, enabled=False)", "return nullcontext()",
          "npu/test_auxiliary_devices.py::test_autocast_changes_nothing"),
    package("an operator hands back what came", "npu/operators.py",
          "run = _apart(interface) if packet in _HANDS_BACK else run", "run = run",
          "npu/test_torch_operators.py::test_an_operator_returns_no_argument"),
]  # fmt: skip
