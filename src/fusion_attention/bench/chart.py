"""draw(): writes a benchmark run's ratios, peer's time / this library's, as a bar chart with a line at equal speed."""

from pathlib import Path

from fusion_attention.bench.pair import Timing


def draw(timings: list[Timing], path: Path) -> None:
    """Writes a bar chart of benchmark timings to a PNG file."""
    from matplotlib.figure import Figure  # an optional dependency (extra "bench")

    figure = Figure(figsize=(9, 1 + 0.24 * len(timings)), layout="constrained")
    axes = figure.subplots()
    groups = list(dict.fromkeys(t.group for t in timings))
    bars = axes.barh(
        [f"{t.group}: {t.name} / {t.peer_name}" for t in timings],
        [t.ratio for t in timings],
        color=[f"C{groups.index(t.group)}" for t in timings],
    )
    axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlabel("peer's time / time of this library (right of the line: this library is faster)")
    axes.tick_params(axis="y", labelsize=8)
    axes.invert_yaxis()
    figure.savefig(path, dpi=120)
