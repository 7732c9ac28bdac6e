"""Times layers and models of transformers that select keys, with our attention and with transformers' attention.

    python -m benchmarks.sparse_models layer --tokens 8192 --peer sdpa      # a layer of V3.2, forward and backward
    python -m benchmarks.sparse_models memory --tokens 16384                # the layer's peak memory beyond weights
    python -m benchmarks.sparse_models generate --family deepseek_v4        # a prompt of 16384 tokens, 64 new ones
    python -m benchmarks.sparse_models choices --tokens 4096                # keys selected in bfloat16

The peer "sdpa" is the original layer on torch's SDPA with the mask of the chosen keys; its indexer costs nothing, since
it returns lists computed before. "eager" is the original as it ships. torch computes both with all scores in memory
(its other kernels take no values shorter than keys): at 8192 tokens 4 GiB for every copy of the attention's scores and
16 GiB for every copy of the index heads'. With --rows N the original computes N rows of the attention, forward and
backward, whose time is multiplied by tokens / N (no row's cost depends on its position), and the other parts of the
layer once for all tokens.
"""

import copy
import json
import resource
import statistics
import subprocess
import sys
import time
from typing import Annotated, Any

import torch
import transformers
import typer

import fusion_attention as fa
from examples.train_sparse_transformers import SIZES, model_of, text
from fusion_attention import _native
from fusion_attention.bench.pair import seconds
from fusion_attention.integrations import sparse_latent
from fusion_attention.integrations import transformers as integration

Tensor = torch.Tensor
app = typer.Typer(help=__doc__, pretty_exceptions_enable=False)
GOALS = {("sdpa", 8192): 1.3, ("sdpa", 32768): 4.0, ("eager", 8192): 4.0, ("eager", 32768): 10.0}
Tokens = Annotated[int, typer.Option(min=2)]
TopK = Annotated[int, typer.Option(help="Number of keys that a row selects.")]


def _added(visible: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The mask that eager attention adds to scores."""
    return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)


class Layer:
    """A layer of DeepSeek-V3.2 with 16 heads and its inputs, which runs with a named attention implementation.

    Args:
        tokens: length of the sequence.
        top_k: number of keys that a row selects.
        index_heads: heads of the indexer; V3.2 has 64.
        dtype: dtype of weights and inputs.
    """

    def __init__(self, tokens: int, top_k: int, index_heads: int = 64, dtype: torch.dtype = torch.float32) -> None:
        from transformers.models.deepseek_v32 import modeling_deepseek_v32 as code
        from transformers.models.deepseek_v32.configuration_deepseek_v32 import DeepseekV32Config

        integration.register()
        words = {"num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": 1}
        self.config = DeepseekV32Config(**words, index_topk=top_k, index_n_heads=index_heads)
        torch.manual_seed(0)
        self.module = code.DeepseekV32Attention(self.config, 0).to(dtype)
        for parameter in self.module.parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        self.module.indexer.weights_proj.float()  # transformers loads these weights in float32
        self.hidden = torch.randn(1, tokens, self.config.hidden_size, dtype=dtype, requires_grad=True)
        self.positions = torch.arange(tokens)[None]
        self.turns = code.DeepseekV32RotaryEmbedding(self.config)(self.hidden, self.positions)

    def lists(self) -> Tensor:
        """Returns our layer's selected keys, int32 [1, tokens, top_k]; the first top_k rows list 0, ..., top_k - 1."""
        top_k, rows = self.config.index_topk, self.hidden.shape[1]
        chosen: list[Tensor] = []
        self.index_inputs: list[tuple[Tensor, ...]] = []

        def choose(*args: Any, **words: Any) -> Any:
            result = fa.lightning_indexer(*args, **words)
            chosen.append(result[0][:, :, 0])
            self.index_inputs.append(args[:3])
            return result

        original, sparse_latent.lightning_indexer = sparse_latent.lightning_indexer, choose
        try:
            with torch.no_grad():
                self("fusion_attention")
        finally:
            sparse_latent.lightning_indexer = original
        first = torch.arange(min(top_k, rows), dtype=torch.int32).expand(1, min(top_k, rows), -1)
        return torch.cat((first, *chosen), 1) if chosen else first

    def mask(self, attention: str) -> Tensor | None:
        """Returns the mask that the model passes to this attention."""
        rows = self.hidden.shape[1]
        if attention == "fusion_attention":
            return None
        visible = torch.ones(1, 1, rows, rows, dtype=torch.bool).tril()
        if attention == "sdpa":
            return visible
        return _added(visible, self.hidden.dtype)

    def __call__(self, attention: str, mask: Tensor | None = None) -> Tensor:
        """Runs the forward."""
        self.config._attn_implementation = attention
        out: Tensor = self.module(self.hidden, self.turns, mask, position_ids=self.positions)[0]
        return out

    def step(self, attention: str, mask: Tensor | None) -> None:
        """Runs the forward and the backward."""
        self(attention, mask).sum().backward()


class Original:
    """The original's forward and backward of a layer, whole or in parts.

    Args:
        layer: ours; weights and inputs are shared.
        peer: "sdpa" or "eager".
        rows: of the attention that are computed; 0: all.
    """

    def __init__(self, layer: Layer, peer: str, rows: int) -> None:
        from transformers.models.deepseek_v32 import modeling_deepseek_v32 as code

        self.layer, self.peer, self.rows = copy.copy(layer), peer, rows
        self.layer.module, self.layer.config = copy.deepcopy(layer.module), copy.copy(layer.config)
        module = self.layer.module
        module.config = module.indexer.config = self.layer.config
        if not rows:
            self.mask: Any = self.layer.mask(peer)
            if peer == "sdpa":
                lists = layer.lists()
                module.indexer.forward = lambda *args, **words: lists
            return
        transformers.AttentionInterface.register("no_attention", _no_attention)
        self.attention = transformers.AttentionInterface().get_interface(peer, code.eager_attention_forward)
        tokens, heads = layer.hidden.shape[1], module.num_heads
        sizes = (rows, module.qk_head_dim), (tokens, module.qk_head_dim), (tokens, module.v_head_dim)
        dtype = layer.hidden.dtype
        self.operands = [torch.randn(1, heads, *size, dtype=dtype, requires_grad=True) for size in sizes]
        self.index_keys = torch.randn(1, tokens, module.indexer.head_dim, dtype=dtype)
        self.latent = torch.randn(1, rows, module.q_lora_rank, dtype=dtype)
        position = torch.arange(tokens - rows, tokens)[:, None]
        self.mask = (torch.arange(tokens) <= position)[None, None]
        if peer == "eager":
            self.mask = _added(self.mask, dtype)
        self.lists = torch.rand(1, rows, tokens).topk(layer.config.index_topk).indices

    def seconds(self) -> float:
        """The time of a forward and backward of all rows."""
        if not self.rows:
            return seconds(lambda: self.layer.step(self.peer, self.mask))
        module, tokens = self.layer.module, self.layer.hidden.shape[1]
        forward = module.indexer.forward
        module.indexer.forward = lambda *args, **words: None
        others = seconds(lambda: self.layer.step("no_attention", torch.ones(1, 1, 1, 1, dtype=torch.bool)))
        module.indexer.forward = forward
        self._attend()  # touches its memory
        return others + tokens / self.rows * seconds(self._attend)

    def _attend(self) -> None:
        """The indexer and the attention of the last rows, as the original's forward has them."""
        layer, module = self.layer, self.layer.module
        mask, lists = self.mask, self.lists
        if self.peer == "eager":
            rows = slice(layer.hidden.shape[1] - self.rows, None)
            turns = tuple(t[:, rows] for t in layer.turns)
            inputs = layer.hidden[:, rows].detach(), self.latent, turns, mask[:, 0]
            lists = module.indexer(*inputs, layer.positions[:, rows], past_key_values=self)
        hidden = torch.ones_like(mask[:, 0], dtype=torch.bool).scatter(-1, lists.long(), False)[:, None]
        mask = mask & ~hidden if mask.dtype == torch.bool else mask.masked_fill(hidden, torch.finfo(mask.dtype).min)
        out = self.attention(module, *self.operands, mask, dropout=0.0, scaling=module.scaling)[0]
        out.sum().backward()

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        """Keys of all tokens, as a cache returns them."""
        return self.index_keys


def _no_attention(module: Any, q: Tensor, k: Tensor, v: Tensor, *others: Any, **words: Any) -> tuple[Tensor, None]:
    """A sum in place of attention, so that all projections have gradients."""
    return (v + q.sum(-1, keepdim=True) + k.sum(-1, keepdim=True)).transpose(1, 2), None


def _rate() -> float:
    """GFLOP/s of multiply-adds in registers: half of the usual rate is a busy machine."""
    start = time.perf_counter()
    work = _native.multiply_adds("float32", torch.get_num_threads(), 500_000, None)
    return work / (time.perf_counter() - start) / 1e9


@app.command()
def layer(
    tokens: Tokens = 8192,
    top_k: TopK = 2048,
    peer: str = "sdpa",
    index_heads: int = 64,
    turns: int = 3,
    rows: int = 0,
    dtype: str = "float32",
) -> None:
    """Times the forward and backward of a layer; one turn has no warm-up."""
    ours = Layer(tokens, top_k, index_heads, getattr(torch, dtype))
    original = Original(ours, peer, rows)
    name = f"DeepSeek-V3.2 layer, {dtype}, S {tokens}, top {top_k}"
    goal = GOALS.get((peer, tokens), 0.0) if top_k == 2048 else 0.0
    times = []
    for turn in range(turns + (turns > 1)):
        rates = [_rate()]
        mine = seconds(lambda: ours.step("fusion_attention", None))
        rates.append(_rate())
        theirs = original.seconds()
        rates.append(_rate())
        print(f"{mine:.2f} s, {peer} {theirs:.2f} s; the machine: {', '.join(f'{r:.0f}' for r in rates)} GFLOP/s")
        if turn or turns == 1:
            times.append((mine, theirs, theirs / mine))
    mine, theirs, ratio = (statistics.median(column) for column in zip(*times, strict=True))
    detail = f" ({rows} rows of its attention)" if rows else ""
    print(f"{name}: {mine:.2f} s, {peer}{detail} {theirs:.2f} s, ratio {ratio:.2f}, goal {goal or 'none'}")


@app.command()
def memory(
    tokens: Tokens = 16384, top_k: TopK = 2048, index_heads: int = 64, attention: str = "", peer: str = "eager"
) -> None:
    """Prints the peak memory beyond weights of a layer's forward and backward, with each attention in a new process."""
    if attention:
        one = Layer(tokens, top_k, index_heads)
        for parameter in one.module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        one.step(attention, one.mask(attention))
        print(json.dumps((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024))
        return
    words = ["--tokens", str(tokens), "--top-k", str(top_k), "--index-heads", str(index_heads)]
    for name in ("fusion_attention", peer):
        command = [sys.executable, "-m", "benchmarks.sparse_models", "memory", *words, "--attention", name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        print(f"{name}, S {tokens}: {done.stdout.strip() or f'failed with {done.returncode}'} MB")


class _Clock(transformers.StoppingCriteria):  # type: ignore[misc]
    """The time of every new token, and the seconds of every call of an attention layer.

    Args:
        model: whose layers are timed.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.ends: list[float] = []
        self.attention: list[float] = []
        for module in model.modules():
            if type(module).__name__.endswith("Attention"):
                module.register_forward_pre_hook(lambda *args: self.attention.append(-time.perf_counter()))
                module.register_forward_hook(self._ended)
        self.start = time.perf_counter()

    def _ended(self, *args: Any) -> None:
        self.attention[-1] += time.perf_counter()

    def __call__(self, tokens: Tensor, scores: Any, **words: Any) -> Tensor:
        """Continues in any case."""
        self.ends.append(time.perf_counter())
        return torch.zeros(len(tokens), dtype=torch.bool)


@app.command()
def generate(
    family: str = "deepseek_v32",
    tokens: Tokens = 16384,
    new: int = 64,
    top_k: TopK = 512,
    peer: str = "eager",
    chunk: Annotated[int, typer.Option(help="Rows of the prompt that the peer computes at a time.")] = 512,
) -> None:
    """Times generate() of a small random model of examples/train_sparse_transformers.py, and compares its tokens.

    In one piece the scores of the original's indexer take 16 GiB for every copy.
    """
    sizes = SIZES[family][1]
    sizes |= {"indexer_budget": top_k} if family == "qwen4_exp" else {"index_topk": top_k}
    data = text()
    prompt = data.repeat(-(-tokens // len(data)))[None, :tokens]
    results, times = [], []
    for attention in ("fusion_attention", peer):
        model = model_of(family, attention).eval()
        words: dict[str, Any] = {"do_sample": False, "return_dict_in_generate": False}
        if attention == peer:
            words["prefill_chunk_size"] = chunk
        clock = _Clock(model)
        with torch.inference_mode():
            out = model.generate(prompt, max_new_tokens=new, stopping_criteria=[clock], **words)
        results.append(out[0, tokens:].tolist())
        times.append(clock)
        first, last, inside = clock.ends[0] - clock.start, clock.ends[-1] - clock.start, sum(clock.attention)
        print(f"{family}, {attention}: {last:.2f} s, attention {inside:.2f} s; the first token {first:.2f} s")
    ours, theirs = times
    ratios = {
        "tokens per second": [(c.ends[-1] - c.start) for c in (ours, theirs)],
        "attention": [sum(c.attention) for c in (ours, theirs)],
        "tokens per second behind the first": [c.ends[-1] - c.ends[0] for c in (ours, theirs)],
    }
    print(", ".join(f"{name} x {b / a:.2f}" for name, (a, b) in ratios.items()))
    print("equal tokens" if results[0] == results[1] else f"other tokens: {results}")


@app.command()
def choices(tokens: Tokens = 4096, top_k: TopK = 2048, index_heads: int = 8) -> None:
    """Counts the keys that our layer and the original select differently in bfloat16."""
    one = Layer(tokens, top_k, index_heads, torch.bfloat16)
    ours, rows = one.lists()[0], one.hidden.shape[1]
    with torch.no_grad():
        latent = one.module.q_a_layernorm(one.module.q_a_proj(one.hidden))
        visible = torch.ones(1, rows, rows, dtype=torch.bool).tril()
        theirs = one.module.indexer(one.hidden, latent, one.turns, visible, None)[0]
    both = [torch.zeros(rows, rows, dtype=torch.bool).scatter_(1, t.long(), True) for t in (ours, theirs)]
    both = [t[top_k:] for t in both]  # rows that see more than top_k keys
    other = both[0] & ~both[1]
    print(
        f"S {tokens}, top {top_k}: {int(other.sum())} of {int(both[0].sum())} selected keys differ from the original's"
    )
    q, k, weights = (torch.cat(each, 1)[0].double() for each in zip(*one.index_inputs, strict=True))
    gaps = [0.0]
    for row in other.any(1).nonzero()[:, 0].tolist():
        parts = weights[row] * (q[row] @ k[:, 0].T).clamp_min(0).T  # [keys, heads]
        scores, sizes = parts.sum(1), parts.abs().sum(1)
        mine, original = ((both[i] & ~both[1 - i])[row].nonzero()[:, 0] for i in (0, 1))
        gap = scores[mine][:, None] - scores[original]
        size = sizes[mine][:, None] + sizes[original]  # 0 if no head's product is positive
        gaps.append(float((gap.abs() / size.clamp_min(torch.finfo(size.dtype).tiny)).max()))
    print(f"largest difference of their scores: {max(gaps):.1e} of the sum of their products' absolute values")


if __name__ == "__main__":
    app()
