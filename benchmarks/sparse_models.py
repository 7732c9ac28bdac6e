"""Times layers and models of transformers that select keys, with our attention and with transformers' attention.

    python -m benchmarks.sparse_models layer --tokens 8192 --peer sdpa      # a layer of V3.2, forward and backward
    python -m benchmarks.sparse_models memory --tokens 16384                # the layer's peak memory beyond weights
    python -m benchmarks.sparse_models generate --family deepseek_v4        # a prompt of 16384 tokens, 64 new ones
    python -m benchmarks.sparse_models choices --tokens 4096                # keys selected in bfloat16

The peer "sdpa" is the original layer on torch's SDPA with a mask of the selected keys; its indexer takes no time, since
it returns lists computed before. "eager" is the unmodified layer: at 8192 tokens, the scores of 64 index heads alone
are 16 GiB, twice.
"""

import copy
import json
import resource
import subprocess
import sys
import time
from typing import Annotated, Any

import torch
import typer

import fusion_attention as fa
from examples.finetune_sparse import SIZES, model_of, text
from fusion_attention.bench.pair import Pair, measure
from fusion_attention.integrations import sparse_latent
from fusion_attention.integrations import transformers as integration

Tensor = torch.Tensor
app = typer.Typer(help=__doc__, pretty_exceptions_enable=False)
GOALS = {("sdpa", 8192): 1.3, ("sdpa", 32768): 4.0, ("eager", 8192): 4.0, ("eager", 32768): 10.0}
Tokens = Annotated[int, typer.Option(min=2)]
TopK = Annotated[int, typer.Option(help="Number of keys that a row selects.")]


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
        self.hidden = torch.randn(1, tokens, self.config.hidden_size, dtype=dtype, requires_grad=True)
        self.positions = torch.arange(tokens)[None]
        self.turns = code.DeepseekV32RotaryEmbedding(self.config)(self.hidden, self.positions)

    def lists(self) -> Tensor:
        """Returns our layer's selected keys, int32 [1, tokens, top_k]; the first top_k rows list 0, ..., top_k - 1."""
        top_k, rows = self.config.index_topk, self.hidden.shape[1]
        chosen: list[Tensor] = []

        def choose(*args: Any, **words: Any) -> Any:
            result = fa.lightning_indexer(*args, **words)
            chosen.append(result[0][:, :, 0])
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
        dtype = self.hidden.dtype
        return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)

    def __call__(self, attention: str, mask: Tensor | None = None) -> Tensor:
        """Runs the forward."""
        self.config._attn_implementation = attention
        out: Tensor = self.module(self.hidden, self.turns, mask, position_ids=self.positions)[0]
        return out

    def step(self, attention: str, mask: Tensor | None) -> None:
        """Runs the forward and the backward."""
        self(attention, mask).sum().backward()


@app.command()
def layer(tokens: Tokens = 8192, top_k: TopK = 2048, peer: str = "sdpa", index_heads: int = 64, turns: int = 5) -> None:
    """Times the forward and backward of a layer."""
    ours = Layer(tokens, top_k, index_heads)
    theirs = copy.copy(ours)
    theirs.module, theirs.config = copy.deepcopy(ours.module), copy.copy(ours.config)
    theirs.module.config = theirs.config
    mask = theirs.mask(peer)
    if peer == "sdpa":
        lists = ours.lists()
        theirs.module.indexer.forward = lambda *args, **words: lists
    name = f"DeepSeek-V3.2 layer, S {tokens}, top {top_k}"
    goal = GOALS.get((peer, tokens), 0.0) if top_k == 2048 else 0.0
    calls = (lambda: ours.step("fusion_attention", None)), (lambda: theirs.step(peer, mask))
    timing = measure(Pair("sparse models", name, peer, *calls, flops=1, goal=goal), turns)
    print(f"{name}, beside {peer}: {timing.ours_ms:.0f} ms, {timing.peer_ms:.0f} ms, ratio {timing.ratio:.2f}")
    print(f"range {timing.low:.2f} to {timing.high:.2f}, goal {goal or 'none'}")


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


@app.command()
def generate(
    family: str = "deepseek_v32", tokens: Tokens = 16384, new: int = 64, top_k: TopK = 512, peer: str = "eager"
) -> None:
    """Times generate() of a small model (examples/finetune_sparse.py) with random weights, and compares its tokens."""
    sizes = SIZES[family][1]
    sizes |= {"indexer_budget": top_k} if family == "qwen4_exp" else {"index_topk": top_k}
    data = text()
    prompt = data.repeat(-(-tokens // len(data)))[None, :tokens]
    results = []
    for attention in ("fusion_attention", peer):
        model = model_of(family, attention).eval()
        words = {"do_sample": False, "return_dict_in_generate": False}
        start = time.perf_counter()
        model.generate(prompt, max_new_tokens=1, **words)
        first = time.perf_counter() - start
        start = time.perf_counter()
        results.append(model.generate(prompt, max_new_tokens=new, **words)[0, tokens:].tolist())
        seconds = time.perf_counter() - start
        rate = (new - 1) / max(seconds - first, 1e-9)
        print(f"{family}, {attention}: {seconds:.2f} s, prompt {first:.2f} s, {rate:.1f} tokens/s after it")
    print("equal tokens" if results[0] == results[1] else f"different tokens: {results}")


@app.command()
def choices(tokens: Tokens = 4096, top_k: TopK = 2048, index_heads: int = 8) -> None:
    """Counts the keys that our layer and the original select differently in bfloat16."""
    one = Layer(tokens, top_k, index_heads, torch.bfloat16)
    one.module.indexer.weights_proj.float()
    ours, rows = one.lists()[0], one.hidden.shape[1]
    with torch.no_grad():
        latent = one.module.q_a_layernorm(one.module.q_a_proj(one.hidden))
        visible = torch.ones(1, rows, rows, dtype=torch.bool).tril()
        theirs = one.module.indexer(one.hidden, latent, one.turns, visible, None)[0]
    both = [torch.zeros(rows, rows, dtype=torch.bool).scatter_(1, t.long(), True) for t in (ours, theirs)]
    both = [t[top_k:] for t in both]  # rows that see more than top_k keys
    other = int((both[0] & ~both[1]).sum())
    print(f"S {tokens}, top {top_k}: {other} of {int(both[0].sum())} selected keys differ from the original's")


if __name__ == "__main__":
    app()
