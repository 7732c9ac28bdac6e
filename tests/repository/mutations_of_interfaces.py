"""The mutations of what programs call: C, torch_npu and its device, models, several ranks; part of mutations.py's."""

from mutant import capi, package, tree

HEADERS = "capi/test_headers.py"
COMMAND = "cli/test_capi_command.py"


C_API = [
    package("lengths of the sparse operators are arrays in C too", "ops/shared/prototypes.py",
            'r"[-actualSeq|cuSeq|(?i:seqUsed)|cmpResidual|startPos-]{+PaddingSize+}"',
            f"{HEADERS}::test_declarations_are_what_the_pages_print"),
    package("gradients are declared beside the forwards", "contract/record.py",
            "[-{'_grad' if 'Grad' in op.name else ''}-]",
            f"{HEADERS}::test_every_operator_is_declared_and_defined_once_in_its_file"),
    tree("a header that declares its operators once for each include", "codegen/headers.py", "[-#pragma once\\n-]",
         f"tests/{HEADERS}::test_what_is_there_is_what_the_records_give"),
    package("operators have C++ names in C++ programs", "capi/include/aclnn/aclnn_base.h",
            '[-extern "C" -]ACL_FUNC_VISIBILITY', f"{HEADERS}::test_programs_in_c_and_in_cpp_call_the_same_functions"),
    package("flags of a folder with a space in its name", "capi/environment.py",
            'return [-shlex-]{+" "+}.join([f"-L{LIBRARY}"', f"{COMMAND}::test_flags_are_one_line_that_a_shell_reads"),
]  # fmt: skip

OPERATORS = "test_operators.py"
ENTRY = [
    capi("tensors that moved are read where they were", "entry.cpp",
         "if ([-planned_.places[i].version != held_[i].tensor->version-]{+held_[i].tensor == nullptr+})",
         f"{OPERATORS}::test_a_repeatable_executor_follows_its_tensors"),
    capi("the first tensor that an operator writes counts as read", "entry.cpp", "first [-<=-]{+<+} i && i < end",
         f"{OPERATORS}::test_a_repeatable_executor_follows_its_tensors"),
    capi("a workspace may be a little too small", "entry.cpp", "if (size[- -]{+ + 64 +}< needed)",
         f"{OPERATORS}::test_what_phase_2_refuses_writes_nothing_and_can_be_corrected"),
    capi("a window begins where its memory does", "entry.cpp", "return address[- + begin-];",
         f"{OPERATORS}::test_windows_of_larger_memory_give_what_python_gives"),
    capi("Python takes SIGINT from the program", "start_python.cpp", "[-sigaction(SIGINT, &interrupt, nullptr);-]",
         "test_embedding.py::test_a_program_that_starts_python"),
    package("C programs are not held to the chip's limits", "capi/entry.py", "strict=[-True-]{+False+}",
            f"capi/{OPERATORS}::test_broken_calls_are_refused_as_in_python"),
]  # fmt: skip

RUNTIME = [
    capi("a handle is used a second time", "handles.cpp", "all.last = [-all.last == counts ? 1 : all.last + -]1;",
         "test_handles.py::test_handles_are_never_used_again"),
    capi("a handle of another kind is taken", "handles.cpp",
         "return is_tagged(number(handle))[- && (number(handle) >> kind_at & 15) == static_cast<std::uintptr_t>(kind)"
         "-];", "test_handles.py::test_arrays_are_copies"),
    capi("a copy up to the last byte of the pages is refused", "memory_functions.cpp",
         "if (count [->-]{+>=+} memory->granted - first)", "test_runtime.py::test_memory_comes_in_the_chips_pages"),
    capi("memory comes in small pages whatever is asked for", "memory_functions.cpp",
         "kind [-== 2 || kind == 5-]{+>= 0+} ? small_page : huge_page",
         "test_runtime.py::test_memory_comes_in_the_chips_pages"),
    capi("a tensor is placed behind its allocation", "tensors.cpp", "if (extent.end > {+2 * +}capacity)",
         "test_handles.py::test_tensors_that_cannot_be"),
    capi("a thread has the device of another one", "streams.cpp", "[-thread_local -]Handle current",
         "test_runtime.py::test_a_thread_has_no_device_of_another_ones"),
    capi("freed addresses are given out again at once in the checked mode", "allocations.cpp",
         "[-all.freed.push_back(found);-]", "test_checked_mode.py::test_uses_after_free"),
    capi("a host type of half the size is not noticed", "tensors.cpp", "copied % size == 0[- || size % copied == 0-]",
         "test_checked_mode.py::test_host_types_that_are_not_the_tensors"),
    capi("an empty configuration path is a file's", "configuration.cpp", "path != nullptr[- && *path != 0-]",
         "test_runtime.py::test_no_file_is_needed"),
    capi("aclInit does not take over what aclnnInit began", "runtime.cpp", "if (own.running[- && !own.by_operators-])",
         "test_runtime.py::test_operators_begin_it_too"),
    capi("the checked mode is always on", "errors.cpp", "number([-checked() ? next_call() : 0-]{+next_call()+})",
         "test_checked_mode.py::test_off_nothing_is_reported"),
]  # fmt: skip

ATB = [
    package("a mask's line is read that is another row's", "npu/auxiliary/atb.py", "[-(ends - rows)-]{+ends+}[:, None]",
            "npu/test_atb.py::test_rows_over_pages"),
    package("1 in a mask leaves a key", "ops/auxiliary_definitions/atb.py",
            "return [-(mask > 0) | (mask <= HIDDEN)-]{+mask <= HIDDEN+}", "npu/test_atb.py::test_packed_rows"),
    package("rows behind the last sequence are written", "npu/auxiliary/atb_attention_helpers.py",
            'given["out"]{+.zero_()+}[:rows].copy_(result)',
            "npu/test_atb.py::test_rows_behind_the_last_sequence_stay"),
    package("a smoothed loss leaves out the weights of classes", "npu/auxiliary/losses.py",
            "spread = log_prob[- if weight is None else log_prob * weight-]",
            "npu/test_cross_entropy.py::test_a_loss_and_its_gradient_are_torchs"),
    package("a negative scale is lost before the rectifier", "npu/auxiliary/quantised_sparse.py",
            '"key": key.float() * key_scale.float().{+abs().+}unsqueeze(-1)',
            "sparse/test_quantised_sparse.py::test_the_indexer_chooses_what_the_formula_does"),
    package("pages that are left out move the others", "npu/auxiliary/quantised_sparse.py",
            "result = [-torch.searchsorted(used, table.clamp(0, pages - 1))-]{+table.clamp(0, len(used) - 1)+}",
            "sparse/test_quantised_sparse.py::test_attention_over_packed_bytes"),
    package("an error comes under the name of what computes", "npu/auxiliary/call.py", "replace(f, [-op=op.name, -]",
            "npu/test_atb.py::test_what_is_wrong_is_said_and_nothing_is_written"),
]  # fmt: skip

AUXILIARY = [
    package("a norm divides by a sum", "npu/auxiliary/norms.py", "(x32 * x32).[-mean-]{+sum+}(",
            "npu/test_auxiliary.py::test_a_function_is_its_formula"),
    package("a norm's gradient leaves out what flows through the mean", "npu/auxiliary/norms.py",
            "[-(weighed - xhat * (weighed * xhat).mean(axes, keepdim=True))-]{+weighed+}",
            "npu/test_auxiliary.py::test_backward_functions_are_autograd_s"),
    package("neighbours turn the other way", "npu/auxiliary/rotary.py",
            "torch.stack([-(-x[..., 1::2], x[..., ::2])-]{+(x[..., 1::2], -x[..., ::2])+}, -1)",
            "npu/test_auxiliary.py::test_a_function_is_its_formula"),
    package("a matrix of a turn stands on the other side", "npu/auxiliary/rotary.py", "input32 @ rotate.float(){+.T+}",
            "npu/test_auxiliary.py::test_a_matrix_says_how_pairs_turn"),
    package("the first of rows with one place stays", "npu/auxiliary/caches.py",
            "torch.searchsorted[-(ordered, ordered, right=True) - 1-]{+(ordered, ordered)+}",
            "npu/test_auxiliary.py::test_of_equal_places_the_last_row_stays"),
    package("rows without a place are stored in the first", "npu/auxiliary/caches.py",
            "place = slot_indices.[-where(there, slot_indices[top]).-]clamp(min=0)",
            "npu/test_auxiliary.py::test_rows_without_a_place_are_stored_nowhere"),
    package("rows that do not stay have a gradient", "npu/auxiliary/caches.py",
            "[-torch.where(stays, rows, rows.detach()[last])-]{+rows[last]+}",
            "npu/test_auxiliary.py::test_the_row_that_stays_alone_has_a_gradient"),
    package("a mode says nothing", "ops/auxiliary_definitions/caches.py", 'return [-mode == "PA_NZ" and -]chips_width',
            "npu/test_auxiliary.py::test_a_mode_says_how_a_cache_lies_whose_shape_allows_both"),
    package("a permutation goes the other way back", "npu/auxiliary/transposes.py",
            "back = [-sorted(range(len(order)), key=order.__getitem__)-]{+order+}",
            "npu/test_auxiliary.py::test_shapes_go_there_and_back"),
    package("autocast rounds what an auxiliary operator multiplies", "npu/auxiliary/call.py",
            "return [-torch.autocast(kind, enabled=False)-]{+nullcontext()+}",
            "npu/test_auxiliary_devices.py::test_autocast_changes_nothing"),
    package("an operator hands back what came", "npu/operators.py",
            "run = [-_apart(interface) if packet in _HANDS_BACK else -]run",
            "npu/test_torch_operators.py::test_an_operator_returns_no_argument"),
    package("rows before the first window weigh as zeros do", "ops/shared/softmax_pooling.py",
            "_with_previous(z,[- -torch.inf-]{+ 0.0+})",
            "native/test_native_pool.py::test_large_values_and_gates_overflow_nothing"),
    package("the first window in memory is pooled again", "ops/compressed/pooling.py",
            '[-(results > 0) * int(names["before"])-]{+none+}',
            "native/test_native_pool.py::test_results_and_gradients"),
]  # fmt: skip

EXPERTS = [
    package("rows of one token are spread as those of another", "npu/auxiliary/token_permute.py",
            "[order [-// choices, order % choices-]{+% len(tokens), order // len(tokens)+}]",
            "npu/test_experts.py::test_permute_and_back"),
    package("four bits lie in the other order", "npu/auxiliary/quantised.py",
            "({+28 - +}4 * torch.arange(8, device=y.device))",
            "npu/test_integer_products.py::test_dynamic_quant_of_four_bits_and_groups"),
    package("a group of rows begins where the one before it began", "npu/auxiliary/grouped_matmul.py",
            "self(x[a:b], i, [-a-]{+0+})", "npu/test_integer_products.py::test_integers_in_groups"),
    package("an operator of torch.ops.npu loses its gradient", "npu/operators.py",
            "if [-torch.is_grad_enabled() and any(t.requires_grad for t in tensors)-]{+False+}:",
            "npu/test_torch_operators.py::test_opcheck"),
]  # fmt: skip

PROGRAMS = "npu/test_npu_programs.py"
AROUND = "npu/test_npu_surface.py"
CANN_INDEXER = "npu/test_cann_indexer.py"
SHARED = "npu/test_sparse_flash_mla.py"
SURFACE = [
    package("a relative import is one of the chip's", "npu/source_scan.py",
            "isinstance(node, ast.ImportFrom) and [-not node.level and -]node.module",
            "npu/test_source_scan.py::test_a_form_of_use"),
    package("a missing function counts as answered", "cli/npu.py", 'for row in calls[- if row["here"]-])',
            "npu/test_source_scan.py::test_the_table"),
    package("a program's own folder is not searched", "npu/__main__.py",
            "[-sys.path[0] = str(Path(given.program).resolve().parent)-]{+pass+}",
            f"{PROGRAMS}::test_a_program_runs_as_python_runs_it"),
    package("children are told for ever", "npu/subprocesses/__init__.py", "[-os.environ.pop(name, None)-]{+pass+}",
            f"{PROGRAMS}::test_a_child_finds_torch_npu_once_it_has_torch"),
    package("torch's load installs in the middle of ours", "npu/subprocesses/sitecustomize.py",
            'loader is None[- or "fusion_attention" in sys.modules-]',
            f"{PROGRAMS}::test_a_child_finds_torch_npu_once_it_has_torch"),
    package("programs that tests start are not told", "npu/pytest.py",
            "early_config.stash[_RESTORE] = [-export(DEFAULT)-]{+lambda: None+}", f"{PROGRAMS}::test_a_run_of_pytest"),
    package("a number becomes a device", "npu/surface/transfer.py", "if [-numbers and -]type(value) is int",
            f"{AROUND}::test_a_program_for_cuda"),
    package("a replay computes into memory of its own", "npu/surface/graphs.py", "old.[-copy_-]{+set_+}(new)",
            "npu/test_npu_graphs.py::test_a_replay_is_an_eager_call_into_the_same_outputs"),
    package("CANN's starts are lengths", "ops/shared/cu_seqlens.py", "None else [-np.diff(ends)-]{+ends[:-1]+}",
            f"{CANN_INDEXER}::test_packed_rows"),
    package("sequences lie end to end although some are shorter than their memory", "ops/indexer/lowered_call.py",
            'self.[-capacities or self.-]extents, "q")', f"{CANN_INDEXER}::test_packed_rows"),
    package("an offset moves the -1 of a list", "ops/indexer/lowered_call.py", "self.offsets()[- * (indices >= 0)-]",
            f"{CANN_INDEXER}::test_packed_rows"),
    package("a key of several tokens is visible a token early", "ops/indexer/lower.py",
            'behind - n["q_len"] + [-1-]{+2+}', f"{CANN_INDEXER}::test_padded_rows"),
    package("a hidden key of a block scores", "npu/auxiliary/block_scores.py", "[-.masked_fill(~visible, -torch.inf)-]",
            "npu/test_msa_index_score.py::test_scores"),
    package("lse of packed rows token by token", "npu/surface/cann_ops.py", "lse[-.mT.contiguous()-] if",
            f"{AROUND}::test_cann_attention_of_packed_rows"),
    package("metadata is not zeros", "npu/surface/metadata.py", "torch.[-zeros-]{+ones+}(elements,",
            "npu/test_cann_ops.py::test_metadata_is_opaque"),
    package("a residual of compressed keys is not counted", "ops/compressed/lower.py",
            '* n["ratio"][- + n["residual"]-]', f"{SHARED}::test_padded_rows_and_gradients"),
    package("packed sequences begin where the lengths before them end", "ops/compressed/lower.py",
            'if [-n.get("q_start") is not None-]{+False+}:', f"{SHARED}::test_packed_sequences_with_padding_rows"),
    package("probabilities are summed over heads", "ops/compressed/probabilities.py", "scores.exp().[-mean-]{+sum+}(1)",
            "contract/test_clauses.py::test_the_clause_holds"),
    package("a row reads slots behind its bound", "ops/compressed/checks.py", "[-| (slot >= bound)-]",
            f"{SHARED}::test_entries_past_the_bound_are_counted"),
]  # fmt: skip

STATES = "npu/test_npu_tensors.py::"
DEVICE = [
    package("a view on npu has memory of its own", "npu/device/cpp/fallback.cpp",
            "storage.unsafeGetStorageImpl()) == [-behind.unsafeGetStorageImpl()-]{+nullptr+})\n                return",
            f"{STATES}test_files"),
    package("tensors of two devices meet", "npu/device/cpp/fallback.cpp",
            "is_wrapped_number()) [-strange_ = t.device()-]{+(void)t+};",
            f"{STATES}test_mixed_devices_are_torchs_own_error"),
    package("what is made of npu:1 lies on npu:0", "npu/device/cpp/fallback.cpp",
            "[-npu_[0].device().index()-]{+DeviceIndex(0)+};",
            "npu/test_npu_devices.py::test_what_is_made_lies_where_it_was_asked_for"),
    package("an index of npu reads a tensor of the host", "npu/device/cpp/fallback.cpp",
            "[-indexed ? alias_of_index(*t, *indexed) : -]alias(*t)",
            "npu/test_npu_devices.py::test_indices_come_from_the_host_or_the_same_device"),
    package("transferred programs profile CUDA", "npu/surface/transfer.py",
            "[-if cuda in torch.profiler.supported_activities() else None-]",
            "npu/test_transferred_profiles.py::test_profiles_say_little_and_are_written"),
    package("a view in inference mode is an inference tensor", "npu/device/cpp/storage_aliases.cpp",
            "[-like->key_set().has_any(c10::autograd_dispatch_keyset_with_ADInplaceOrView)-]{+!c10::InferenceMode::"
            "is_enabled()+}", f"{STATES}test_a_view_of_a_parameter_in_inference_mode_is_an_ordinary_tensor"),
    package("autograd has a thread for npu", "npu/device/backend.py", "[-    _start_engine()\n-]",
            f"{STATES}test_a_forked_process_goes_on"),
    package("every process compiles the device", "npu/device/build.py",
            "fcntl.flock(lock, fcntl.[-LOCK_EX-]{+LOCK_UN+})", "npu/test_npu_build.py::test_many_ask_and_one_compiles"),
    package("a changed source is not compiled", "npu/device/build.py",
            "digest.update(path.name.encode()[- + path.read_bytes()-])",
            "npu/test_npu_build.py::test_another_torch_or_source_is_another_folder"),
    package("inductor is told that tensors lie on npu", "npu/device/compiled.py",
            "there[at] = [-alias.requires_grad_(fake.requires_grad)-]{+inputs[at]+}",
            "npu/test_npu_compiled.py::test_a_graph_is_compiled_for_the_cpu"),
]  # fmt: skip

NPU_KERNELS = [
    package("weights that layers share part when a module moves to npu", "npu/device/cpp/operator_overrides.cpp",
            "[-(dense(self.key_set()) && dense(from.key_set()))-]{+false+}",
            "npu/test_npu_kernels.py::test_a_module_that_moves_keeps_its_parameters",
            "integrations/test_transformers_on_npu.py::test_a_model_is_the_same_there"),
    package("npu counts integers as floats", "npu/device/cpp/operator_overrides.cpp",
            "alias.to(at::[-kDouble-]{+kFloat+})", "npu/test_npu_kernels.py::test_integers_are_counted"),
]  # fmt: skip

MODELS = "integrations/test_sparse_models.py::test_logits_and_gradients"
TRAINING = "integrations/test_sparse_training.py"
LATENT = "integrations/sparse_latent.py"
SPARSE_MODELS = [
    package("sparse models: rows that are dense with a mask read all keys", LATENT, "if end [->-]{+<+} first:", MODELS),
    package("sparse models: lists of dense rows serve later rows", LATENT,
            "chosen = lists[:, [-end - first :-]{+: lists.shape[1] - end + first+}]", MODELS),
    package("sparse models: a list of blocks omits the incomplete block", "integrations/sparse_blocks.py",
            "incomplete = (((position + 1) % ratio [->-]{+<+} 0) & real)", MODELS),
    package("sparse models: a window of one key more", "integrations/sparse_compressed.py",
            "Band.window(module.sliding_window[- - 1-])", MODELS),
    package("sparse models: rows return in the order of the calls", "integrations/sparse_sequences.py",
            "self.q_order[-.argsort(1)-]", MODELS),
    package("sparse models: weights that are asked for are not computed", "integrations/sparse_models.py",
            "if asks_for_weights(layer, given){+ and layer.training+}:",
            f"{TRAINING}::test_weights_are_those_of_eager"),
    package("sparse models: the loss of an indexer is that of rows without lists", LATENT,
            "loss = indexer_loss(q, k, lse, *index, [-lists-]{+None+}, **words)",
            f"{TRAINING}::test_the_loss_of_an_indexer"),
]  # fmt: skip

BITS = "distributed/test_attention.py::test_gathered_keys_give_the_bits_of_one_process"
EVERY = "distributed/test_attention.py::test_every_schedule_is_as_good_as_one_process"
RANKS_SHARED = "distributed/test_selections.py::test_ranks_find_what_one_process_does"
APART = "distributed/test_cache.py"
RANKS = [
    package("late parts of a sequence go to ranks in the order of early ones", "distributed/layout.py",
            "*[-reversed(range(ranks))-]{+range(ranks)+}",
            "distributed/test_sharding.py::test_causal_bands_load_all_ranks_alike"),
    package("a sum over ranks leaves one out", "distributed/groups.py", "for shard in parts[[-1-]{+2+}:]:",
            "distributed/test_groups.py::test_what_passes_arrives"),
    package("ranks that say different things go on", "distributed/groups.py",
            "if [-[function, message] != heard[0][:2]-]{+function != heard[0][0]+}:",
            "distributed/test_groups.py::test_ranks_that_say_different_things_all_raise"),
    package("gradients of keys that ranks added pass for those of one process", "distributed/schedules.py",
            "if [-m.deterministic-]{+False+}:", BITS),
    package("keys that go round meet no sink", "distributed/schedules.py",
            "    if m.full[-.sink is not-]{+ is+} None:\n        for b,", EVERY),
    package("a key head that two ranks had gets the gradient of one", "distributed/ulysses.py",
            "[-heads[place] + gradient if place in heads else -]gradient", EVERY),
    package("a block of keys stays while the next ones come", "distributed/schedules.py",
            "[-del-]{+m.call.call_cache[step] =+} of_block",
            "distributed/test_attention.py::test_a_ring_holds_two_blocks_of_keys_whatever_its_size"),
    package("a rank's rows count from its own first", "distributed/sharded_call.py", "edge[b][- + first-], edge[b])",
            RANKS_SHARED),
    package("lists of a rank's keys begin where rows read no more", "distributed/lists.py", "[-& (slot < read)-]",
            RANKS_SHARED),
    package("equal choices merge in the other order", "distributed/topk.py",
            "indices.sort(dim=-1, stable=True{+, descending=True+})",
            "distributed/test_selections.py::test_the_order_of_candidates"),
    package("every rank adds the sink", "distributed/decode.py", '{**args, [-"sink": None, -]',
            f"{APART}::test_decoding_finds_what_one_process_does"),
    package("a rank reads behind a sequence's last token", "api/cache.py",
            "[- - max((local[-1] + 1) * size - tokens, 0)-]",
            f"{APART}::test_every_rank_holds_the_tokens_of_its_pages"),
]  # fmt: skip

PARTS, CUTS = "distributed/test_pieces.py::test_pieces_have_the_bits_of_the_whole", "distributed/test_pieces.py"
LONG = f"{CUTS}::test_long_pieces_begin_where_the_whole_ones_tiles_do"
MERGED = "training/test_ring_update.py"
PIECES = [
    package("a part's tiles begin where the part does", "ir/tiles.py",
            "ahead = [-extents.part.first_row % size-]{+0 * extents.part.first_row+}", LONG),
    package("a part's kernel is chosen by its own length", "backends/cpu/decode.py",
            "q_len, kv_len = extents.[-chosen_by-]{+q_len, extents.kv_len+}", LONG),
    package("dropout of golden's parts counts from their own first key", "ir/problem.py",
            "slice([-key, key +-]{+0,+} int(self.kv_len[b]))", f"{CUTS}::test_golden_knows_parts"),
    package("a pair whose first rows see nothing is left out", "distributed/chunk_attention.py",
            "np.minimum(e.q_len, e.kv_len[- - e.lo-]) - 1", PARTS),
    package("a mean weighs beside a row with keys", "ir/merge.py",
            "more.out[-.masked_fill((theirs == 0)[..., None], 0.0)-]", f"{MERGED}::test_what_is_merged"),
    package("packed statistics of a ring are always token by token", "npu/merging.py",
            'input_softmax_layout [-!= "TND-]{+== "BSH+}"', f"{MERGED}::test_two_steps_are_the_whole"),
]  # fmt: skip

OF_INTERFACES = (*C_API, *ENTRY, *RUNTIME, *ATB, *AUXILIARY, *EXPERTS, *SURFACE, *DEVICE, *NPU_KERNELS,
    *SPARSE_MODELS, *RANKS, *PIECES)  # fmt: skip
