"""The table in docs/with_flex_attention.md lists the conversions of the tests' masks and score_mods.

python tests/integrations/test_flex_docs_table.py          updates the table
"""

import re
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
from support.docs_tables import ROOT, table, write, written
from support.flex_cases import HEADS, ITEMS, MASKS, REFUSED, SCORES, TOKENS, inputs
from torch.nn.attention.flex_attention import create_block_mask

from fusion_attention import BackendError
from fusion_attention.integrations.flex_attention import explain

PAGE = "with_flex_attention.md"


def lines() -> str:
    """Markdown table of the conversions."""
    q, k, *_ = inputs(0)
    rows = []
    for name, (mask, _) in MASKS.items():
        created_mask = create_block_mask(mask, ITEMS, HEADS, TOKENS, TOKENS, device="cpu")
        rows.append((f"mask: {name}", f"`{explain(q, k, None, created_mask)}`"))
    rows += [(f"score_mod: {name}", f"`{explain(q, k, score_mod)}`") for name, (score_mod, _) in SCORES.items()]
    for name, (score_mod, words) in REFUSED.items():
        with pytest.raises(BackendError, match=re.escape(words)):
            explain(q, k, score_mod)
        rows.append((f"score_mod: {name}", "refused"))
    return table(("mask or score_mod of the program", "arguments of attention()"), rows)


def test_docs_table_equals_the_output_of_explain() -> None:
    assert written(PAGE) == lines(), f"python {Path(__file__).relative_to(ROOT)} writes it"


if __name__ == "__main__":
    write(PAGE, lines())
