"""The mutations of mutants.py: one small change of one source each, and the tests that must notice it.

A test is named by file and function: a file that is moved, a function that is renamed, and a source that no longer has
the text to change fail tests/house/test_mutants.py at once.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """`old`, found exactly once in `file`, becomes `new`; every one of `tests` must then fail.

    Args:
        name: a line of what breaks, as the table in docs/testing.md says it.
        file: below the root.
        tests: "tests/test_x.py::test_y"; of a kernel's file "tests/kernels/..."; of csrc "make test-core".
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def house(name: str, file: str, old: str, new: str, *tests: str) -> Mutant:
    """A mutation of the package."""
    return Mutant(name, f"src/fusion_attention/{file}", old, new, tuple(f"tests/{test}" for test in tests))


def core(name: str, file: str, old: str, new: str) -> Mutant:
    """A mutation of the native core, which its own test without Python judges."""
    return Mutant(name, f"csrc/{file}", old, new, ("make test-core",))


FORMULAS = "training/test_training.py::test_golden_and_the_lowering_against_the_formulas"
GOLDEN = "training/test_golden.py::test_against_autograd"
TILES = "training/test_blocked_tiles.py::test_golden_against_the_formulas"
MODES = ("training/test_modes.py::test_the_band_of_a_mode", FORMULAS)
DECODE = "inference/test_decode.py::test_golden_agrees_with_dense_formulas"
SELECTION = "sparse/test_sparse.py::test_golden_is_the_formula"
LOSS = "sparse/test_indexer_loss.py::test_golden_is_the_formula"

SPECIFICATION = "backends/golden/attention.py"
ATTENTION = [
    house("forward without a part of its scale", SPECIFICATION,
          "scores = problem.scale * scores", "scores = problem.scale * scores * 1.0001", GOLDEN, FORMULAS),
    house("query heads meet the wrong key head", SPECIFICATION,
          "// problem.group", "% problem.heads_kv", GOLDEN, FORMULAS),
    house("rope left out of the scores", SPECIFICATION,
          "scores = scores + q_rope @ k_rope.mT", "scores = scores + 0 * (q_rope @ k_rope.mT)", GOLDEN, FORMULAS),
    house("bits of a blocked tile in the other order", "waist/mask.py",
          "(bits[..., None] >> place & 1)", "(bits[..., None] >> (7 - place) & 1)", GOLDEN, TILES),
    house("tiles across and tiles down in the other order", "waist/mask.py",
          "whole[known].transpose(2, 3)", "whole[known].transpose(1, 2).transpose(2, 3)", GOLDEN, TILES),
    house("a tile without bits passes", "ops/training/checks.py",
          "most < count", "most <= count", "contract/test_contract.py::test_every_broken_rule_is_reported_alone"),
    house("sink left out of the sum", SPECIFICATION,
          ".sum(-1, keepdim=True) + (sink - row_max).exp()", ".sum(-1, keepdim=True)", GOLDEN, FORMULAS),
    house("dropout without its divisor", SPECIFICATION,
          "return keep.to(device), 1.0 / problem.keep_prob", "return keep.to(device), 1.0", GOLDEN, FORMULAS),
    house("bias scaled when it is not", SPECIFICATION,
          "(problem.scale * added if problem.bias_scaled else added)", "problem.scale * added", GOLDEN, FORMULAS),
    house("empty rows: a mean counts one key too few", SPECIFICATION,
          "takes_mean * kv_len)", "takes_mean * (kv_len - 1))", FORMULAS),
    house("dq forgets D", SPECIFICATION,
          "(dprobabilities - delta)", "dprobabilities", GOLDEN, FORMULAS),
    house("dk without its scale", SPECIFICATION,
          "gradient = weighted_sum(weights.mT, softmax.mT, q)", "gradient = weighted_sum(dscores.mT, softmax.mT, q)",
          GOLDEN, FORMULAS),
    house("dv without dropout's divisor", SPECIFICATION,
          "dv = weighted_sum(probabilities.mT * s.keep_factor,", "dv = weighted_sum(probabilities.mT,",
          GOLDEN, FORMULAS),
    house("dsink of the other sign", SPECIFICATION,
          "dsink -= (delta * at_sink)", "dsink += (delta * at_sink)", GOLDEN, FORMULAS),
    house("a cap that bends no gradient", SPECIFICATION,
          "slope = problem.softcap * capped, 1 - capped * capped", "slope = problem.softcap * capped, 1.0", GOLDEN),
    house("a cap in other units than the scores", SPECIFICATION,
          "slope = problem.softcap * capped,", "slope = capped,", GOLDEN),
    house("dbias without the bias's scale", SPECIFICATION,
          "gradient = problem.scale * dscores if problem.bias_scaled else dscores", "gradient = dscores", FORMULAS),
    house("dbias of shared heads is one head's", "waist/bias.py",
          "gradient = gradient.sum(axes, keepdim=True)", "gradient = gradient.amax(axes, keepdim=True)",
          "training/test_waist.py::test_matrix_and_its_gradient_by_tiles", FORMULAS),
    house("slopes measured the other way", "waist/bias.py",
          "distance = (key - row + shift).abs()", "distance = (row - key + shift).abs()",
          "training/test_waist.py::test_slopes_by_hand", FORMULAS),
]  # fmt: skip
BANDS = [
    house("a row sees a key too many", "waist/problem.py",
          "end = np.minimum(np.maximum(row + self.hi[b], self.prefix[b])",
          "end = np.minimum(np.maximum(row + self.hi[b] + 1, self.prefix[b])", FORMULAS),
    house("a tile's edge is taken as seen by all rows", "waist/tiles.py",
          "full_end = np.clip(np.maximum(row0 + hi, prefix), 0, kv_len)",
          "full_end = np.clip(np.maximum(row0 + hi + 1, prefix), 0, kv_len)",
          "training/test_waist.py::test_tiles_cover_what_is_seen"),
    house("mode 2 aligned like mode 3", "ops/shared/sparse_modes.py",
          'return Band.causal("start")', 'return Band.causal("end")', *MODES),
    house("mode 3 aligned like mode 2", "ops/shared/sparse_modes.py",
          'return Band.causal("end")', 'return Band.causal("start")', *MODES),
    house("mode 4 aligned like mode 0", "ops/shared/sparse_modes.py",
          'return Band.window(pre, next_, "end")', 'return Band.window(pre, next_, "start")', *MODES),
    house("mode 7 shifts the first sequence", "ops/shared/sparse_modes.py",
          "cut = rows[-1] if mode == 7 else rows[0]", "cut = rows[0]", *MODES),
    house("mode 8 shifts the last sequence", "ops/shared/sparse_modes.py",
          "cut = rows[-1] if mode == 7 else rows[0]", "cut = rows[-1]", *MODES),
    house("a window one key short", "waist/mask.py",
          "return cls(-tokens(left),", "return cls(1 - tokens(left),", "training/test_waist.py::test_bands_by_hand"),
    house("a prefix one key short", "waist/mask.py",
          "prefix[:] = np.asarray(self.prefix, np.int64)", "prefix[:] = np.asarray(self.prefix, np.int64) - 1", *MODES),
]  # fmt: skip
DROPOUT = [
    house("Philox one round short", "waist/dropout.py",
          "for _ in range(rounds):", "for _ in range(rounds - 1):",
          "training/test_waist.py::test_philox_known_answers"),
    house("packed bits from the other end", "waist/dropout.py",
          ">> (bit & 7)) & 1).bool()", ">> (7 - (bit & 7))) & 1).bool()",
          "training/test_waist.py::test_packed_bits_against_numpy"),
    house("both heads draw the same bits", "waist/dropout.py",
          "stream = torch.arange(first_stream, first_stream + heads)[:, None, None]",
          "stream = torch.full((heads, 1, 1), first_stream)", "training/test_waist.py::test_drawn_bits_by_definition"),
]  # fmt: skip
LOWERING = [
    house("pse added before the scale where it comes after", "ops/training/lower.py",
          'n["pse_type"] == 1,', 'n["pse_type"] == 0,', FORMULAS),
    house("slopes start at the wrong side", "ops/training/lower.py",
          "distance = kv_start - q_start", "distance = q_start - kv_start", FORMULAS),
    house("packed statistics in the other order", "ops/training/lower.py",
          '"token" if n["softmax_layout"] else "item"', '"item" if n["softmax_layout"] else "token"',
          "training/test_training.py::test_statistics_of_packed_rows_in_both_orders"),
    house("packed rows that a mask empties are zero", "ops/training/lower.py",
          "(not form.packed and band_empties_rows(extents))", "band_empties_rows(extents)", FORMULAS),
    house("seven of eight lanes", "ops/training/statistics.py",
          "torch.ones(LANES, device=device, dtype=dtype)",
          "(torch.arange(LANES, device=device) < LANES - 1).to(dtype)", FORMULAS),
    house("a head's stride taken as its width", "ops/shared/layouts.py",
          "stride_head = tensor.stride(head) if head is not None else dim", "stride_head = dim", FORMULAS),
    house("rows of no sequence left as they lie", "ops/training/call.py",
          "if not call.covers(side):\n            for tensor in tensors:\n                tensor.zero_()",
          "if not call.covers(side):\n            pass",
          "training/test_training.py::test_rows_beyond_the_last_end_are_zero"),
    house("dbias not cleared before it is added to", "ops/training/call.py",
          "    if summed is not None:\n        summed.zero_()\n", "    if summed is not None:\n        pass\n",
          FORMULAS),
    house("means of the CPU forget dropout's divisor", "backends/cpu/means.py",
          "mean / (kv_len * problem.keep_prob)", "mean / kv_len", "training/test_training.py::test_back_end"),
]  # fmt: skip
DECODING = [
    house("the last page is read to its end", "ops/inference/lower.py",
          'return extents_of(q_len, n["used"], band)',
          'size = n["block_size"] if n["block_table"] is not None else 1\n'
          '    return extents_of(q_len, -(-n["used"] // size) * size, band)', DECODE),
    house("a decoding step without its window", "ops/inference/own.py",
          'band = (n["band"] or Band.causal()).resolve', "band = Band.causal().resolve",
          "inference/test_decode.py::test_windows_sinks_and_several_tokens_are_those_of_attention"),
    house("offset after scale", SPECIFICATION,
          "    if dequant.offset is not None:\n"
          "        values = values + dequant.offset.sequence(b, problem.heads_kv, length)\n"
          "    return values * dequant.scale.sequence(b, problem.heads_kv, length)",
          "    values = values * dequant.scale.sequence(b, problem.heads_kv, length)\n"
          "    if dequant.offset is not None:\n"
          "        values = values + dequant.offset.sequence(b, problem.heads_kv, length)\n"
          "    return values", DECODE),
    house("nibbles in the other order", SPECIFICATION,
          "(packed & 15, packed >> 4)", "(packed >> 4, packed & 15)",
          "inference/test_decode.py::test_what_is_quantised_comes_back_within_half_a_step"),
    house("padding to the right of a sequence forgotten", "ops/inference/lower.py",
          "first = capacity - max(int(padding[0]), 0) - kv_len", "first = capacity - kv_len", DECODE),
    house("a shared page written without a copy", "api/cache.py",
          "pool[pages[-1]] = pool[old]", "pass",
          "inference/test_decode.py::test_a_cache_shares_pages_until_somebody_writes"),
]  # fmt: skip
FUSED = "inference/test_fused.py::test_golden_agrees_with_dense_formulas"
CPU_FUSED = "inference/test_fused.py::test_the_cpu_back_end_agrees_with_golden"
CACHES = "inference/test_waist_of_caches.py::"
INFERENCE = [
    house("a row in pieces read as one piece", "waist/kv.py",
          "piece = self.piece or self.dim", "piece = self.dim", CACHES + "test_rows_in_pieces", FUSED),
    house("common keys behind a sequence's own", SPECIFICATION,
          "torch.cat((_stored(problem, common, 0, shared), values), dim=1)",
          "torch.cat((values, _stored(problem, common, 0, shared)), dim=1)", CACHES + "test_common_keys", FUSED),
    house("a tree mask begins at the first key", SPECIFICATION,
          "(operands.blocked.first_of(b), 0)", "(0, operands.blocked.first_of(b))",
          CACHES + "test_a_matrix_without_the_first_keys", FUSED),
    house("a row's scale left out", SPECIFICATION,
          "scores = scores * query(operands.row_scale)", "scores = scores * 1", CACHES + "test_scales_of_rows", FUSED),
    house("weights are not rounded", SPECIFICATION,
          "(operands.weight_scale.double() * weights).round()", "(operands.weight_scale.double() * weights)",
          CACHES + "test_rounded_weights", "inference/test_fused_examples.py::test_e8_int8_throughout", FUSED),
    house("int8 weights against the maximum so far", "backends/cpu/full_int8.py",
          "weights = (self._scores(keys) - peak.masked_fill(empty, 0.0)).exp()",
          "weights = (self._scores(keys) - self._scores(keys).amax(-1, keepdim=True).clamp(min=-99)).exp()", CPU_FUSED),
    house("a window beside a mask from the other corner", "ops/fused/lower.py",
          'Band.window(n["pre"], n["next"], "start")', 'Band.window(n["pre"], n["next"])', FUSED),
    house("scales of values are those of keys", "ops/fused/lower.py",
          'scale, offset = n["antiquant_scale"][side]', 'scale, offset = n["antiquant_scale"][0]', FUSED),
    house("rows of queries padded on the left counted from the first slot", "ops/inference/call.py",
          "view.address = view.address + self.q_first * view.stride_row", "pass", FUSED),
    house("a row without keys has a logarithm of -inf", "ops/inference/call.py",
          ".masked_fill_(sum_ == 0, math.inf)", "", FUSED),
    house("a sink is a key", "ops/inference/call.py",
          "rows.masked_fill_(end <= first, math.inf)", "pass", FUSED),
    house("an int8 query is copied when a call is lowered", "ops/fused/lower.py",
          'settled.cache, n["query"]),', 'settled.cache, n["query"].to(problem.torch_dtype)),',
          "inference/test_fused.py::test_tensors_are_read_when_a_call_runs"),
]  # fmt: skip
SPARSE = [
    house("scores of the indexer without ReLU", "backends/golden/indexer.py",
          "scores = (weights * dots.clamp(min=0)).sum(0)", "scores = (weights * dots).sum(0)",
          "sparse/test_indexer.py::test_the_order_is_exact"),
    house("ties by descending index", "backends/golden/indexer.py",
          "scores, order = scores.sort(dim=-1, descending=True, stable=True)",
          "scores, order = scores.flip(-1).sort(dim=-1, descending=True, stable=True)\n"
          "        order = kv_len - 1 - order",
          "sparse/test_indexer.py::test_the_order_is_exact"),
    house("a list read beyond its first -1", "backends/golden/selection.py",
          "(entries >= 0).cumprod(-1).bool()", "(entries >= 0)", SELECTION),
    house("a block that the diagonal cuts is not read", "backends/golden/selection.py",
          "-(-np.maximum(end, 0) // block)", "np.maximum(end, 0) // block", SELECTION),
    house("a block listed twice counts once", SPECIFICATION,
          "times = added_up(read.double(), entries, read, -(-kv_len // problem.select_block))",
          "times = added_up(read.double(), entries, read, -(-kv_len // problem.select_block)).clamp(max=1)", SELECTION),
    house("the loss clamps too early", "backends/golden/indexer_loss.py",
          "_LEAST = 1e-8", "_LEAST = 1e-3", LOSS),
    house("the loss adds heads up without a mean", "backends/golden/indexer_loss.py",
          "return probabilities.sum(0) / heads", "return probabilities.sum(0)", LOSS),
    house("the indexer's dweights without ReLU", "backends/golden/indexer_loss.py",
          "dweights = (dscores * s.dots.clamp(min=0))", "dweights = (dscores * s.dots)", LOSS),
]  # fmt: skip
FACES = [
    house("phase 2 does nothing", "aclnn.py",
          "        job.run()\n", "",
          "faces/test_aclnn.py::test_forward_gives_the_bytes_of_npu",
          "faces/test_aclnn.py::test_gradients_give_the_bytes_of_autograd",
          "faces/test_aclnn.py::test_golden_behind_the_same_calls",
          "contract/test_page_programs.py::test_its_own_data_give_what_arithmetic_says"),
    house("one gradient goes to its neighbour", "torch_ops/dense_eager.py",
          "inputs = (dq, dk, dv,", "inputs = (dq, dv, dk,", "faces/test_faces.py::test_gradcheck_of_the_pythonic_face"),
    house("a rule accepts any number of heads", "ops/training/rules.py",
          '"N2 > 0 and N1 % N2 == 0", "key"', '"N2 > 0 and N1 % N2 < N1", "key"',
          "contract/test_contract.py::test_every_broken_rule_is_reported_alone"),
    house("strict ignored", "contract/binding.py",
          'if strict else ("meaning", "note", "doubt")', 'if False else ("meaning", "note", "doubt")',
          "contract/test_settings.py::test_strict_refuses_what_the_chip_would"),
    house("content is never asked", "contract/binding.py",
          "if check_content and reads and not", "if False and not",
          "contract/test_settings.py::test_content_is_asked_on_request"),
    house("content is not asked again", "contract/binding.py",
          "            _ask_again(op, known, bound)", "            pass",
          "contract/test_binding.py::test_content_is_asked_again",
          "faces/test_again.py::test_a_table_that_changes_in_place"),
    house("the last lengths serve for others", "contract/binding.py",
          "if known is None or settled is None or settled.arrays != content:", "if known is None or settled is None:",
          "faces/test_again.py::test_lengths_that_change_in_place"),
    house("a known forward forgets gradients", "torch_ops/dense_eager.py",
          "if laid is None or (torch.is_grad_enabled() and _any_requires_grad(q, k, v)):",
          "if laid is None:", "faces/test_again.py::test_gradients_after_calls_without"),
    house("a laid plan serves every back end", "torch_ops/eager.py",
          "bound.memo.laid.get(backend) if op.again", "next(iter(bound.memo.laid.values()), None) if op.again",
          "faces/test_again.py::test_other_back_ends_and_threads_after_the_first"),
    house("storages are not asked", "contract/binding.py",
          "if memory and not held:", "if False:",
          "contract/test_storage.py::test_every_tensor_of_every_record"),
    house("lengths kept as the caller's own array", "contract/arguments.py",
          "copy=array is value or isinstance(value, torch.Tensor))", "copy=False)",
          "contract/test_binding.py::test_lengths_are_copied"),
    house("the largest memory waits as others do", "memory.py",
          "_tell(block, _MADV_FREE)", "pass",
          "backends/test_memory.py::test_the_largest_wait_as_memory_that_the_system_may_take"),
    house("memory lent twice", "memory.py",
          "if block.nbytes == size and _idle.pop(place, None) is not None:",
          "if block.nbytes == size and place in _idle:",
          "backends/test_memory.py::test_memory_that_somebody_holds_is_nobody_elses"),
    house("captures begin at 0000 again", "captures/capture.py",
          "default=-1) + 1", "default=-1) * 0", "faces/test_captures_beside.py::test_numbers_go_on"),
    house("uninstall leaves an attribute", "patches.py",
          "        delattr(owner, name)", "        pass",
          "faces/test_install.py::test_uninstall_restores_everything"),
    house("a patch calls a removed layer", "patches.py",
          "            if layer.on:\n", "            if True:\n",
          "faces/test_patches.py::test_layers_end_in_any_order_beside_a_foreign_one"),
    house("SDPA's causal mask from the other corner", "integrations/sdpa.py",
          'Band.causal("start")', "Band.causal()", "integrations/test_sdpa.py::test_rows"),
    house("flash-attn's causal window sees the future", "integrations/flash_attn/words.py",
          "        right = 0\n", "        pass\n", "integrations/test_flash_attn.py::test_padded"),
    house("a cache rotates all queries by one angle", "integrations/flash_attn/rotary.py",
          "if each else", "if not each else",
          "integrations/test_flash_attn_caches.py::test_rotary_of_a_cache"),
]  # fmt: skip

FUSED_FACES = "inference/test_fused_faces.py"
FLEX_MASKS = "integrations/test_flex_masks.py"
FLEX = [
    house("flex: a band of most rows is taken for one of all", "integrations/flex_attention/masks.py",
          "            if _is(band, edges, q_len, kv_len):", "            if band:",
          f"{FLEX_MASKS}::test_one_pair_more_or_less_is_no_band"),
    house("flex: rows with gaps count as intervals", "integrations/flex_attention/masks.py",
          "(empty | (end - first == found.count)).all()", "(end >= first).all()",
          f"{FLEX_MASKS}::test_block_masks", f"{FLEX_MASKS}::test_functions"),
    house("flex: one item's mask serves all", "integrations/flex_attention/masks.py",
          "if sizes[axis] < size and mods.depends(mod, axis, shape.device):", "if False:",
          f"{FLEX_MASKS}::test_a_mask_of_one_item_whose_function_asks_for_the_item"),
    house("flex: the function is asked in blocks that are full", "integrations/flex_attention/masks.py",
          "((where == 2) | (where == 1) & said", "((where == 2) & said | (where == 1) & said",
          f"{FLEX_MASKS}::test_blocks_say_what_the_function_does_not"),
    house("flex: a mask is remembered whatever it captured", "integrations/flex_attention/mods.py",
          "known is not None and known[0] == state", "known is not None",
          "integrations/test_flex_attention.py::test_a_mask_is_read_once_and_again_when_what_it_captured_changes",
          "integrations/test_flex_attention.py::test_a_score_mod_is_read_again_when_a_number_changes"),
    house("flex: what was recognised is not compared", "integrations/flex_attention/scores.py",
          "    if not bool(same.all()):", "    if False:",
          "integrations/test_flex_attention.py::test_what_looks_recognised_and_is_not_is_refused"),
    house("flex: slopes count ahead of the row too", "integrations/flex_attention/scores.py",
          "hidden | (distance < 0) if past else hidden", "hidden | (distance < 0)",
          "integrations/test_flex_attention.py::test_score_mods"),
]  # fmt: skip

CALLERS = [
    house("fused inference: one-token queries keep their mode", "ops/fused/geometry.py",
          '"mode": 0 if one_token else mode,', '"mode": mode,',
          "inference/test_fused.py::test_golden_agrees_with_dense_formulas"),
    house("fused inference: columns count a prefix twice", "ops/fused/geometry.py",
          '"columns": common + int(', '"columns": 2 * common + int(',
          "inference/test_fused_callers.py::test_the_call_runs_as_written"),
    house("fused inference: a trace loses a gradient without a word", "torch_ops/traced.py",
          "        _untrained(tensors, *rest)\n", "        pass\n", f"{FUSED_FACES}::test_a_gradient_is_never_dropped"),
    house("fused inference: .out writes no logarithm", "npu/fused_out.py",
          'lse.copy_(found["softmax_lse"])', "lse.add_(0)",
          f"{FUSED_FACES}::test_out_may_be_any_view_and_even_the_query"),
    house("fused inference: slots before heads without a hint", "ops/fused/checks.py",
          "if t.dim() == 4 and table is not None and", "if t.dim() == 5 and table is not None and",
          f"{FUSED_FACES}::test_the_text_names_the_cause"),
]  # fmt: skip

KERNELS = "kernels/test_cases.py::test_several_tiles"
CACHES = "kernels/test_decode.py::test_caches"
TRITON = [
    house("Triton: sums do not fade", "backends/triton/forward.py",
          "l = l * fade + tl.sum(p, 1)", "l = l + tl.sum(p, 1)", KERNELS),
    house("Triton: an edge tile is not masked", "backends/triton/forward.py",
          '            s = tl.where(seen, s, -float("inf"))', "            s = tl.where(seen | True, s, 0.0)", KERNELS),
    house("Triton: dk without its scale", "backends/triton/backward.py",
          "(dk0, dk1, dk2), scale,", "(dk0, dk1, dk2), 1.0,", KERNELS),
    house("Triton: a cap bends no gradient of keys", "backends/triton/backward.py",
          "ds = tl.where(seen, ds * capped(x, scale, CAP)[1], 0.0)\n        dk0", "pass\n        dk0", KERNELS),
    house("Triton: shares of a decode joined without fading", "backends/triton/decode.py",
          "l = l * tl.exp2((m - base) * exponent) + tl.load(here + 1)", "l = l + tl.load(here + 1)", KERNELS),
    house("Triton: every page but the first is clamped away", "backends/triton/pages.py",
          "return tl.minimum(tl.maximum(page, 0), last).to(tl.int64)",
          "return tl.minimum(tl.maximum(page, 0), last - 1).to(tl.int64)", CACHES),
]  # fmt: skip
NATIVE = [
    core("core: forward without a part of its scale", "dense/block.h",
         "natural(bias_pass ? 1.0f : static_cast<float>(p.scale))",
         "natural(bias_pass ? 1.0f : static_cast<float>(p.scale * 1.01))"),
    core("core: a key too many at an edge", "dense/forward.h",
         "low_bits(end - c) & ~low_bits(begin - c)", "low_bits(end + 1 - c) & ~low_bits(begin - c)"),
    core("core: pieces of a band are carried from where they are not", "dense/pack.h",
         "const std::int64_t gone = to.key_begin - from.key_begin,", "const std::int64_t gone = 0,"),
    core("core: values of a band are carried a panel short", "dense/pack.h",
         "keys / Format::depth * width * sizeof(Word)", "(keys - panel) / Format::depth * width * sizeof(Word)"),
    core("core: a piece of a band believes to have more than was carried", "plan/forward.cpp",
         "return done - gone;", "return done;"),
    core("core: few keys: a key too many at an edge", "dense/short.h",
         "low_bits(end) & ~low_bits(begin)", "low_bits(end + 1) & ~low_bits(begin)"),
    core("core: few keys: half of a panel is forgotten", "dense/short.h",
         "if (b.some_end <= half * lanes) done", "if (b.some_end <= half * lanes + 1) done"),
    core("core: few keys: values begin at another key than weights", "dense/short.h",
         "w.s.weights + begin - first, pitch", "w.s.weights + begin - 2 * first, pitch"),
    core("core: a blocked matrix read one column late", "simd/masks.h",
         "const std::uint8_t *from = bytes + first + at;", "const std::uint8_t *from = bytes + first + at + 1;"),
    core("core: bits of a blocked tile read one row on", "simd/blocked_tiles.h",
         "return bits + row % mask_side * mask_row;", "return bits + (row + 1) % mask_side * mask_row;"),
    core("core: a run of tiles ends a key too early", "simd/blocked_tiles.h",
         "run.end = first + (some[1] ? 128 -", "run.end = first + (some[1] ? 127 -"),
    core("core: the rows of a block's second tile are not asked", "simd/blocked_tiles.h",
         "row < end; row = next) {", "row < end; row = end) {"),
    core("core: a number without bits blocks nothing", "simd/blocked_tiles.h",
         "return {nullptr, number != none_blocked};", "return {nullptr, number == -1};"),
    core("core: a tile that is cut is not masked", "dense/block.h",
         "part.hidden |= run.cut;", "part.hidden |= false;"),
    core("core: dS of what a tile blocks is kept", "dense/gradient.h",
         "some_end = run.end, hidden |= run.cut;", "some_end = run.end;"),
    core("core: dS forgets D", "dense/gradient.h",
         "Floats dscore = weight * (dprob - r.delta[e]);", "Floats dscore = weight * dprob;"),
    core("core: a cap bends no gradient", "dense/gradient.h",
         "dproduct *= load<Floats>(k.slopes + (i + e) * keys + c + u * lanes);", "dproduct *= all(1.0f);"),
    core("core: tanh forgets its sign", "simd/softcap.h",
         "(size < all(even) ? small : large) | sign)", "(size < all(even) ? small : large))"),
    core("core: a decode forgets its cap", "decode/queries.h",
         "p.has_row_scale || p.softcap > 0.0 ||", "p.has_row_scale ||"),
    core("core: dq of one block of rows is not cleared", "dense/gradient.h",
         "if (row_tile.fresh) clear_dq(w, b);", ";"),
    core("core: shares of a decode joined without fading", "decode/finish.h",
         "const Floats added = load<Floats>(from + d) * all(share);", "const Floats added = load<Floats>(from + d);"),
    core("core: dropout draws with another key", "simd/masks.h",
         "k1 += weyl[1];", "k1 += weyl[0];"),
    core("core: an odd nibble keeps a bit of its neighbour", "decode/rows.h",
         "to[d + 1] = both >> 4;", "to[d + 1] = both >> 3;"),
    core("core: a row in pieces read one element late", "decode/rows.h",
         "std::memcpy(to + at, row, least(size, bytes - at));",
         "std::memcpy(to + at, row + c.item, least(size, bytes - at));"),
    core("core: a prompt's pieces of rows taken in turns", "dense/stored.h",
         "const std::int64_t place = at / c.piece * c.stride_piece + at % c.piece;", "const std::int64_t place = at;"),
    core("core: a mask that begins at a later key blocks earlier ones", "simd/masks.h",
         "skip = most<std::int64_t>(clear - at, 0);", "skip = 0;"),
    core("core: what common keys give goes to the first row of a block", "plan/decode.cpp",
         "std::memcpy(results + (from - block->row) * stride,", "std::memcpy(results,"),
    core("core: chunks of selected keys are joined without fading", "sparse/attend.h",
         "store(w.s.fade + h, from == to ? all(1.0f) : exp2(apart));", "store(w.s.fade + h, all(1.0f));"),
    core("core: dS of selected keys forgets D", "sparse/gradient.h",
         "(load<Floats>(dprobs + key * pitch + h) - load<Floats>(delta + h));",
         "load<Floats>(dprobs + key * pitch + h);"),
    core("core: scores of the indexer without ReLU", "sparse/indexer.h",
         "total += larger(Floats{}, tile.sum[i][j]) * all(weights[i]);", "total += tile.sum[i][j] * all(weights[i]);"),
    core("core: the loss's gradient forgets its target", "sparse/loss.h",
         "exp2<6>(score * log2_e) * y.share - p, count - i", "exp2<6>(score * log2_e) * y.share, count - i"),
    core("core: a thread that came late is waited for again", "plan/team.cpp",
         "!experience.recommends_team(alone, begun)", "false"),
    core("core: what the others computed is not counted", "plan/team.cpp",
         "run.saved.fetch_add(saved.count(),", "run.saved.fetch_add(0,"),
    core("core: one loss of a team outweighs many gains", "plan/experience.h",
         "saved - waited, most_credit)", "saved - waited, first_credit)"),
]  # fmt: skip

DOOR, MADE = "integrations/transformers.py", "integrations/test_transformers_door.py"
TRANSFORMERS = [
    house("a window of one key more", DOOR,
          "window is None else 1 - window", "window is None else -window", f"{MADE}::test_a_prompt_in_parts"),
    house("padding on the left is seen", DOOR,
          'return _Padding("run", first, end)', 'return _Padding("left", first, end)',
          f"{MADE}::test_a_prompt_in_parts"),
    house("positions that start anew start nothing", DOOR,
          "!= position_ids[:, :-1] + 1", "> position_ids[:, :-1] + 1",
          f"{MADE}::test_packed_sequences_beside_a_fresh_cache_stay_apart"),
    house("packed tokens all see the one before", DOOR,
          "function(items, 0, rows, rows - 1)", "function(items, 0, rows, rows)",
          f"{MADE}::test_packed_sequences_compiled"),
    house("a mask is read once for ever", DOOR,
          "kept[name][0] != version", "not kept", f"{MADE}::test_a_mask_that_changes_in_place_is_read_again"),
    house("True hides a key", DOOR,
          '_kept(given, "blocked", torch.logical_not)', '_kept(given, "blocked", torch.clone)',
          f"{MADE}::test_masks_of_the_users_own"),
    house("a model that asks nobody is let in", DOOR,
          "if not code.asks:", "if code.asks is None:", f"{MADE}::test_a_model_that_asks_no_interface_is_refused"),
]  # fmt: skip

PAGED, KEPT = "integrations/transformers_cache.py", "integrations/test_transformers_cache.py"
PAGES = [
    house("padding takes pages", PAGED,
          "self.settle(there)\n", "self.settle()\n", f"{KEPT}::test_padding_takes_no_page_and_a_window_keeps_its_own"),
    house("a window lets go of a token too many", PAGED,
          "slide(sequence, self.sliding_window - 1)", "slide(sequence, self.sliding_window - 2)",
          f"{KEPT}::test_any_attention_gets_the_rows"),
    house("beams go on where they were", PAGED,
          "fork(self.sequences[i]) for i in order", "fork(self.sequences[i]) for i, _ in enumerate(order)",
          f"{KEPT}::test_ways_to_generate"),
    house("tokens that were taken back stay", PAGED,
          "self._pages.crop(sequence, count)", "pass", f"{KEPT}::test_tokens_that_are_taken_back"),
    house("a mask that hides more than padding is not read", PAGED,
          "if agrees and there is None", "if there is None",
          f"{KEPT}::test_a_mask_that_hides_more_than_before_is_obeyed"),
    house("a page that a window touches is let go", "api/cache.py",
          "gone = max(held - self._count(tokens), 0) // self.page_size",
          "gone = -(-max(held - self._count(tokens), 0) // self.page_size)",
          "inference/test_cache_pages.py::test_a_window_needs_the_pages_that_it_touches"),
]  # fmt: skip

PARTS, CUTS = "distributed/test_pieces.py::test_pieces_have_the_bits_of_the_whole", "distributed/test_pieces.py"
LONG = f"{CUTS}::test_long_pieces_begin_where_the_whole_ones_tiles_do"
MERGED = "training/test_ring_update.py"
PIECES = [
    house("a part's tiles begin where the part does", "waist/tiles.py",
          "ahead = first_row % size", "ahead = 0 * first_row", LONG),
    house("a part's kernel is chosen by its own length", "backends/cpu/decode.py",
          "q_len, kv_len = extents.chosen_by", "q_len, kv_len = extents.q_len, extents.kv_len", LONG),
    house("dropout of golden's parts counts from their own first key", "waist/problem.py",
          "slice(key, key + int(self.kv_len[b]))", "slice(0, int(self.kv_len[b]))",
          f"{CUTS}::test_golden_knows_parts"),
    house("a pair whose first rows see nothing is left out", "distributed/pieces.py",
          "np.minimum(e.q_len, e.kv_len - e.lo) - 1", "np.minimum(e.q_len, e.kv_len) - 1", PARTS),
    house("a mean weighs beside a row with keys", "waist/merge.py",
          "more.out.masked_fill((theirs == 0)[..., None], 0.0)", "more.out", f"{MERGED}::test_what_is_merged"),
    house("packed statistics of a ring are always token by token", "npu/merging.py",
          'input_softmax_layout != "TND"', 'input_softmax_layout == "BSH"',
          f"{MERGED}::test_two_steps_are_the_whole"),
]  # fmt: skip

MUTANTS = (
    *(*ATTENTION, *BANDS, *DROPOUT, *LOWERING, *DECODING, *INFERENCE, *SPARSE, *FACES, *CALLERS, *TRITON, *NATIVE),
    *(*TRANSFORMERS, *FLEX, *PAGES, *PIECES),
)
