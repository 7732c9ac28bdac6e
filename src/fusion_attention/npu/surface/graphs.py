"""torch.npu.NPUGraph on a host: a capture runs operators and records them, a replay runs the recorded operators again.

A replay reads and writes the tensors of the capture, as on the chip, so a program fills the captured inputs, replays,
and reads the captured outputs.
"""

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fusion_attention.npu.surface.device_module import Event

_READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal"}
_IDS = itertools.count(1)
_THREAD = threading.local()


class Tasks:
    """A group of operators in a graph, made by graph_task_group_end(), which a program can replace between replays."""

    def __init__(self) -> None:
        self.steps: list[Any] = []


class ExternalEvent(Event):
    """An event at which a graph's replays wait until the program records it, for example after replacing operators."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        self.waiting: list[Callable[[], None]] = []

    def record(self, stream: Any = None) -> None:
        """Records the event; replays that wait for it continue; `stream` has no effect."""
        super().record(stream)
        waiting, self.waiting = self.waiting, []
        if waiting:
            self.moment = None  # each record continues one replay
        for go_on in waiting:
            go_on()

    def wait(self, stream: Any = None) -> None:
        """During a capture, records that replays wait here for the event; else does nothing."""
        if (recorder := _recorder()) is not None:
            recorder.tasks[-1].steps.append(self)

    def reset(self, stream: Any = None) -> None:
        """Marks the event as not recorded; does nothing during a capture, since a replay resets the event itself."""
        if _recorder() is None:
            self.moment = None


class _Recorder(TorchDispatchMode):
    """A TorchDispatchMode that runs every operator and records it as a step of a graph; an operator that reads a
    tensor's values into Python raises RuntimeError."""

    def __init__(self, tasks: Tasks | None = None) -> None:
        super().__init__()
        self.replaced, self.tasks = tasks, [Tasks()]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name in _READS:
            raise RuntimeError(
                f"torch.npu.NPUGraph: expected no operator that reads a tensor's content into Python during a capture, "
                f"got {name}: a replay would not read it again (use a tensor, or read it before the capture)"
            )
        result = func(*args, **kwargs)
        returns = func._schema.returns
        if any(one.alias_info is not None and not one.alias_info.is_write for one in returns):
            return result  # views of captured tensors stay valid
        if not name.startswith(("aten::empty", "aten::new_empty")):
            given = {id(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
            self.tasks[-1].steps.append((func, args, kwargs, result, given))
        return result


def _recorder() -> _Recorder | None:
    return getattr(_THREAD, "recorder", None)


class NPUGraph:
    """The operators between capture_begin() and capture_end(), which replay() runs again.

    Example:
        >>> x, graph = torch.zeros(3), NPUGraph()
        >>> with capture(graph):
        ...     y = x * 2 + 1
        >>> graph.replay(), y.tolist()
        (None, [1.0, 1.0, 1.0])
        >>> _ = x.fill_(4)
        >>> graph.replay(), y.tolist()
        (None, [9.0, 9.0, 9.0])
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        self._steps: list[Any] | None = None
        self._recorder: _Recorder | None = None
        self._pool = graph_pool_handle()

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **_: Any) -> None:
        """Starts to record the operators of this thread; the parameters have no effect.

        Raises:
            RuntimeError: this thread is capturing already.
        """
        if _recorder() is not None:
            raise RuntimeError("torch.npu.NPUGraph: capture_begin: expected no active capture, got one in this thread")
        self._pool = pool or self._pool
        self._recorder = _THREAD.recorder = _Recorder()
        self._recorder.__enter__()

    def capture_end(self) -> None:
        """Ends the capture; the operators that were recorded can be replayed.

        Raises:
            RuntimeError: this graph is not capturing in this thread.
        """
        if self._recorder is None or _recorder() is not self._recorder:
            raise RuntimeError(
                "torch.npu.NPUGraph: capture_end: expected a capture of this graph in this thread, got none"
            )
        self._recorder.__exit__(None, None, None)
        self._steps, self._recorder, _THREAD.recorder = self._recorder.tasks[0].steps, None, None

    def replay(self) -> None:
        """Runs the captured operators; at an ExternalEvent that is not recorded, stops until it is recorded.

        Raises:
            RuntimeError: nothing was captured.
        """
        if self._steps is None:
            raise RuntimeError("torch.npu.NPUGraph: replay: expected a captured graph, got none")
        _run(_flat(self._steps))

    def reset(self) -> None:
        """Deletes the captured operators; replay() then raises an error."""
        self._steps = None

    def pool(self) -> Any:
        """The handle of this graph's memory pool, for graphs that share it."""
        return self._pool

    def enable_debug_mode(self) -> None:
        """Does nothing: there is no graph of the chip to dump."""

    def debug_dump(self, path: Any = None) -> None:
        """Not supported: there is no graph of the chip.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "torch.npu.NPUGraph: debug_dump: only the chip has graphs to dump (torch.profiler shows a replay)"
        )

    def update(self, cpu_update_input: Any) -> None:
        """Not supported: captured operators contain the lengths of their calls.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "torch.npu.NPUGraph: update: expected tasks, got lengths (record the calls again between "
            "torch.npu.graph_task_update_begin and graph_task_update_end)"
        )


def _flat(steps: list[Any]) -> Iterator[Any]:
    """Yields the recorded steps in order, those of task groups included; a group is read when it is reached, so that it
    may be replaced before."""
    for step in steps:
        if isinstance(step, Tasks):
            yield from _flat(step.steps)
        else:
            yield step


def _run(steps: Iterator[Any]) -> None:
    """Runs recorded steps again; at an event that is not recorded it stops, and the event's record() runs the rest."""
    with torch.no_grad():
        for step in steps:
            if isinstance(step, ExternalEvent):
                if step.moment is None:
                    step.waiting.append(lambda: _run(steps))
                    return
                step.moment = None
                continue
            func, args, kwargs, result, given = step
            for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                if not isinstance(old, torch.Tensor) or id(old) in given or old is new:
                    continue
                if old.shape != new.shape:
                    raise RuntimeError(
                        f"torch.npu.NPUGraph: replay: expected {func._schema.name} to return {list(old.shape)} as when "
                        f"it was captured, got {list(new.shape)} (a graph has one shape)"
                    )
                old.copy_(new)


class capture:
    """The context manager `with torch.npu.graph(graph):`, which captures its block."""

    def __init__(
        self, npu_graph: NPUGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global", **_: Any
    ) -> None:
        self.graph, self.pool = npu_graph, pool

    def __enter__(self) -> None:
        self.graph.capture_begin(self.pool)

    def __exit__(self, kind: Any, *_: object) -> None:
        self.graph.capture_end()
        if kind is not None:
            self.graph.reset()


def graph_pool_handle() -> tuple[int, int]:
    """Returns a new handle of a memory pool; on a host it has no effect, because captures share no memory."""
    return (0, next(_IDS))


def is_current_stream_capturing() -> bool:
    """True if this thread is capturing."""
    return _recorder() is not None


def make_graphed_callables(callables: Any, sample_args: Any = (), *_: Any, **__: Any) -> Any:
    """Returns the callables unchanged: graphs are not faster on a host."""
    return callables


def _capturing(what: str) -> _Recorder:
    """Returns the _Recorder of this thread's capture, or raises RuntimeError; what: the caller's name."""
    recorder = _recorder()
    if recorder is None:
        raise RuntimeError(f"torch.npu.{what}: expected an active capture in this thread, got none")
    return recorder


def graph_task_group_begin(stream: Any = None) -> None:
    """Starts a group of operators in a capture, which graph_task_update_begin() can replace; `stream` has no effect."""
    recorder = _capturing("graph_task_group_begin")
    tasks = Tasks()
    recorder.tasks[-1].steps.append(tasks)
    recorder.tasks.append(tasks)


def graph_task_group_end(stream: Any = None) -> Tasks:
    """Ends the group that graph_task_group_begin() started, and returns it, for graph_task_update_begin()."""
    recorder = _capturing("graph_task_group_end")
    if len(recorder.tasks) == 1:
        raise RuntimeError("torch.npu.graph_task_group_end: expected graph_task_group_begin before it")
    return recorder.tasks.pop()


def graph_task_update_begin(stream: Any, handle: Tasks) -> None:
    """Starts to replace the operators of the group `handle`: operators that this thread calls until
    graph_task_update_end() take their place, and also run."""
    if not isinstance(handle, Tasks):
        raise RuntimeError(
            f"torch.npu.graph_task_update_begin: expected a result of graph_task_group_end, got {handle!r}"
        )
    if _recorder() is not None:
        raise RuntimeError("torch.npu.graph_task_update_begin: expected no active capture in this thread, got one")
    recorder = _THREAD.recorder = _Recorder(handle)
    recorder.__enter__()


def graph_task_update_end(stream: Any = None) -> None:
    """Ends the replacement of tasks that graph_task_update_begin() started."""
    recorder = _recorder()
    if recorder is None or recorder.replaced is None:
        raise RuntimeError(
            "torch.npu.graph_task_update_end: expected graph_task_update_begin before it, in this thread"
        )
    recorder.__exit__(None, None, None)
    recorder.replaced.steps, _THREAD.recorder = recorder.tasks[0].steps, None


NAMES: dict[str, Any] = {
    "NPUGraph": NPUGraph,
    "graph": capture,
    "ExternalEvent": ExternalEvent,
    **{
        one.__name__: one
        for one in (
            graph_pool_handle,
            is_current_stream_capturing,
            make_graphed_callables,
            graph_task_group_begin,
            graph_task_group_end,
            graph_task_update_begin,
            graph_task_update_end,
        )
    },
}
