"""`fusion-attention doctor --model`: lists the attention that computes each layer of a model of transformers."""

import itertools
import operator

import typer

from fusion_attention.cli.output import show_json


def show_paths(source: str, as_json: bool) -> int:
    """Prints, for each layer of a transformers model, the code that computes its attention; returns the exit code.
    source: a folder with config.json, such a file, a model type, or a model's name."""
    try:
        from fusion_attention.integrations.sparse_paths import configuration, paths
    except ImportError as error:
        typer.echo(f"doctor: --model: expected transformers, which cannot be imported ({error})", err=True)
        return 1
    try:
        result = paths(configuration(source))
    except (ValueError, OSError) as error:
        typer.echo(f"doctor: --model: {source}: {error}", err=True)
        return 1
    if as_json:
        show_json(result._asdict())
        return 1 if result.problems else 0
    typer.echo(f"{result.model}, {len(result.layers)} layers")
    spans: dict[str, list[str]] = {}
    for text, group in itertools.groupby(enumerate(result.layers), key=operator.itemgetter(1)):
        first, *_, last = [number for number, _ in group] * 2
        spans.setdefault(text, []).append(f"{first}" if first == last else f"{first} to {last}")
    for text, numbers in spans.items():
        typer.echo(f"  {', '.join(numbers)}: {text}")
    for note in result.notes:
        typer.echo(f"note: {note}")
    for problem in result.problems:
        typer.echo(f"PROBLEM: {problem}")
    return 1 if result.problems else 0
