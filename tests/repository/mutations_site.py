"""Mutations of the code that makes pages and pictures. mutants.py includes them."""

from mutant import package, tree

PAGES = "repository/test_pages.py"
SITE = (
    package("docs: missing GPU on the build machine listed as a refusal of the back end", "cli/op_support.py",
            'absent[- = triton.against_device(device) if name == "triton" else-]{+: list[str] =+} []',
            f"{PAGES}::test_operator_page_lists_back_end_limitations"),
    package("docs: example passes an argument by position after a named argument", "cli/op_examples.py",
            "by_place = by_place [-and-]{+or+} needed", "repository/test_examples.py::test_examples_of_operators_run"),
    package("docs: asterisk of a docstring not escaped in Markdown",
            "cli/docstring_markdown.py", 'r"([[-*-]_<>\\[\\]|])"', f"{PAGES}::test_docstrings_become_markdown"),
    tree("docs: picture of a mask shows hidden keys as visible", "website/masks.py",
         "is_seen(kinds{+ + 2+}).tolist()", f"tests/{PAGES}::test_sparse_mode_picture_marks_the_visible_keys"),
    tree("docs: bar of a chart longer than the ratio",
         "website/charts.py", "max(1.5, [-(value - 1)-]{+value+} * scale), 22",
         f"tests/{PAGES}::test_chart_bar_lengths_match_speed_ratios"),
)  # fmt: skip
