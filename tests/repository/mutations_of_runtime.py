"""The mutations of the C runtime; part of mutations.py's."""

from __future__ import annotations

from mutant import capi

RUNTIME = [
    capi("a handle is used a second time", "handles.cpp",
         "all.last = all.last == counts ? 1 : all.last + 1;", "all.last = 1;",
         "test_handles.py::test_handles_are_never_used_again"),
    capi("a handle of another kind is taken", "handles.cpp",
         "return is_tagged(number(handle)) && (number(handle) >> kind_at & 15) == static_cast<std::uintptr_t>(kind);",
         "return is_tagged(number(handle));", "test_handles.py::test_arrays_are_copies"),
    capi("a copy up to the last byte of the pages is refused", "copies.cpp",
         "if (count > memory->granted - first)", "if (count >= memory->granted - first)",
         "test_runtime.py::test_memory_comes_in_the_chips_pages"),
    capi("memory comes in small pages whatever is asked for", "copies.cpp",
         "kind == 2 || kind == 5 ? small_page : huge_page", "kind >= 0 ? small_page : huge_page",
         "test_runtime.py::test_memory_comes_in_the_chips_pages"),
    capi("a tensor is placed behind its allocation", "tensors.cpp",
         "if (extent.end > capacity)", "if (extent.end > 2 * capacity)",
         "test_handles.py::test_tensors_that_cannot_be"),
    capi("a thread has the device of another one", "streams.cpp",
         "thread_local Handle current", "Handle current",
         "test_runtime.py::test_a_thread_has_no_device_of_another_ones"),
    capi("freed addresses are given out again at once in the checked mode", "memory.cpp",
         "all.freed.push_back(found);", "", "test_checked.py::test_uses_after_free"),
    capi("a host type of half the size is not noticed", "tensors.cpp",
         "copied % size == 0 || size % copied == 0", "copied % size == 0",
         "test_checked.py::test_host_types_that_are_not_the_tensors"),
    capi("an empty configuration path is a file's", "configuration.cpp",
         "path != nullptr && *path != 0", "path != nullptr", "test_runtime.py::test_no_file_is_needed"),
    capi("aclInit does not take over what aclnnInit began", "runtime.cpp",
         "if (own.running && !own.by_operators)", "if (own.running)",
         "test_runtime.py::test_operators_begin_it_too"),
    capi("the checked mode is always on", "calls.cpp",
         "number(checked() ? next_call() : 0)", "number(next_call())", "test_checked.py::test_off_nothing_is_reported"),
]  # fmt: skip
