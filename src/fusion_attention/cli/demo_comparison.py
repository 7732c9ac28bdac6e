"""The comparison of `fusion-attention demo`: a sentence encoder over packed and over padded sentences."""

import ast
import math
import random
import statistics
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from fusion_attention.backends import choose
from fusion_attention.cli.encoder import (
    Attention,
    DemoUnavailable,
    Encoder,
    encode_packed,
    encode_padded,
    padded_batches,
    padded_tokens,
)
from fusion_attention.cli.output import progress, show_json
from fusion_attention.ir.problem import Problem

# Largest difference of an element of two embeddings, float32 unit vectors; two correct encoders differ by much less.
TOLERANCE = 2e-5
NEIGHBOURS = 3
QUERIES = 5
# Smallest number of tokens of a sentence, two of which are special tokens.
SHORTEST = 3
Advance = Callable[[float, str], None]  # a function of the amount of work done and a text, which draws a progress bar


@dataclass(frozen=True)
class Settings:
    """The demo's options: seed of the drawn sentences, number of timed runs, most tokens of a batch."""

    seed: int
    runs: int
    tokens_per_batch: int


@dataclass(frozen=True)
class Comparison:
    """Embeddings of the same sentences by two encoders, with the encoders' times."""

    # padded, packed: embeddings of each encoder, [sentences, width].
    padded: Tensor
    packed: Tensor
    # seconds_padded, seconds_packed: median time of each encoder.
    seconds_padded: float
    seconds_packed: float

    @property
    def differences(self) -> Tensor:
        """Largest absolute difference of each sentence's two embeddings, [sentences]; inf if one is not finite."""
        return (self.padded - self.packed).abs().amax(dim=-1).nan_to_num(nan=math.inf)


def library_texts(folder: Path | None = None, advance: Advance = lambda fraction, words: None) -> list[str]:
    """Returns the docstrings of the modules in a folder (None: the standard library's), without duplicates. Sources are
    parsed, never imported: importing runs code. advance: called with the fraction of modules read."""
    files = sorted((folder or Path(sysconfig.get_path("stdlib"))).glob("*.py"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts: dict[str, str] = {}
    for number, file in enumerate(files):
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue  # an unreadable file, or invalid syntax in a test file
        for node in ast.walk(tree):
            text = " ".join((ast.get_docstring(node) or "").split()) if isinstance(node, documented) else ""
            if text.isprintable() and any(c.isalpha() for c in text):
                texts.setdefault(text.casefold(), text)
        advance((number + 1) / len(files), "")
    return list(texts.values())


def draw_sentences(encoder: Encoder, texts: Sequence[str], count: int, seed: int) -> list[str]:
    """Draws `count` texts, no two with the same tokens of an encoder; the shortest and the longest are always included.

    Raises:
        DemoUnavailable: `texts` has fewer such texts.
    """
    different = {tuple(ids): text for text, ids in zip(texts, encoder.tokenize(texts), strict=True)}
    pool = sorted((len(ids), text) for ids, text in different.items() if len(ids) >= SHORTEST)
    if len(pool) < count:
        raise DemoUnavailable(
            f"This machine's standard library has {len(pool)} different docstrings, fewer than --sentences {count}"
            + (f": pass --sentences {len(pool)} or fewer." if pool else " (are its sources installed?).")
        )
    random_ = random.Random(seed)
    drawn = [pool[0], pool[-1], *random_.sample(pool[1:-1], count - 2)]
    random_.shuffle(drawn)
    return [text for _, text in drawn]


def compare(
    encoder: Encoder, tokens: list[list[int]], attention: Attention, settings: Settings, advance: Advance
) -> Comparison:
    """Embeds the sentences by both encoders, padded and packed, then times both in turn, settings.runs times; returns
    the embeddings and the median seconds. tokens: ids of each sentence. attention: computes packed attention. advance:
    called with the number of sentences done."""
    batches = padded_batches([len(ids) for ids in tokens], settings.tokens_per_batch, by_length=True)
    encoded = 0

    def done(count: int) -> None:
        nonlocal encoded
        encoded += count
        advance(encoded, "")

    encoders: list[Callable[[], Tensor]] = [
        lambda: encode_padded(encoder, tokens, batches, done),
        lambda: encode_packed(encoder, tokens, settings.tokens_per_batch, attention, done),
    ]
    embeddings = [encode() for encode in encoders]
    seconds: list[list[float]] = [[], []]
    for run in range(settings.runs):
        for which in (0, 1) if run % 2 == 0 else (1, 0):  # the first one alternates
            start = time.perf_counter()
            encoders[which]()
            seconds[which].append(time.perf_counter() - start)
    medians = [statistics.median(times) for times in seconds]
    return Comparison(embeddings[0], embeddings[1], medians[0], medians[1])


def cosines(embeddings: Tensor) -> Tensor:
    """Returns the cosines of embeddings [sentences, dim], float64 [sentences, sentences]; -inf on the diagonal."""
    embeddings64 = embeddings.double()
    return (embeddings64 @ embeddings64.T).fill_diagonal_(-math.inf)


def neighbours(similarity: Tensor) -> Tensor:
    """Returns the numbers of the up to three most similar other sentences of each sentence, int64 [sentences, up to 3],
    nearest first; similarity: cosines [sentences, sentences], -inf on the diagonal."""
    return similarity.topk(min(NEIGHBOURS, len(similarity) - 1)).indices


def rankings_agree(padded: Tensor, packed: Tensor) -> Tensor:
    """Returns bool [sentences]: true if the nearest sentences are the same, in the same order, by both matrices of
    cosines [sentences, sentences], of embeddings by the padded and the packed encoder."""
    first, second = neighbours(padded), neighbours(packed)
    gap = (padded.gather(1, first) - padded.gather(1, second)).abs()
    return ((first == second) | (gap <= TOLERANCE)).all(dim=-1) & packed.isnan().logical_not().all(dim=-1)


def summary_table(
    encoder: Encoder, sentences: list[str], lengths: list[int], comparison: Comparison, settings: Settings,
    agreeing: int, backend: str,
) -> Table:  # fmt: skip
    """Returns a table of the demo's input, agreement of both encoders, and times; lengths: tokens of each sentence;
    agreeing: number of sentences with equal rankings."""
    budget = settings.tokens_per_batch
    real = sum(lengths)
    padding = [1 - real / padded_tokens(lengths, padded_batches(lengths, budget, by_length=s)) for s in (True, False)]
    worst = int(comparison.differences.argmax())
    shown = sentences[worst] if len(sentences[worst]) <= 60 else sentences[worst][:56].rstrip() + " ..."
    largest = float(comparison.differences[worst])
    rows = [
        ("sentences", f"{len(lengths)} docstrings of the standard library"),
        ("tokens", f"{real} in all, {min(lengths)} to {max(lengths)} a sentence"),
        ("cut", f"{lengths.count(encoder.max_tokens)} at the model's limit of {encoder.max_tokens} tokens"),
        ("", ""),
        ("padded", "transformers' BertModel, scaled_dot_product_attention, batches sorted by length"),
        ("packed", f"the same modules, npu_fusion_attention in layout TND, unsorted, back end: {backend}"),
        ("largest difference", f"{largest:.2g} in an element of a unit vector (limit {TOLERANCE:g})"),
        ("worst sentence", f"{lengths[worst]} tokens: {shown}"),
        ("neighbours", f"the same {NEIGHBOURS} nearest for {agreeing} of {len(lengths)} sentences"),
        ("", ""),
        ("padding saved", f"{padding[0]:.1%} of the padded tokens ({padding[1]:.1%} if batches were not sorted)"),
        ("time padded", f"{comparison.seconds_padded:.2f} s, {real / comparison.seconds_padded:.0f} tokens/s"),
        ("time packed", f"{comparison.seconds_packed:.2f} s, {real / comparison.seconds_packed:.0f} tokens/s"),
    ]
    table = Table(title="all-MiniLM-L6-v2, packed and padded", show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in rows:
        if name:
            table.add_row(name, Text(value))
        else:
            table.add_section()
    turns = f"median of {settings.runs} runs in turns" if settings.runs > 1 else "one run"
    table.caption = (
        f"Times: {turns} after a warm-up, {torch.get_num_threads()} threads, float32 on the CPU, "
        f"without tokenization; batches of at most {budget} tokens, padding included."
    )
    table.caption_justify = "left"
    return table


def neighbour_table(sentences: list[str], padded: Tensor, packed: Tensor, agree: Tensor, seed: int) -> Table:
    """Returns a table of a few sentences, selected by `seed`, with their nearest ones and similarities. padded, packed:
    cosines [sentences, sentences] by each encoder; agree: bool [sentences], true where both rankings are equal."""
    table = Table(title="Nearest neighbours", title_justify="left")
    # On a narrow screen sentences are truncated rather than wrapped.
    table.add_column("query, and its nearest sentences", ratio=1)
    for encoder in ("padded", "packed"):
        table.add_column(encoder, justify="right", no_wrap=True, min_width=6)
    nearest, expected = neighbours(packed), neighbours(padded)
    shown = random.Random(seed).sample(range(len(sentences)), min(QUERIES, len(sentences)))
    for query in shown:
        verdict = Text("agree", "green") if agree[query] else Text("DIFFER", "bold red")
        table.add_row(_line(sentences[query], "bold"), "", verdict)
        for rank, (other, wanted) in enumerate(zip(nearest[query].tolist(), expected[query].tolist(), strict=True), 1):
            similarity = f"{padded[query, other]:.4f}" if other == wanted else f"not {rank}."
            table.add_row(_line(f"{rank}. {sentences[other]}"), similarity, f"{packed[query, other]:.4f}")
        table.add_section()
    return table


def run(
    encoder: Encoder, sentences: list[str], attention: Attention, settings: Settings, console: Console, *,
    backend: str, as_json: bool = False,
) -> int:  # fmt: skip
    """Compares both encoders, prints tables or JSON, and returns the exit code: 0 if the encoders agree, else 1.
    attention: a function with the signature of `npu_fusion_attention`; backend: the name of its back end."""
    tokens = encoder.tokenize(sentences)
    lengths = [len(ids) for ids in tokens]
    with progress("encoding", 2 * (settings.runs + 1) * len(tokens), calm=True) as advance:
        result = compare(encoder, tokens, attention, settings, advance)
    padded, packed = cosines(result.padded), cosines(result.packed)
    agree = rankings_agree(padded, packed)
    agreeing, largest = int(agree.sum()), float(result.differences.max())
    failures = []
    if not largest <= TOLERANCE:
        failures.append(f"embeddings differ by {largest:.2g}, more than {TOLERANCE:g}")
    if agreeing < len(sentences):
        failures.append(f"nearest neighbours differ for {len(sentences) - agreeing} of {len(sentences)} sentences")
    if as_json:
        figures = {"seconds_padded": result.seconds_padded, "seconds_packed": result.seconds_packed, "backend": backend}
        counts = {"sentences": len(sentences), "tokens": sum(lengths), "agreeing": agreeing}
        show_json({**counts, "largest_difference": largest, **figures, "failures": failures})
        return 1 if failures else 0
    console.print(summary_table(encoder, sentences, lengths, result, settings, agreeing, backend), "")
    console.print(neighbour_table(sentences, padded, packed, agree, settings.seed))
    console.print(Text(f"FAILED: {'; '.join(failures)}." if failures else "Both encoders agree.", "bold"))
    return 1 if failures else 0


def chosen_backend(encoder: Encoder) -> str:
    """Returns the back end that the library chooses for this encoder's attention on the CPU."""
    heads = int(encoder.model.config.num_attention_heads)
    dim = encoder.width // heads
    problem = Problem(heads_q=heads, heads_kv=heads, dim_qk=dim, dim_v=dim, scale=dim**-0.5)
    return choose(problem, torch.device("cpu"), "auto")


def _line(text: str, style: str = "") -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")
