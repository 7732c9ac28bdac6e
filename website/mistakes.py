"""Generates the table of well-known mistakes in docs/verify.md from the texts that reports print."""

from fusion_attention.judging import pooling
from fusion_attention.judging.indexer_mistakes import INDEX_MISTAKES
from fusion_attention.judging.mistakes import MISTAKES
from fusion_attention.judging.mistakes.sink_and_bias_gradients import NAMES


def table() -> str:
    """Returns a row for each name of a mistake, with its first description and advice."""
    texts = [*((m.name, m.means, m.fix) for m in MISTAKES), *NAMES]
    texts += [each[:3] for each in INDEX_MISTAKES]
    texts += [each[:3] for each in pooling.MISTAKES]
    rows: dict[str, str] = {}
    for name, *cells in texts:
        means, fix = (text.replace("|", r"\|") for text in cells)
        rows.setdefault(name, f"| `{name}` | {means} | {fix} |")
    return "\n".join(["| name | what the kernel does | where to look |", "|---|---|---|", *rows.values()])
