"""The mutations of what people look with: explorer, judge, command line; part of mutations.py's."""

from __future__ import annotations

from mutant import house

RULES_TEST = "explorer/test_rules.py::test_the_page_says_what_the_library_says"
SEEN_TEST = "explorer/test_calls.py::test_calls_see_what_is_drawn_and_are_refused_as_said"
EXPLORER = [
    house("explorer: an edge is translated one key short", "explorer/translate.py",
          'ast.LtE: "py.le({}, {})"', 'ast.LtE: "py.lt({}, {})"',
          RULES_TEST, "explorer/test_translate.py::test_both_languages_say_the_same"),
    house("explorer: remainders have the sign of JavaScript", "explorer/runtime.js",
          "x - y * Math.floor(x / y)", "x % y", "explorer/test_translate.py::test_both_languages_say_the_same"),
    house("explorer: a tree is drawn over the first keys", "explorer/facade.js",
          "if (own[j - start])", "if (own[j])", RULES_TEST),
    house("explorer: a mask of the reader's own is not drawn", "explorer/seen.py",
          'known.mask in ("triangle", "own")', 'known.mask in ("triangle",)', SEEN_TEST),
    house("explorer: rules of one layout asked of the other", "explorer/remarks.py",
          'layout not in rule["only"]', 'layout in rule["only"]', SEEN_TEST),
    house("explorer: cumulative ends written as lengths", "explorer/calls.py",
          "sum(lengths[: b + 1])", "lengths[b]", SEEN_TEST),
]  # fmt: skip
