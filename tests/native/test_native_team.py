"""Threads: no thread is created after all have started; a signal ends a long call soon, and the next call is right;
children of fork() compute; memory for many threads may be missing.

Programs that send signals, fork or count threads run in a separate interpreter.
"""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from support.bits import same_bits
from support.families import families
from support.native_decode import plain_case
from support.scripts import python

from fusion_attention.backends import cpu
from fusion_attention.ir.mask import Band
from fusion_attention.ir.problem import Extents, Problem
from fusion_attention.plan import plan


def run(program: str) -> str:
    """Returns the output of a program that runs in a separate interpreter."""
    done = python("-c", BEGIN + program)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


BEGIN = f"import sys\nsys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"  # support lies there


CREATED = """
import os, torch
from support.families import families
torch.set_num_threads(5)
tensor = torch.randn(1 << 20)
calls = [call for rows, heads in ((9, 2), (70, 4), (300, 6)) for call in families(rows, 3000, heads).values()]
def everything():
    for call in calls:
        call()
        (tensor + 1).sum()
        now = set(os.listdir("/proc/self/task"))
        yield now
before = set().union(*everything())
created = set()
for _ in range(300 // len(calls)):
    for now in everything():
        created |= now - before
print(len(created))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_calls_alternating_with_torch_operations_never_create_threads() -> None:
    assert run(CREATED) == "0\n"


INTERRUPTED = """
import os, signal, threading, time, torch
from support.bits import same_bits
from support.families import families
torch.set_num_threads(2)
small = families(40, 700)
want = {name: call() for name, call in small.items()}
sent = []
def send():
    sent.append(time.perf_counter())
    os.kill(os.getpid(), signal.SIGINT)
for name, call in families(16384, 1 << 25).items():
    timer = threading.Timer(0.2, send)
    timer.start()
    try:
        call()
        print(name, "was not interrupted")
    except KeyboardInterrupt:
        late = time.perf_counter() - sent[-1]
        if late > 0.7:
            print(name, "was interrupted", late, "s late")
    timer.join()
    same_bits(small[name](), want[name], name)
print("done")
"""


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("FUSION_ATTENTION_CPU") == "amx_model", reason="the model takes longer")
def test_signal_interrupts_long_call_and_next_call_is_correct() -> None:
    """Each call takes 1.5 s or more if it is not interrupted."""
    assert run(INTERRUPTED) == "done\n"


HANDLED = """
import os, signal, threading, torch
from support.bits import same_bits
from support.families import families
torch.set_num_threads(2)
rows = 700 if os.environ.get("FUSION_ATTENTION_CPU") == "amx_model" else 4096
small, long = families(40, 700), families(rows, 1 << 23)["their gradients"]
want, wanted, handled = {name: call() for name, call in small.items()}, long(), []
def handler(number, frame):
    handled.append({name: call() for name, call in small.items()})
signal.signal(signal.SIGINT, handler)
timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
timer.start()
same_bits(long(), wanted)
timer.join()
same_bits(handled, [want])
print("done")
"""


@pytest.mark.slow
def test_signal_handler_that_returns_may_compute_and_call_continues() -> None:
    assert run(HANDLED) == "done\n"


FORKED = """
import os, signal, warnings, torch
from support.bits import same_bits
from support.families import families
from fusion_attention.cli.doctor import FORKED_NOTE, facts
calls = families(40, 700)
want = {name: call() for name, call in calls.items()}
def told():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        same_bits({name: call() for name, call in calls.items()}, want)
    return [w.category.__name__ for w in caught if "child of fork" in str(w.message)], FORKED_NOTE in facts()["notes"]
torch.set_num_threads(4)
print(told(), flush=True)
if os.fork() == 0:
    signal.alarm(60)
    torch.set_num_threads(1)  # with one thread a child is not slower
    print(told())
    torch.set_num_threads(4)
    print(told(), told()[0], flush=True)
    os._exit(0)
os.wait()
print(told())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="has no fork")
def test_forked_child_computes_same_bits_and_warns_once_about_running_on_one_thread() -> None:
    parent = "([], False)\n"
    assert run(FORKED) == f"{parent}([], True)\n(['RuntimeWarning'], True) []\n{parent}"


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("value", "says"), [("always", ""), ("never", "expected 'always' or nothing, got 'never'")])
def test_team_environment_variable_accepts_always_and_refuses_other_values(
    value: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSION_ATTENTION_TEAM", value)
    call = "from support.families import families\ntry: families(40, 700)['backward']()\n"
    assert says in run(call + "except ValueError as error: print(error)\n")


ANOTHER = """
import ctypes, os, sys
ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
import torch
from support.families import families
torch.set_num_threads(7)
torch.randn(1 << 22).add(1).sum()
threads = len(os.listdir("/proc/self/task"))
for call in families(300, 3000, 8).values():
    call()
print(len(os.listdir("/proc/self/task")) - threads)
"""


RUNTIMES = [path for folder in sys.path for path in Path(folder).glob("*.libs/libgomp-*.so*")]


@pytest.mark.skipif(not RUNTIMES, reason="no package brings a libgomp of its own")
def test_libgomp_loaded_before_torch_is_shared_by_torch_and_native_core() -> None:
    """The first libgomp is loaded with global symbols: torch's calls go there, not to torch's copy."""
    command = [sys.executable, "-c", BEGIN + ANOTHER, str(RUNTIMES[0])]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "0\n"


SHORT = """
import resource, torch
from support.bits import same_bits
from support.families import families
call = families(2000, 20, 16, torch.float32)["backward"]
torch.set_num_threads(1)
want = call()
call()  # memory for results is there
torch.set_num_threads(64)
families(70, 20, 64)["backward"]()  # and all threads, with what each of them has
with open("/proc/self/statm") as file:
    taken = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (32 << 20),) * 2)  # where 64 threads need 65 MiB
got = call()
torch.set_num_threads(1)  # comparing asks for memory in each thread
same_bits(got, want)
print("done")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_too_little_memory_for_many_threads_falls_back_to_fewer_threads() -> None:
    assert run(SHORT) == "done\n"


def test_plan_update_raises_while_plan_runs() -> None:
    lengths = np.array([1 << 14])
    band = Band.causal().resolve(lengths * 0 + 1, lengths)
    case = plain_case(Problem(8, 2, 128, 128, dtype="bfloat16"), (1,), (1 << 14,))
    extents = Extents(lengths * 0 + 1, lengths, *band, lengths * 0)
    mine = plan(case.problem, extents, torch.device("cpu"), updatable=True)
    operands = case.operands()
    mine.run(operands)
    want, stop = operands.out.keep[0].clone(), threading.Event()

    def again() -> None:
        while not stop.is_set():
            mine.run(operands)

    def update_often() -> None:
        while True:
            mine.update(lengths)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(again)
        with pytest.raises(ValueError, match="cannot be updated while it runs"):
            update_often()
        stop.set()
        running.result()
    same_bits(operands.out.keep[0], want)
    mine.update(lengths - 1)
    assert mine.extents.kv_len.tolist() == (lengths - 1).tolist()


def test_1000_threads_give_same_bits_and_zero_threads_raise() -> None:
    call = families(20, 900)["forward"]
    want = call()
    torch.set_num_threads(1000)
    same_bits(call(), want)
    torch.set_num_threads(1)
    case = plain_case(Problem(2, 1, 16, 16), (1,), (30,))
    schedule = cpu.schedule(case.problem, case.call.extents, "attention_forward")
    with pytest.raises(ValueError, match="fusion_attention: native core: threads: expected at least 1, got 0"):
        schedule.decode.run(0, ())


HANDLER = """
import os, signal, threading, numpy as np
os.environ["FUSION_ATTENTION_CPU"] = "base"  # takes longer
import torch
from support.bits import same_bits
from support.native_decode import plain_case
from fusion_attention.ir.mask import Band
from fusion_attention.ir.problem import Extents, Problem
from fusion_attention.plan import plan
torch.set_num_threads(1)
keys = 1 << 18
lengths = np.array([keys])
case = plain_case(Problem(16, 1, 128, 128), (1,), (keys,))
extents = Extents(lengths * 0 + 1, lengths, *Band.causal().resolve(lengths * 0 + 1, lengths), lengths * 0)
mine, said = plan(case.problem, extents, torch.device("cpu"), updatable=True), []
operands = case.operands()
mine.run(operands)
want = operands.out.keep[0].clone()
def handler(number, frame):
    try:
        mine.update(lengths - 1)
    except ValueError as error:
        said.append(str(error))
signal.signal(signal.SIGUSR1, handler)
running = threading.Event()
def often():
    while not running.wait(0.01):
        os.kill(os.getpid(), signal.SIGUSR1)
sender = threading.Thread(target=often)
sender.start()
while not said:
    mine.run(operands)
    mine.update(lengths)  # one of the handler's came between two runs
running.set(), sender.join()
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
mine.update(lengths)
mine.run(operands)
same_bits(operands.out.keep[0], want)
print({text for text in said if "cannot be updated while it runs" not in text})
"""


@pytest.mark.slow
def test_plan_update_in_signal_handler_raises_while_plan_runs() -> None:
    assert run(HANDLER) == "set()\n"
