"""The mutations of what people look with: explorer, judge, command line; part of mutations.py's."""

from mutant import package

RULES_TEST = "explorer/test_rules.py::test_the_page_says_what_the_library_says"
SEEN_TEST = "explorer/test_calls.py::test_calls_see_what_is_drawn_and_are_refused_as_said"
EXPLORER = [
    package("explorer: Python's <= translated to < in JavaScript", "explorer/python_to_javascript.py",
            'ast.LtE: "py.[-le-]{+lt+}({}, {})"', RULES_TEST,
            "explorer/test_translate.py::test_both_languages_say_the_same"),
    package("explorer: Python's % translated to JavaScript's % with another sign", "explorer/runtime.js",
            "x[- - y * Math.floor(x / y)-]{+ % y+}", "explorer/test_translate.py::test_both_languages_say_the_same"),
    package("explorer: tree mask drawn over the first keys instead of the last",
            "explorer/facade.js", "if (own[j[- - start-]])", RULES_TEST),
    package("explorer: user-defined mask not drawn", "explorer/visible.py",
            'canonical.mask in ("triangle",[- "own"-])', SEEN_TEST),
    package("explorer: rules of one layout applied to the other layouts", "explorer/violations.py",
            'layout [-not -]in rule["only"]', SEEN_TEST),
    package("explorer: lengths written in place of cumulative sequence ends", "explorer/calls.py",
            "[-sum(lengths[: b + 1])-]{+lengths[b]+}", SEEN_TEST),
]  # fmt: skip

FILES, NAMED = "judging/test_files.py", "judging/test_named_files.py"
JUDGING = [
    package("verify: reference leaves the sink out of the softmax sum",
            "judging/formulas.py", "divided.sum(-1, keepdim=True)[- + tail-]",
            "judging/test_formulas.py::test_training"),
    package("verify: reference takes dk and dv from one query head of a group", "judging/outputs.py",
            "value.unflatten(0, (-1, problem.group))[-.sum(1)-]{+[:, 0]+}", "judging/test_formulas.py::test_training"),
    package("verify: error bound ignores the errors of tiles",
            "judging/chi_square_limits.py", 'yield b, _look("tile", tiles{+ * 0+},',
            "judging/test_error_bound.py::test_a_fault_is_seen_where_it_is"),
    package("verify: error bound ignores the errors of single elements", "judging/chi_square_limits.py",
            'yield b, _look("element", peaks{+ * 0+},',
            "judging/test_error_bound.py::test_a_fault_is_seen_where_it_is"),
    package("verify: error bound checks only the first chunk of rows", "judging/chi_square_limits.py",
            "        if not errors.numel(){+ or rows.start+}:\n",
            "judging/test_error_bound.py::test_pieces_are_the_whole"),
    package("verify: expected error leaves out the rounding of softmax weights",
            "judging/expected_error.py", "return [-once + -]2 * self.step(dtype)",
            "judging/test_error_bound.py::test_the_size_of_an_output_is_that_of_drawn_roundings"),
    package("verify: NaN and infinity count as zero error", "judging/chi_square_limits.py",
            "result.nan_to_num(nan=[-math.inf, posinf=math.inf-]{+0.0, posinf=0.0+})",
            "judging/test_error_bound.py::test_what_is_not_a_number"),
    package("verify: diagnosis of an upper-left causal mask tries the wrong diagonal", "judging/mistakes/masks.py",
            '([-(-d, "upper left")-]{+(2 * d, "upper left")+}, (d, "lower right"))',
            "judging/test_judge.py::test_the_diagonal_of_the_other_corner"),
    package("verify: pickle files loaded without --unsafe-pickle",
            "judging/loaders.py", "weights_only=[-not how.unsafe_pickle-]{+False+}", f"{FILES}::test_no_pickle_is_run"),
    package("verify: path outside the folder of a dump accepted", "judging/loaders.py",
            "if [-not path.resolve().is_relative_to(folder.resolve())-]{+folder is None+}:",
            f"{FILES}::test_paths_that_leave_the_folder"),
    package("verify: dk and dv of the last row block only, not summed over blocks", "judging/outputs.py",
            "total[name][:, keys] [-+=-]{+=+} value", f"{NAMED}::test_gradients_of_keys_are_sums_over_blocks_of_rows"),
    package("verify: backward ignores the attention output saved in the file", "judging/lower_backward.py",
            "if names[name] [-== next(iter(results))-]{+is None+}",
            f"{NAMED}::test_a_wrong_output_makes_no_gradient_wrong_that_follows_from_it"),
    package("verify: heat map cell shows the first column, not the largest error", "judging/error_heatmap.py",
            "(-1, by_across))[-.amax(-1)-]{+[..., 0]+}", "judging/test_pictures.py::test_every_error_is_in_its_cell"),
    package("captures: mask bits of a byte stored in reverse order", "captures/reader.py",
            'mask.reshape(-1).numpy(), bitorder="[-little-]{+big+}"', f"{FILES}::test_a_capture_and_a_broken_one"),
]  # fmt: skip

EXPLAINED, COMMANDS = "cli/test_explain.py", "cli/test_command_line.py"
TOOLS = [
    package("explain: text of a call may run any tensor method", "refusals/call_parser.py",
            "    if [-name in _METHODS-]{+hasattr(tensor, name)+}:\n",
            f"{COMMANDS}::test_nothing_of_a_text_is_executed"),
    package("explain: limits of the chip not checked", "refusals/explanation.py",
            "of_chip = _failures(op, args, in_memory, strict=[-True-]{+False+})",
            f"{EXPLAINED}::test_the_rule_in_our_words"),
    package("explain: suggested fixes listed without a check that each is legal", "refusals/fixes.py",
            "in kind(op, args)[- if is_legal({**args, **changes})-])",
            f"{EXPLAINED}::test_a_call_that_no_single_change_fixes"),
    package("doctor: failure in a self-test step dropped", "cli/selftest.py",
            'fault = [-f"{type(error).__name__}: {error}".splitlines()[0]-]{+""+}',
            "cli/test_doctor.py::test_a_wrong_result_is_seen"),
    package("replay: wrong result of a call reported as right",
            "cli/replay.py", "return [-judgement.verdict-]{+RIGHT+}, ",
            "cli/test_replay_command.py::test_a_wrong_call_among_right_ones"),
    package("bench: overlapping timing ranges reported as slower", "bench/changes.py",
            "net < REACHED[- and after.high < before.low-]",
            "cli/test_bench_command.py::test_turns_that_lie_among_each_other_are_no_change"),
]  # fmt: skip
