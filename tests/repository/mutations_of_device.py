"""The mutations of the device npu; part of mutations.py's."""

from mutant import package

STATES = "npu/test_npu_states.py::"
DEVICE = [
    package("a view on npu has memory of its own", "npu/device/cpp/fallback.cpp",
          "storage.unsafeGetStorageImpl()) == behind.unsafeGetStorageImpl())\n                return",
          "storage.unsafeGetStorageImpl()) == nullptr)\n                return",
          f"{STATES}test_files"),
    package("tensors of two devices meet", "npu/device/cpp/fallback.cpp",
          "is_wrapped_number()) strange_ = t.device();", "is_wrapped_number()) (void)t;",
          f"{STATES}test_mixed_devices_are_torchs_own_error"),
    package("what is made of npu:1 lies on npu:0", "npu/device/cpp/fallback.cpp",
          "npu_[0].device().index();", "DeviceIndex(0);",
          "npu/test_npu_devices.py::test_what_is_made_lies_where_it_was_asked_for"),
    package("an index of npu reads a tensor of the host", "npu/device/cpp/fallback.cpp",
          "indexed ? alias_of_index(*t, *indexed) : alias(*t)", "alias(*t)",
          "npu/test_npu_devices.py::test_indices_come_from_the_host_or_the_same_device"),
    package("transferred programs profile CUDA", "npu/surface/transfer.py",
          "if cuda in torch.profiler.supported_activities() else None", "",
          "npu/test_transferred_profiles.py::test_profiles_say_little_and_are_written"),
    package("a view in inference mode is an inference tensor", "npu/device/cpp/memory.cpp",
          "like->key_set().has_any(c10::autograd_dispatch_keyset_with_ADInplaceOrView)",
          "!c10::InferenceMode::is_enabled()",
          f"{STATES}test_a_view_of_a_parameter_in_inference_mode_is_an_ordinary_tensor"),
    package("autograd has a thread for npu", "npu/device/backend.py",
          "    _start_engine()\n", "",
          f"{STATES}test_a_forked_process_goes_on"),
    package("every process compiles the device", "npu/device/build.py",
          "fcntl.flock(lock, fcntl.LOCK_EX)", "fcntl.flock(lock, fcntl.LOCK_UN)",
          "npu/test_npu_build.py::test_many_ask_and_one_compiles"),
    package("a changed source is not compiled", "npu/device/build.py",
          "digest.update(path.name.encode() + path.read_bytes())", "digest.update(path.name.encode())",
          "npu/test_npu_build.py::test_another_torch_or_source_is_another_folder"),
    package("inductor is told that tensors lie on npu", "npu/device/compiled.py",
          "[_elsewhere(fake, value, base) for", "[value for",
          "npu/test_npu_compiled.py::test_a_graph_is_compiled_for_the_cpu"),
]  # fmt: skip
