"""The mutations of the indexer on GPUs and of its loss; part of mutations.py's."""

from mutant import package

CHOICE, LOSS = "kernels/test_indexer_kernels.py", "kernels/test_loss.py"
TARGET, PACKAGE = "sparse/test_target_loss.py", "npu/test_target_losses.py"
HIDDEN = "kernels/test_lists_not_finite.py::test_what_a_weight_of_zero_hides_stays_hidden"
INDEXER = [
    package("Triton: a score that is no number is chosen last", "backends/triton/indexer/choice.py",
          "tl.where(bits < 0, bits ^ LARGEST, bits), LARGEST)", "tl.where(bits < 0, bits ^ LARGEST, bits), NO_RANK)",
          f"{CHOICE}::test_a_nan_comes_first_and_a_key_of_minus_infinity_is_not_seen"),
    package("Triton: among equals one key too many stays", "backends/triton/indexer/choice.py",
          "(tl.cumsum(equal, 0) <= equals)", "(tl.cumsum(equal, 0) <= equals + 1)",
          f"{CHOICE}::test_the_order_is_exact"),
    package("Triton: a key that stands for several tokens is one of one token", "backends/triton/indexer/choice.py",
          "band_of(row, kv_len, lo, hi, prefix, RATIO)", "band_of(row, kv_len, lo, hi, prefix)",
          f"{CHOICE}::test_the_order_is_exact"),
    package("Triton: gradients read a list behind its end", "backends/triton/selected/selection.py",
          "tl.min(tl.where(entry < 0, n, SELECT), 0)", "SELECT", f"{LOSS}::test_cases"),
    package("Triton: the warm-up's window is one key short", "backends/triton/indexer/dense_kl_loss.py",
          "(key[None, :] >= first[:, None])", "(key[None, :] > first[:, None])", f"{LOSS}::test_cases"),
    package("Triton: a lane without a head makes an infinite key NaN", "backends/triton/indexer/selected_loss.py",
          "if PADDED:", "if not PADDED:", f"{LOSS}::test_an_infinite_key_whose_products_are_all_negative_scores_zero"),
    package("Triton: a key that is NaN is multiplied by zero", "backends/triton/indexer/loss_parts.py",
          "tl.where(bad[:, None] > 0, tl.zeros_like(x), x)", "x",
          f"{LOSS}::test_a_row_that_is_not_finite_reaches_exactly_goldens_rows"),
    package("Triton: nobody notes a query of the indexer that is not finite", "backends/triton/indexer/gradient.py",
          "mask=strange_three(query, D1, D2) > 0)", "mask=head0 < 0)", HIDDEN),
    package("Triton: what is not above 0 counts when it is recomputed", "backends/triton/indexer/gradient.py",
          "live = chosen & (common.products(query, listed, W1, W2) > 0.0)", "live = chosen", HIDDEN),
    package("Triton: an entry that does not count has its gradient", "backends/triton/indexer/gradient.py",
          "g = tl.where(chosen, g, 0.0)", "g = g * 1.0",
          "kernels/test_lists_not_finite.py::test_entries_that_do_not_count_weigh_nothing_whatever_their_gradient_is"),
    package("Triton: differences of float16 have no room", "backends/triton/indexer/loss_parts.py",
          "tl.constexpr(256.0)", "tl.constexpr(4096.0)",
          f"{LOSS}::test_float16_holds_differences_of_statistics_of_fewer_keys"),
    package("Golden: a given target counts as one that sums to 1", "backends/golden/indexer_loss.py",
          "mass = 1 if problem.unit_target else", "mass = 1 if problem.has_target else",
          f"{TARGET}::test_golden_is_the_formula"),
    package("Lists of shorter packed sequences are checked at other rows", "ops/sparse/checks.py",
          "q_len if q_start is None else q_start", "q_len",
          "contract/test_clauses.py::test_the_clause_holds"),
    package("A log-sum-exp is a sum", "ops/indexer_loss/lowered_call.py",
          "max_ + sum_.log()", "max_ + sum_", f"{PACKAGE}::test_dense_pair_is_the_formula"),
    package("A target of zeros is divided by nothing", "npu/surface/cann_functions.py",
          "(y.sum(-1, keepdim=True) + eps)", "y.sum(-1, keepdim=True)", f"{PACKAGE}::test_the_scalar_loss"),
]  # fmt: skip
