"""Runs test cases on worlds of several gloo processes, which are reused because starting a process takes seconds.

    def case(group, factor): return factor * dist.get_rank(group)     # function of a module; runs on every rank
    def test_it(worlds): assert worlds.run(3, case, 2) == [0, 2, 4]

One pool of processes serves worlds of every size: a world of n ranks is a group of the first n. torch names a new group
by the number of groups that a process has made, and ranks with different names of a group wait for ever. After cases of
fewer ranks these numbers differ, so every case starts with a new number.
"""

import itertools
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

LARGEST = 4
SECONDS = 60.0  # limit for a case, on a busy machine
TIMEOUT = 20.0  # timeout of the process groups
GROUPS = 1000  # largest number of groups that a case may make


class Failed(Exception):
    """The text of an exception on a rank."""


def text_of(call: Callable[[], Any], *errors: type[Exception]) -> str:
    """Returns type and text of the error that a call raises, or "" without one; errors: GroupError by default."""
    from fusion_attention.distributed import GroupError

    expected = errors or (GroupError,)
    try:
        call()
    except expected as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Worlds:
    """A pool of processes, which starts when it is first used and after a case that broke it."""

    def __init__(self, largest: int = LARGEST, timeout: float = TIMEOUT) -> None:
        self.largest, self.timeout = largest, timeout
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ends: list[Connection] = []
        self._cases = itertools.count(1)

    def run(self, world: int, case: Callable[..., Any], *args: Any, kill: Sequence[int] = ()) -> list[Any]:
        """Returns the results of case(group, *args) on each rank of a world; raises Failed if a rank raises.

        kill: ranks that are expected to die; their results are None, and the pool is started again.
        """
        if not self._processes:
            self._begin()
        request = pickle.dumps((world, next(self._cases) * GROUPS, case, args))
        try:
            for end in self._ends[:world]:
                end.send_bytes(request)
            until = time.monotonic() + SECONDS + self.timeout
            results = [self._result(rank, until, rank in kill) for rank in range(world)]
            failed = [f"rank {rank}:\n{result}" for rank, result in enumerate(results) if isinstance(result, Failed)]
            if failed:
                raise Failed("\n".join(failed))
            return results
        except BaseException:
            self.end()  # ranks may still be waiting
            raise
        finally:
            if kill:
                self.end()

    def _result(self, rank: int, until: float, dies: bool) -> Any:
        end, process = self._ends[rank], self._processes[rank]
        while not end.poll(0.05 if dies else 1):
            if process.poll() is not None and not end.poll():
                if dies:
                    return None
                raise AssertionError(f"rank {rank} died: exit code {process.returncode}")
            if time.monotonic() > until:
                raise AssertionError(f"rank {rank} hangs")
        try:
            return pickle.loads(end.recv_bytes())
        except EOFError:
            if dies:
                return None
            raise

    def _begin(self) -> None:
        folder = tempfile.mkdtemp()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        with Listener(family="AF_UNIX") as listener:
            for rank in range(self.largest):
                words = [str(listener.address), f"{folder}/store", rank, self.largest, self.timeout]
                command = [sys.executable, str(Path(__file__)), *map(str, words)]
                self._processes.append(subprocess.Popen(command, env=environment))
            ends = [listener.accept() for _ in self._processes]
        self._ends = [end for _, end in sorted(((end.recv(), end) for end in ends), key=lambda pair: int(pair[0]))]

    def end(self) -> None:
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes, self._ends = [], []


def member(address: str, store: str, rank: int, largest: int, timeout: float) -> None:
    """Runs cases in a process of the pool until its pipe is closed."""
    with Client(address, family="AF_UNIX") as end:
        end.send(rank)
        groups = _initialised(store, rank, largest, timeout)
        from torch.distributed.distributed_c10d import _world

        while True:
            try:
                world, _world.group_count, case, args = pickle.loads(end.recv_bytes())
            except EOFError:
                os._exit(0)  # no clean shutdown, because other ranks may be dead
            end.send_bytes(pickle.dumps(_outcome(case, groups[world], args)))


def _outcome(case: Callable[..., Any], group: Any, args: tuple[Any, ...]) -> Any:
    import torch

    torch.manual_seed(0)
    try:
        return case(group, *args)
    except BaseException as error:
        return Failed(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")


def _initialised(store: str, rank: int, largest: int, timeout: float) -> dict[int, Any]:
    """Returns the groups by size; memory for results contains NaN, as in every test."""
    import torch
    import torch.distributed as dist

    from fusion_attention import _native, memory

    torch.set_num_threads(1)
    _native.poison_scratch(True)
    ready = memory._ready

    def poisoned(fresh: torch.Tensor) -> torch.Tensor:
        return ready(fresh).fill_(torch.nan if fresh.is_floating_point() else -99)

    memory._ready = poisoned
    wait = timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=largest, timeout=wait)
    sizes = range(1, largest)
    return {n: dist.new_group(range(n), timeout=wait) for n in sizes} | {largest: dist.group.WORLD}


if __name__ == "__main__":
    # Cases and their results refer to this module by its name in tests, not as __main__.
    from support import worlds

    server, at, number, count, seconds = sys.argv[1:]
    worlds.member(server, at, int(number), int(count), float(seconds))
