"""The mutations of what C programs' operators go through; part of mutations.py's."""

from mutant import capi, package

OPERATORS = "test_operators.py"
ENTRY = [
    capi("tensors that moved are read where they were", "entry.cpp",
         "if (planned_.places[i].version != held_[i].tensor->version)", "if (held_[i].tensor == nullptr)",
         f"{OPERATORS}::test_a_repeatable_executor_follows_its_tensors"),
    capi("the first tensor that an operator writes counts as read", "entry.cpp",
         "first <= i && i < end", "first < i && i < end",
         f"{OPERATORS}::test_a_repeatable_executor_follows_its_tensors"),
    capi("a workspace may be a little too small", "entry.cpp",
         "if (size < needed)", "if (size + 64 < needed)",
         f"{OPERATORS}::test_what_phase_2_refuses_writes_nothing_and_can_be_corrected"),
    capi("a window begins where its memory does", "entry.cpp",
         "return address + begin;", "return address;",
         f"{OPERATORS}::test_windows_of_larger_memory_give_what_python_gives"),
    capi("Python takes SIGINT from the program", "start_python.cpp",
         "sigaction(SIGINT, &interrupt, nullptr);", "", "test_embedding.py::test_a_program_that_starts_python"),
    package("C programs are not held to the chip's limits", "capi/entry.py",
          "strict=True", "strict=False", f"capi/{OPERATORS}::test_broken_calls_are_refused_as_in_python"),
]  # fmt: skip
