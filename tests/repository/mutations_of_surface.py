"""The mutations of what stands around torch_npu's functions: programs, children, coverage; part of mutations.py's."""

from mutant import package

PROGRAMS = "npu/test_npu_programs.py"
AROUND = "npu/test_npu_surface.py"
CANN_INDEXER = "npu/test_cann_indexer.py"
SHARED = "npu/test_shared_keys.py"
SURFACE = [
    package("a relative import is one of the chip's", "npu/coverage.py",
          "isinstance(node, ast.ImportFrom) and not node.level and node.module",
          "isinstance(node, ast.ImportFrom) and node.module", "npu/test_npu_coverage.py::test_a_form_of_use"),
    package("a missing function counts as answered", "cli/npu.py",
          'for row in calls if row["here"])', "for row in calls)", "npu/test_npu_coverage.py::test_the_table"),
    package("a program's own folder is not searched", "npu/__main__.py",
          "sys.path[0] = str(Path(given.program).resolve().parent)", "pass",
          f"{PROGRAMS}::test_a_program_runs_as_python_runs_it"),
    package("children are told for ever", "npu/subprocesses/__init__.py",
          "os.environ.pop(name, None)", "pass", f"{PROGRAMS}::test_a_child_finds_torch_npu_once_it_has_torch"),
    package("torch's load installs in the middle of ours", "npu/subprocesses/sitecustomize.py",
          'loader is None or "fusion_attention" in sys.modules', "loader is None",
          f"{PROGRAMS}::test_a_child_finds_torch_npu_once_it_has_torch"),
    package("programs that tests start are not told", "npu/pytest.py",
          "early_config.stash[_RESTORE] = export(DEFAULT)", "early_config.stash[_RESTORE] = lambda: None",
          f"{PROGRAMS}::test_a_run_of_pytest"),
    package("a number becomes a device", "npu/surface/transfer.py",
          "if numbers and type(value) is int", "if type(value) is int", f"{AROUND}::test_a_program_for_cuda"),
    package("a replay computes into memory of its own", "npu/surface/graphs.py",
          "old.copy_(new)", "old.set_(new)",
          "npu/test_npu_graphs.py::test_a_replay_is_an_eager_call_into_the_same_outputs"),
    package("CANN's ends are lengths", "ops/shared/cu_seqlens.py",
          "if ends is None else np.diff(ends)", "if ends is None else ends[1:]", f"{CANN_INDEXER}::test_packed_rows"),
    package("sequences lie end to end although some are shorter than their memory", "ops/indexer/lowered_call.py",
          'self.capacities or self.extents, "q")', 'self.extents, "q")', f"{CANN_INDEXER}::test_packed_rows"),
    package("an offset moves the -1 of a list", "ops/indexer/lowered_call.py",
          "self.offsets() * (indices >= 0)", "self.offsets()", f"{CANN_INDEXER}::test_packed_rows"),
    package("a key of several tokens is visible a token early", "ops/indexer/lower.py",
          'behind - n["q_len"] + 1', 'behind - n["q_len"] + 2', f"{CANN_INDEXER}::test_padded_rows"),
    package("a hidden key of a block scores", "npu/surface/block_scores.py",
          ".masked_fill(~visible, -torch.inf)", "", "npu/test_msa_index_score.py::test_scores"),
    package("lse of packed rows token by token", "npu/surface/cann_ops.py",
          "lse.mT.contiguous() if", "lse if", f"{AROUND}::test_cann_attention_of_packed_rows"),
    package("metadata is not zeros", "npu/surface/metadata.py",
          "torch.zeros(elements,", "torch.ones(elements,", "npu/test_cann_ops.py::test_metadata_is_opaque"),
    package("a residual of compressed keys is not counted", "ops/compressed/lower.py",
          '* n["ratio"] + n["residual"]', '* n["ratio"]', f"{SHARED}::test_padded_rows_and_gradients"),
    package("packed sequences begin where the lengths before them end", "ops/compressed/lower.py",
          'if n.get("q_start") is not None:', "if False:", f"{SHARED}::test_packed_sequences_with_padding_rows"),
    package("probabilities are summed over heads", "ops/compressed/probabilities.py",
          "scores.exp().mean(1)", "scores.exp().sum(1)", f"{SHARED}::test_the_norm_as_an_operator"),
    package("a row reads slots behind its bound", "ops/compressed/checks.py",
          "| (slot >= bound)", "", f"{SHARED}::test_entries_past_the_bound_are_counted"),
]  # fmt: skip
