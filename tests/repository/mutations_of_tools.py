"""The mutations of what people look with: explorer, judge, command line; part of mutations.py's."""

from mutant import package

RULES_TEST = "explorer/test_rules.py::test_the_page_says_what_the_library_says"
SEEN_TEST = "explorer/test_calls.py::test_calls_see_what_is_drawn_and_are_refused_as_said"
EXPLORER = [
    package("explorer: an edge is translated one key short", "explorer/python_to_javascript.py",
            'ast.LtE: "py.[-le-]{+lt+}({}, {})"', RULES_TEST,
            "explorer/test_translate.py::test_both_languages_say_the_same"),
    package("explorer: remainders have the sign of JavaScript", "explorer/runtime.js",
            "x[- - y * Math.floor(x / y)-]{+ % y+}", "explorer/test_translate.py::test_both_languages_say_the_same"),
    package("explorer: a tree is drawn over the first keys", "explorer/facade.js", "if (own[j[- - start-]])",
            RULES_TEST),
    package("explorer: a mask of the reader's own is not drawn", "explorer/visible.py",
            'canonical.mask in ("triangle",[- "own"-])', SEEN_TEST),
    package("explorer: rules of one layout asked of the other", "explorer/violations.py",
            'layout [-not -]in rule["only"]', SEEN_TEST),
    package("explorer: cumulative ends written as lengths", "explorer/calls.py",
            "[-sum(lengths[: b + 1])-]{+lengths[b]+}", SEEN_TEST),
]  # fmt: skip

FILES, NAMED = "judging/test_files.py", "judging/test_named_files.py"
JUDGING = [
    package("the judge's formulas forget the sink", "judging/formulas.py", "divided.sum(-1, keepdim=True)[- + tail-]",
            "judging/test_formulas.py::test_training"),
    package("the judge takes the gradient of one head of a group", "judging/outputs.py",
            "value.unflatten(0, (-1, problem.group))[-.sum(1)-]{+[:, 0]+}", "judging/test_formulas.py::test_training"),
    package("the error bound looks at no tile", "judging/chi_square_limits.py", 'yield b, _look("tile", tiles{+ * 0+},',
            "judging/test_error_bound.py::test_a_fault_is_seen_where_it_is"),
    package("the error bound forgets a single number", "judging/chi_square_limits.py",
            'yield b, _look("element", peaks{+ * 0+},',
            "judging/test_error_bound.py::test_a_fault_is_seen_where_it_is"),
    package("the error bound looks at the first piece alone", "judging/chi_square_limits.py",
            "        if not errors.numel(){+ or rows.start+}:\n",
            "judging/test_error_bound.py::test_pieces_are_the_whole"),
    package("weights are expected to be exact", "judging/expected_error.py", "return [-once + -]2 * self.step(dtype)",
            "judging/test_error_bound.py::test_the_size_of_an_output_is_that_of_drawn_roundings"),
    package("what is not finite counts for nothing", "judging/chi_square_limits.py",
            "result.nan_to_num(nan=[-math.inf, posinf=math.inf-]{+0.0, posinf=0.0+})",
            "judging/test_error_bound.py::test_what_is_not_a_number"),
    package("a diagonal is tried from the wrong corner", "judging/mistakes/masks.py",
            '([-(-d, "upper left")-]{+(2 * d, "upper left")+}, (d, "lower right"))',
            "judging/test_judge.py::test_the_diagonal_of_the_other_corner"),
    package("verify runs pickles unasked", "judging/loaders.py", "weights_only=[-not how.unsafe_pickle-]{+False+}",
            f"{FILES}::test_no_pickle_is_run"),
    package("verify follows a path out of a dump's folder", "judging/loaders.py",
            "if [-not path.resolve().is_relative_to(folder.resolve())-]{+folder is None+}:",
            f"{FILES}::test_paths_that_leave_the_folder"),
    package("gradients of keys are those of the last rows alone", "judging/outputs.py",
            "total[name][:, keys] [-+=-]{+=+} value", f"{NAMED}::test_gradients_of_keys_are_sums_over_blocks_of_rows"),
    package("the output of a file is ignored in its backward", "judging/lower_backward.py",
            "if names[name] [-== next(iter(results))-]{+is None+}",
            f"{NAMED}::test_a_wrong_output_makes_no_gradient_wrong_that_follows_from_it"),
    package("a cell of a picture shows its first row", "judging/error_heatmap.py",
            "(-1, by_across))[-.amax(-1)-]{+[..., 0]+}", "judging/test_pictures.py::test_every_error_is_in_its_cell"),
    package("bits of a recorded mask in the other order", "captures/reader.py",
            'mask.reshape(-1).numpy(), bitorder="[-little-]{+big+}"', f"{FILES}::test_a_capture_and_a_broken_one"),
]  # fmt: skip

EXPLAINED, COMMANDS = "cli/test_explain.py", "cli/test_command_line.py"
TOOLS = [
    package("a text may call what it likes", "refusals/call_parser.py",
            "    if [-name in _METHODS-]{+hasattr(tensor, name)+}:\n",
            f"{COMMANDS}::test_nothing_of_a_text_is_executed"),
    package("what the chip alone refuses is not asked", "refusals/explanation.py",
            "of_chip = _failures(op, args, in_memory, strict=[-True-]{+False+})",
            f"{EXPLAINED}::test_the_rule_in_our_words"),
    package("fixes are named that nobody tried", "refusals/fixes.py",
            "in kind(op, args)[- if is_legal({**args, **changes})-])",
            f"{EXPLAINED}::test_a_call_that_no_single_change_fixes"),
    package("a fault of the self test is dropped", "cli/selftest.py",
            'fault = [-f"{type(error).__name__}: {error}".splitlines()[0]-]{+""+}',
            "cli/test_doctor.py::test_a_wrong_result_is_seen"),
    package("a wrong call of a session passes", "cli/replay.py", "return [-judgement.verdict-]{+RIGHT+}, ",
            "cli/test_replay_command.py::test_a_wrong_call_among_right_ones"),
    package("turns that lie among each other are a change", "bench/changes.py",
            "net < REACHED[- and after.high < before.low-]",
            "cli/test_bench_command.py::test_turns_that_lie_among_each_other_are_no_change"),
]  # fmt: skip
