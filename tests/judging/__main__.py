"""Draws planted faults and right results, and prints the shares that the judge names and accuses.

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
from support.shares import faults, rights  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("faults", "right"):
        parser.add_argument(f"--{name}", type=int, default=0, metavar="COUNT")
    parser.add_argument("--noise", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "flex_attention called without")
    torch.set_num_threads(1)
    results = []
    for x in faults(options.faults, options.seed, options.noise):
        results.append(x)
        if not x.parameters or not x.family:
            print(
                f"{x.fault}: {x.verdict.verdict}: {'; '.join(map(str, x.verdict.mistakes)) or 'no mistake'}", flush=True
            )
    if results:
        detailed = [x for x in results if x.has_parameters]
        print(
            f"{len(results)} faults: {sum(x.family for x in results)} named first, "
            f"{sum(x.parameters for x in detailed)} of {len(detailed)} with their parameters, "
            f"{sum(x.wrongly for x in results)} named wrongly"
        )
    accused = 0
    for what, verdict in rights(options.right, options.seed):
        accused += verdict.verdict != "right"
        if verdict.verdict != "right":
            print(f"{what}: {verdict}", flush=True)
    if options.right:
        print(f"{options.right} right results: {accused} accused")


if __name__ == "__main__":
    main()
