"""`python -m fusion_attention.npu script.py ...` runs a program that was written for Ascend NPUs, without changes.

`torchrun -m fusion_attention.npu script.py` does so on every rank. Processes that the program starts can import
torch_npu too (npu/subprocesses/sitecustomize.py).
"""

import argparse
import importlib.util
import inspect
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from fusion_attention.npu import install
from fusion_attention.npu.subprocesses import export

DEFAULT = inspect.signature(install).parameters["device"].default


def main(arguments: Sequence[str] | None = None) -> None:
    """Makes `import torch_npu` work by install(), then runs the script or module that the command line names."""
    parser = argparse.ArgumentParser(
        "python -m fusion_attention.npu", description="Run a program for Ascend NPUs without an NPU."
    )
    parser.add_argument("--device", default=DEFAULT, help="Argument `device` of npu.install() (default: %(default)s).")
    parser.add_argument("--strict", action="store_true", help="Calls that the chip does not support are errors.")
    parser.add_argument(
        "-m", dest="module", action="store_true", help="The program is the name of a module, as for python -m."
    )
    parser.add_argument("program", help="A script, or with -m a module.")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="Arguments of the program.")
    given = parser.parse_args(arguments)
    if given.module:
        there = importlib.util.find_spec(given.program.partition(".")[0]) is not None
    else:
        there = Path(given.program).exists()
    if not there:
        parser.error(f"no such {'module' if given.module else 'file'}: {given.program}")
    try:
        install(given.device, strict=given.strict)
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    export(given.device, given.strict)
    sys.argv = [given.program, *given.arguments]
    if given.module:
        runpy.run_module(given.program, run_name="__main__", alter_sys=True)
    else:
        if not getattr(sys.flags, "safe_path", False):  # python -P adds no folder
            sys.path[0] = str(Path(given.program).resolve().parent)
        runpy.run_path(given.program, run_name="__main__")


if __name__ == "__main__":
    main()
