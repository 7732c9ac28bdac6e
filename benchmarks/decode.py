"""Defines a decode step of one query token per sequence over a long cache, and its alternatives on a CPU.

Peers: torch's SDPA with the heads of a group folded into query rows, SDPA with enable_gqa, a gather of pages before
SDPA, and onnxruntime's GroupQueryAttention where it is installed. decode_rows.py measures them.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from benchmarks.kv_cache_calls import Case, operands_of
from fusion_attention import npu
from fusion_attention.bench.pair import seconds
from fusion_attention.ir.memory_views import PagedView
from fusion_attention.memory import zeros

READ_BYTES = 1 << 28


def step_of(name: str, batch: int = 8, heads_kv: int = 8, group: int = 4, keys: int = 4096, **more: Any) -> Case:
    """Returns a decode step; name: kind of the cache, such as "bf16"."""
    kind = {"bf16": "bfloat16", "fp16": "float16"}.get(name, name)
    return Case((1,) * batch, (keys,) * batch, heads_kv, heads_kv * group, kind=kind, **more)


def called(c: Case) -> Callable[[], torch.Tensor]:
    """Returns a function that computes one step with the public function; stored integers use scales per channel in
    the query's dtype."""
    o = operands_of(c)
    assert isinstance(o.k, PagedView)
    assert isinstance(o.v, PagedView)
    scale = torch.full((2, c.heads_kv, 1, c.dim), 0.02, dtype=c.problem.torch_dtype) if c.stored else None
    return functools.partial(
        npu.npu_incre_flash_attention, o.q.keep[0], o.k.pool, o.v.pool, num_heads=c.heads,
        num_key_value_heads=c.heads_kv, scale_value=c.dim**-0.5, input_layout="BNSD", block_table=o.k.table,
        block_size=c.page, actual_seq_lengths=list(c.kv_len), antiquant_scale=scale,
    )  # fmt: skip


def reader(small_pages: bool) -> Callable[[], object]:
    """Returns a function that reads READ_BYTES with torch's threads; small_pages: from memory without huge pages."""
    shape = (READ_BYTES // 8,)
    memory = torch.empty(shape, dtype=torch.int64).zero_() if small_pages else zeros(shape, torch.int64)
    # On AMD's processors torch's max() reads faster, on Intel's its sum().
    ways = (memory.max, memory.sum)
    return min(ways, key=lambda read: min(seconds(read) for _ in range(5)))


def onnx_peer(c: Case) -> Callable[[], object] | None:
    """Returns a function that runs onnxruntime's GroupQueryAttention on a float32 cache; None if not installed."""
    try:
        import onnxruntime
        from onnx import TensorProto, helper
    except ImportError:
        return None
    batch, keys = len(c.kv_len), c.kv_len[0]
    kind = TensorProto.FLOAT
    cache = [batch, c.heads_kv, keys, c.dim]
    inputs = {
        "q": [batch, 1, c.heads * c.dim], "k": [batch, 1, c.heads_kv * c.dim], "v": [batch, 1, c.heads_kv * c.dim],
        "past_k": cache, "past_v": cache,
    }  # fmt: skip
    names = [*inputs, "seqlens_k", "total"]
    node = helper.make_node(
        "GroupQueryAttention", names, ["out", "present_k", "present_v"], domain="com.microsoft",
        num_heads=c.heads, kv_num_heads=c.heads_kv,
    )  # fmt: skip
    values = [helper.make_tensor_value_info(name, kind, shape) for name, shape in inputs.items()]
    values += [helper.make_tensor_value_info("seqlens_k", TensorProto.INT32, [batch])]
    values += [helper.make_tensor_value_info("total", TensorProto.INT32, [1])]
    outputs = [helper.make_tensor_value_info("out", kind, inputs["q"])]
    outputs += [helper.make_tensor_value_info(name, kind, cache) for name in ("present_k", "present_v")]
    graph = helper.make_graph([node], "decode", values, outputs)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # else its threads slow the other calls
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    binding = session.io_binding()  # past and present keys share memory, as in a decode loop
    shared = {name: onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(cache, np.float32)) for name in ("k", "v")}
    for name, shape in inputs.items():
        value = shared[name[-1]] if name.startswith("past") else torch.randn(shape).numpy()
        bind = binding.bind_ortvalue_input if name.startswith("past") else binding.bind_cpu_input
        bind(name, value)
    binding.bind_cpu_input("seqlens_k", np.full(batch, keys - 1, np.int32))
    binding.bind_cpu_input("total", np.array([keys], np.int32))
    binding.bind_output("out")
    for name in ("k", "v"):
        binding.bind_ortvalue_output(f"present_{name}", shared[name])
    return lambda: session.run_with_iobinding(binding)


def peers(c: Case) -> dict[str, Callable[[], object]]:
    """Returns the alternatives by name: on the contiguous cache, and on pages with a gather before the computation."""
    if c.stored or c.shares:
        return {}
    o = operands_of(c)
    q = o.q.keep[0]
    folded = q.view(len(c.kv_len), c.heads_kv, -1, c.dim)
    k, v = (torch.stack([view.sequence(b, c.heads_kv, n) for b, n in enumerate(c.kv_len)]) for view in (o.k, o.v))
    results: dict[str, Callable[[], object]] = {
        "SDPA folded": lambda: sdpa(folded, k, v),
        "SDPA gqa": lambda: sdpa(q, k, v, enable_gqa=True),
    }
    if isinstance(o.k, PagedView) and isinstance(o.v, PagedView):
        pools, order = (o.k.pool, o.v.pool), o.k.table.long()

        def gathered(pool: torch.Tensor) -> torch.Tensor:
            return pool[order].transpose(1, 2).flatten(2, 3)[:, :, : c.kv_len[0]]

        results["gather + SDPA"] = lambda: sdpa(folded, *(gathered(pool) for pool in pools))
    return results
