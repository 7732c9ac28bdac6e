"""`fusion-attention demo`: encodes sentences with packed attention and with transformers' padded encoder."""

import typer


def demo(
    sentences: int = typer.Option(256, min=200, help="Number of docstrings to encode."),
    seed: int = typer.Option(0, min=0, help="Seed that selects the docstrings, and the queries that are shown."),
    runs: int = typer.Option(3, min=1, max=100, help="Timed runs of each encoder."),
    tokens_per_batch: int = typer.Option(2048, min=64, max=65536, help="Limit of tokens in a batch, with padding."),
    as_json: bool = typer.Option(False, "--json", help="Print the figures as JSON instead of tables."),
) -> None:
    """Encode real sentences with all-MiniLM-L6-v2: packed by npu_fusion_attention, and padded by transformers.

    Fails if the embeddings differ by more than 2e-5 or if nearest neighbours differ. Needs no network.
    """
    # Imported here, so that `fusion-attention --help` does not load torch.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.text import Text

    from fusion_attention.cli.demo_comparison import Settings, chosen_backend, draw_sentences, library_texts, run
    from fusion_attention.cli.encoder import DemoUnavailable, load_encoder, model_folder
    from fusion_attention.npu import npu_fusion_attention

    settings = Settings(seed, runs, tokens_per_batch)
    errors = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    # The progress bar is drawn only on a terminal.
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        try:
            folder = model_folder()
            loading = progress.add_task("loading the model", total=None)
            encoder = load_encoder(folder)
            progress.update(loading, total=1, completed=1)
            reading = progress.add_task("reading docstrings", total=1)
            texts = library_texts(advance=lambda fraction: progress.update(reading, completed=fraction))
            drawn = draw_sentences(encoder, texts, sentences, seed)
        except DemoUnavailable as error:
            progress.stop()
            errors.print(Text(f"fusion-attention demo: {error}"), soft_wrap=True)
            raise typer.Exit(1) from None
        code = run(
            encoder, drawn, npu_fusion_attention, settings, Console(), backend=chosen_backend(encoder),
            progress=progress, as_json=as_json,
        )  # fmt: skip
    raise typer.Exit(code)
