"""`fusion-attention demo`: encodes sentences with packed attention and with transformers' padded encoder."""

import typer

from fusion_attention.cli.output import progress


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

    from fusion_attention.cli.demo_comparison import Settings, chosen_backend, draw_sentences, library_texts, run
    from fusion_attention.cli.encoder import DemoUnavailable, load_encoder, model_folder
    from fusion_attention.npu import npu_fusion_attention

    try:
        with progress("loading the model", None):
            encoder = load_encoder(model_folder())
        with progress("reading docstrings", 1) as advance:
            drawn = draw_sentences(encoder, library_texts(advance=advance), sentences, seed)
    except DemoUnavailable as error:
        typer.echo(f"fusion-attention demo: {error}", err=True)
        raise typer.Exit(1) from None
    settings, backend = Settings(seed, runs, tokens_per_batch), chosen_backend(encoder)
    raise typer.Exit(run(encoder, drawn, npu_fusion_attention, settings, Console(), backend=backend, as_json=as_json))
