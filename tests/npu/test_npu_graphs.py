"""torch.npu.NPUGraph on a host: a replay reads current inputs, writes the captured outputs and equals eager calls."""

import importlib
from typing import Any

import pytest
import torch
from support.bits import same_bits

from fusion_attention import npu

pytestmark = pytest.mark.usefixtures("torch_npu")


def device() -> Any:
    return importlib.import_module("torch_npu").npu


def captured(graph: Any, call: Any) -> Any:
    with device().graph(graph, pool=None, stream=None):
        return call()


def test_graph_replay_into_same_outputs_bitwise_equals_eager_call() -> None:
    x = torch.randn(1, 6, 2, 16)

    def call() -> tuple[torch.Tensor, ...]:
        rows = npu.npu_fusion_attention(x, x * 2, x, 2, "BSND", scale=0.25)[0]
        into = torch.empty(3, 12)
        into[1:].copy_(rows.flatten()[:24].view(2, 12))
        into[0] = x.sum()
        total = torch.zeros(3).add_(into.sum(1)).mul_(2)
        return rows, into, total, total.view(3, 1).expand(3, 2)

    graph = device().NPUGraph()
    result = captured(graph, call)
    addresses = [t.data_ptr() for t in result]
    for _ in range(2):
        x.normal_()
        graph.replay()
        for got, want in zip(result, call(), strict=True):
            same_bits(got, want)
    assert [t.data_ptr() for t in result] == addresses


def test_replayed_training_step_bitwise_equals_eager_step() -> None:
    weight, x = torch.randn(4, 4), torch.randn(3, 4)
    ours, eager = (torch.nn.Parameter(weight.clone()) for _ in range(2))

    def step(parameter: torch.nn.Parameter) -> torch.Tensor:
        parameter.grad = None
        loss = (x @ parameter).square().mean()
        loss.backward()
        with torch.no_grad():
            assert parameter.grad is not None
            parameter -= 0.1 * parameter.grad
        return loss.detach()

    graph = device().NPUGraph()
    loss = captured(graph, lambda: step(ours))
    same_bits(loss, step(eager))
    for _ in range(3):
        x.normal_()
        graph.replay()
        same_bits(loss, step(eager))
    same_bits(ours.detach(), eager.detach())


def decode(pages: torch.Tensor, query: torch.Tensor, lengths: list[int], out: list[torch.Tensor] | None) -> Any:
    table = torch.tensor([[0, 3], [5, 1]], dtype=torch.int32)
    call: dict[str, Any] = {"num_heads": 4, "num_key_value_heads": 1, "scale": 0.125, "block_table": table}
    call |= {"input_layout": "TND", "actual_seq_lengths": [1, 2], "actual_seq_lengths_kv": lengths, "block_size": 16}
    if out is None:
        return npu.npu_fused_infer_attention_score(query, pages, pages, **call)[0]
    workspace = npu._npu_fused_infer_attention_score_get_max_workspace(query, pages, pages, **call)
    npu.npu_fused_infer_attention_score.out(query, pages, pages, **call, workspace=workspace, out=out)
    return None


@pytest.mark.parametrize("first", ["update", "replay"])
def test_graph_task_update_changes_decode_lengths_of_a_replay(first: str) -> None:
    """Serving programs change lengths of a captured call; a started replay waits for them at an ExternalEvent."""
    pages, query = torch.randn(8, 16, 64), torch.randn(2, 4, 64)
    out = [torch.empty(2, 4, 64), torch.empty(0)]
    graph, event, stream = device().NPUGraph(), device().ExternalEvent(), device().Stream()
    with device().graph(graph):
        scaled = query * 2
        event.wait(stream)
        event.reset(stream)
        device().graph_task_group_begin(stream)
        decode(pages, scaled, [20, 31], out)
        handle = device().graph_task_group_end(stream)
        after = out[0] + 1
    for lengths in ([21, 32], [22, 30]):
        query.normal_()

        def update(lengths: list[int]) -> None:
            device().graph_task_update_begin(stream, handle)
            decode(pages, scaled, lengths, out)
            device().graph_task_update_end(stream)
            event.record(stream)

        steps = [graph.replay, lambda lengths=lengths: update(lengths)]
        for act in steps if first == "replay" else reversed(steps):
            act()
        same_bits(after, decode(pages, query * 2, lengths, None) + 1)


def test_graph_capture_refuses_host_reads_and_data_dependent_shapes() -> None:
    graph = device().NPUGraph()
    with pytest.raises(RuntimeError, match=r"expected a captured graph, got none"):
        graph.replay()
    for read in (lambda x: x.sum().item(), lambda x: x.nonzero(), lambda x: bool((x > 0).all())):
        with pytest.raises(RuntimeError, match=r"a replay would not read it again"):
            captured(graph, lambda read=read: read(torch.ones(3)))
        assert not device().is_current_stream_capturing()
        with pytest.raises(RuntimeError, match="got none"):
            graph.replay()
    assert torch.ones(3).sum().item() == 3
    x = torch.ones(3)
    captured(graph, lambda: x[x > 0])
    x[0] = -1
    with pytest.raises(RuntimeError, match=r"expected aten::index to return \[3\] .* got \[2\]"):
        graph.replay()
    for missing in (lambda: graph.update(cpu_update_input=[{}]), lambda: graph.debug_dump("x")):
        with pytest.raises(NotImplementedError, match=r"torch.npu.NPUGraph: "):
            missing()


def test_graph_capture_and_task_calls_in_wrong_order_raise() -> None:
    graph, npu_ = device().NPUGraph(), device()
    with pytest.raises(RuntimeError, match="expected a capture of this graph"):
        graph.capture_end()
    for call in (lambda: npu_.graph_task_group_begin(None), lambda: npu_.graph_task_group_end(None)):
        with pytest.raises(RuntimeError, match="expected an active capture"):
            call()
    with pytest.raises(RuntimeError, match="expected graph_task_update_begin before it"):
        npu_.graph_task_update_end(None)
    with pytest.raises(RuntimeError, match="expected a result of graph_task_group_end, got 3"):
        npu_.graph_task_update_begin(None, 3)
    graph.capture_begin()
    assert npu_.is_current_stream_capturing()
    with pytest.raises(RuntimeError, match="expected no active capture"):
        npu_.NPUGraph().capture_begin()
    with pytest.raises(RuntimeError, match="expected a capture of this graph"):
        npu_.NPUGraph().capture_end()
    with pytest.raises(RuntimeError, match="expected graph_task_group_begin before it"):
        npu_.graph_task_group_end(None)
    graph.capture_end()
    graph.replay()
    graph.reset()
    with pytest.raises(RuntimeError, match="got none"):
        graph.replay()
    assert npu_.make_graphed_callables(torch.relu, (torch.ones(2),)) is torch.relu
    assert npu_.graph_pool_handle() != npu_.graph_pool_handle()
