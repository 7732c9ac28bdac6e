"""Defines a decode step of one query token per sequence over a long cache, and its alternatives on a CPU.

Peers: torch's SDPA with the heads of a group folded into query rows, SDPA with enable_gqa, a gather of pages before
SDPA, and onnxruntime's GroupQueryAttention where it is installed. decode_rows.py measures them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from fusion_attention import npu
from fusion_attention import plan as planning
from fusion_attention.bench.pair import seconds
from fusion_attention.ir.kv import Dequant, PagedView, RowView
from fusion_attention.ir.mask import INFINITE
from fusion_attention.ir.problem import Extents, Operands, Problem, Stats
from fusion_attention.memory import zeros

READ_BYTES = 1 << 28


@dataclass(frozen=True)
class Shape:
    """The sizes of a decode step and the storage of its cache. page: tokens of a page; 0 stands for contiguous rows.
    called: call npu_incre_flash_attention over pages in memory of torch.empty, instead of a plan over huge pages.
    cached: all table entries are the same page, which stays in the CPU's cache, so that only arithmetic takes time."""

    name: str
    batch: int = 8
    heads_kv: int = 8
    group: int = 4
    dim: int = 128
    dim_v: int = 0
    keys: int = 4096
    kind: str = "bfloat16"  # or "float16", "float32", "int8", "int4"
    page: int = 128
    shares: bool = False
    called: bool = False
    cached: bool = False

    @property
    def stored(self) -> bool:
        """True if the cache contains integers."""
        return self.kind.startswith("int")

    @property
    def bytes(self) -> float:
        """Returns the bytes of the cache that a step must read."""
        size = {"float32": 4, "int8": 1, "int4": 0.5}.get(self.kind, 2)
        columns = self.dim + (0 if self.shares else self.dim_v or self.dim)
        return self.batch * self.heads_kv * self.keys * columns * size

    @property
    def flops(self) -> int:
        """Returns the floating-point operations of a step."""
        columns = self.dim + (self.dim_v or self.dim)
        return 2 * self.batch * self.heads_kv * self.group * self.keys * columns


def rows(tensor: torch.Tensor, dim: int) -> RowView:
    """Returns [batch, heads, tokens, dim] in contiguous memory."""
    count = tensor.shape[0]
    strides = np.full(count, tensor.stride(1))
    return RowView((tensor,), np.arange(count) * tensor.stride(0), tensor.stride(2), strides, dim)


def numbers(s: Shape, dim: int) -> torch.Tensor:
    """Returns random [batch, heads, keys, dim] in huge pages of memory, like PagedKVCache; two int4 numbers a byte."""
    shape = (s.batch, s.heads_kv, s.keys, dim // 2 if s.kind == "int4" else dim)
    if s.stored:
        values = zeros(shape, torch.int8).copy_(torch.randint(-128, 128, shape, dtype=torch.int8))
        return values.view(torch.uint8 if s.kind == "int4" else torch.int8)
    return zeros(shape, getattr(torch, s.kind)).copy_(torch.randn(shape))


def paged(s: Shape, tensor: torch.Tensor, dim: int, table: torch.Tensor) -> PagedView:
    """Returns the rows of `tensor` as a pool of pages [heads, page, dim], in the table's order."""
    pages = table.shape[1]
    full = torch.nn.functional.pad(tensor, (0, 0, 0, pages * s.page - s.keys))
    parts = full.unflatten(2, (pages, s.page)).transpose(1, 2).flatten(0, 1)
    pool = torch.empty(parts.shape, dtype=parts.dtype) if s.called else zeros(parts.shape, parts.dtype)
    pool[table.flatten().long()] = parts
    return PagedView(pool, table, s.page, pool.stride(0), pool.stride(2), pool.stride(1), dim)


@dataclass
class Step:
    """The tensors of a decode step, our call, and the inputs of its alternatives."""

    shape: Shape
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    plan: planning.Plan
    operands: Operands

    def ours(self) -> None:
        """Computes one step with a plan."""
        if self.shape.called:
            self.call()
        else:
            self.plan.run(self.operands)

    def call(self) -> torch.Tensor:
        """Computes one step with the public function; stored integers use scales per channel in the query's dtype."""
        s, pools = self.shape, [view.pool for view in (self.operands.k, self.operands.v) if isinstance(view, PagedView)]
        scale = torch.full((2, s.heads_kv, 1, s.dim), 0.02, dtype=self.q.dtype) if s.stored else None
        return npu.npu_incre_flash_attention(
            self.q, *pools, num_heads=s.heads_kv * s.group, num_key_value_heads=s.heads_kv, scale_value=s.dim**-0.5,
            input_layout="BNSD", block_table=self.table, block_size=s.page, actual_seq_lengths=[s.keys] * s.batch,
            antiquant_scale=scale,
        )  # fmt: skip


def step(s: Shape) -> Step:
    """Makes a step with random tensors."""
    torch.manual_seed(0)
    dtype = "bfloat16" if s.stored else s.kind
    dim_v, heads = s.dim_v or s.dim, s.heads_kv * s.group
    q = torch.randn(s.batch, heads, 1, s.dim).to(getattr(torch, dtype))
    k = numbers(s, s.dim)
    v = k if s.shares else numbers(s, dim_v)
    pages = -(-s.keys // (s.page or s.keys))
    table = torch.randperm(s.batch * pages).int().view(s.batch, pages)
    dequant = "channel" if s.stored else "none"
    problem = Problem(
        heads, s.heads_kv, s.dim, dim_v, dtype=dtype, scale=s.dim**-0.5, shares_kv=s.shares, page_size=s.page,
        kv_dtype=s.kind if s.stored else "", dequant_k=dequant, dequant_v=dequant,
    )  # fmt: skip
    views = [paged(s, t, d, table) if s.page else rows(t, d) for t, d in ((k, s.dim), (v, dim_v))]
    if s.cached:
        table.zero_()
    if s.shares and isinstance(views[0], PagedView) and isinstance(views[1], PagedView):
        views[1] = views[1].over(views[0].pool)
    scales = [RowView((torch.full((s.heads_kv * d,), 0.02),), np.zeros(s.batch, np.int64), 0, np.full(s.batch, d), d)
              for d in (s.dim, dim_v)]  # fmt: skip
    out = torch.empty(s.batch, heads, 1, dim_v, dtype=q.dtype)
    stats = Stats(*(rows(torch.empty(s.batch, heads, 1, 1), 1) for _ in range(2)))
    operands = Operands(rows(q, s.dim), views[0], views[1], rows(out, dim_v), stats)
    if s.stored:
        operands.dequant_k, operands.dequant_v = (Dequant(scale) for scale in scales)

    def lengths(value: int) -> np.ndarray:
        return np.full(s.batch, value, np.int64)

    edges = lengths(-INFINITE), lengths(INFINITE), lengths(0), lengths(0)
    extents = Extents(lengths(1), lengths(s.keys), *edges)
    return Step(s, q, k, v, table, planning.plan(problem, extents, torch.device("cpu")), operands)


def reader(small_pages: bool) -> Callable[[], object]:
    """Returns a function that reads READ_BYTES with torch's threads; small_pages: from memory without huge pages."""
    shape = (READ_BYTES // 8,)
    memory = torch.empty(shape, dtype=torch.int64).zero_() if small_pages else zeros(shape, torch.int64)
    # On AMD's processors torch's max() reads faster, on Intel's its sum().
    ways = (memory.max, memory.sum)
    return min(ways, key=lambda read: min(seconds(read) for _ in range(5)))


def onnx_peer(s: Shape) -> Callable[[], object] | None:
    """Returns a function that runs onnxruntime's GroupQueryAttention on a float32 cache; None if not installed."""
    try:
        import onnxruntime
        from onnx import TensorProto, helper
    except ImportError:
        return None
    heads = s.heads_kv * s.group
    kind = TensorProto.FLOAT
    cache = [s.batch, s.heads_kv, s.keys, s.dim]
    inputs = {
        "q": [s.batch, 1, heads * s.dim], "k": [s.batch, 1, s.heads_kv * s.dim], "v": [s.batch, 1, s.heads_kv * s.dim],
        "past_k": cache, "past_v": cache,
    }  # fmt: skip
    names = [*inputs, "seqlens_k", "total"]
    node = helper.make_node(
        "GroupQueryAttention", names, ["out", "present_k", "present_v"], domain="com.microsoft",
        num_heads=heads, kv_num_heads=s.heads_kv,
    )  # fmt: skip
    values = [helper.make_tensor_value_info(name, kind, shape) for name, shape in inputs.items()]
    values += [helper.make_tensor_value_info("seqlens_k", TensorProto.INT32, [s.batch])]
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
    binding.bind_cpu_input("seqlens_k", np.full(s.batch, s.keys - 1, np.int32))
    binding.bind_cpu_input("total", np.array([s.keys], np.int32))
    binding.bind_output("out")
    for name in ("k", "v"):
        binding.bind_ortvalue_output(f"present_{name}", shared[name])
    return lambda: session.run_with_iobinding(binding)


def peers(t: Step) -> dict[str, Callable[[], object]]:
    """Returns the alternatives by name: on the contiguous cache, and on pages with a gather before the computation."""
    s = t.shape
    if s.stored or s.shares:
        return {}
    folded = t.q.view(s.batch, s.heads_kv, s.group, s.dim)
    results: dict[str, Callable[[], object]] = {
        "SDPA folded": lambda: sdpa(folded, t.k, t.v),
        "SDPA gqa": lambda: sdpa(t.q, t.k, t.v, enable_gqa=True),
    }
    pools = t.operands.k, t.operands.v
    if isinstance(pools[0], PagedView) and isinstance(pools[1], PagedView):
        pages = [view.pool for view in pools if isinstance(view, PagedView)]
        order = t.table.long()

        def gathered(pool: torch.Tensor) -> torch.Tensor:
            return pool[order].transpose(1, 2).flatten(2, 3)[:, :, : s.keys]

        results["gather + SDPA"] = lambda: sdpa(folded, *(gathered(pool) for pool in pages))
    return results
