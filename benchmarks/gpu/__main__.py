"""`python -m benchmarks.gpu [--quick] [--only GROUP] [--output FOLDER]`: prints a table, draws a chart."""

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.gpu.cases import GROUPS
from benchmarks.gpu.timing import Row, matmul_rate, milliseconds, read_rate


def timed(call: Any) -> float | str:
    """Returns milliseconds, or the reason why an alternative does not support a case."""
    try:
        return milliseconds(call)
    except (RuntimeError, torch._dynamo.exc.TorchDynamoException) as error:
        torch.cuda.synchronize()
        return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]


def measure(row: Row, matmul: float, read: float) -> dict[str, Any]:
    """Times one row and returns its figures; an error in our function ends the run."""
    ours = milliseconds(row.ours)
    peers = {name: timed(call) for name, call in row.peers.items()}
    flops, rate = row.flops / ours * 1e3, row.bytes / ours * 1e3
    return {
        "group": row.group,
        "name": row.name,
        "ours_ms": ours,
        "tflops": flops / 1e12,
        "share_of_matmul": flops / matmul,
        "gbytes_per_s": rate / 1e9,
        "share_of_read": rate / read,
        "peers_ms": peers,
        "ratios": {name: ms / ours for name, ms in peers.items() if isinstance(ms, float)},
    }


def show(row: dict[str, Any]) -> None:
    """Prints one row of the table."""
    rate = f"{row['tflops']:7.1f} TFLOP/s {row['share_of_matmul']:5.2f} of matmul"
    if row["gbytes_per_s"]:
        rate = f"{row['gbytes_per_s']:7.0f} GB/s    {row['share_of_read']:5.2f} of read  "
    ratios = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in row["ratios"].items())
    print(f"{row['group']:14} {row['name']:24} {row['ours_ms']:9.3f} ms {rate}  {ratios}", flush=True)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws a bar chart of every alternative's time divided by ours."""
    from matplotlib.figure import Figure

    bars = [(f"{r['group']}: {r['name']} / {peer}", ratio) for r in rows for peer, ratio in r["ratios"].items()]
    figure = Figure(figsize=(9, 1 + 0.24 * len(bars)), layout="constrained")
    axes = figure.subplots()
    axes.bar_label(axes.barh([label for label, _ in bars], [ratio for _, ratio in bars]), fmt="%.2f", fontsize=8)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xlabel("peer's time / ours (right of the line: we are faster)")
    axes.invert_yaxis()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Parses the command line and measures the requested groups."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("--quick", action="store_true", help="short sequences")
    parser.add_argument("--only", choices=GROUPS, help="one group")
    parser.add_argument("--output", type=Path, default=Path("build/gpu"), help="folder of figures.json and figures.png")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch finds no GPU")
    torch.manual_seed(0)
    matmul, read = matmul_rate(), read_rate()
    chip = torch.cuda.get_device_name()
    print(f"{chip}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"measured: matmul {matmul / 1e12:.0f} TFLOP/s (bf16), read {read / 1e9:.0f} GB/s")
    rows: list[dict[str, Any]] = []
    for name, make in GROUPS.items():
        for row in make(options.quick) if options.only in (None, name) else ():
            rows.append(measure(row, matmul, read))
            show(rows[-1])
    options.output.mkdir(parents=True, exist_ok=True)
    facts = {"chip": chip, "date": datetime.date.today().isoformat(), "torch": torch.__version__}
    facts |= {"triton": triton.__version__, "matmul": matmul, "read": read}
    (options.output / "figures.json").write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    try:
        draw(rows, options.output / "figures.png")
    except ImportError:
        print("no chart: matplotlib is not installed")


if __name__ == "__main__":
    main()
