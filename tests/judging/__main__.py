"""Draw planted faults and right results, and print the fractions that the judge names and that it falsely rejects.

python -m tests.judging --faults 200                 # of all dtypes
python -m tests.judging --faults 200 --noise 1.5     # bfloat16 with roundings 1.5 times as large
python -m tests.judging --right 1000
"""

import argparse
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.drawn_faults import faults, rights


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _faults(count: int, seed: int, noise: float) -> None:
    results = []
    for x in faults(count, seed, noise):
        results.append(x)
        if not x.family or (x.has_parameters and not x.parameters):
            _write(f"{x.fault}: {x.verdict.verdict}: {'; '.join(map(str, x.verdict.mistakes)) or 'no mistake'}")
    detailed = [x for x in results if x.has_parameters]
    _write(
        f"{len(results)} faults: {sum(x.family for x in results)} named first, "
        f"{sum(x.parameters for x in detailed)} of {len(detailed)} with their parameters, "
        f"{sum(x.wrongly for x in results)} named wrongly"
    )


def _right(count: int, seed: int) -> None:
    accused = 0
    for what, result in rights(count, seed):
        if result.verdict != "right":
            accused += 1
            _write(f"{what}: {result}")
    _write(f"{count} right results: {accused} accused")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("faults", "right"):
        parser.add_argument(f"--{name}", type=int, default=0, metavar="COUNT")
    parser.add_argument("--noise", type=float, default=1.0, help="of bfloat16, in a good kernel's")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "flex_attention called without")
    torch.set_num_threads(1)
    if options.faults:
        _faults(options.faults, options.seed, options.noise)
    if options.right:
        _right(options.right, options.seed)


if __name__ == "__main__":
    main()
