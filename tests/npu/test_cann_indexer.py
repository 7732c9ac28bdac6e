"""cann_ops_transformer.lightning_indexer is compared with loops over rows and keys.

Scores are small integers, exact in every summation order, so lists are compared entry by entry.
"""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.bits import same_bits

import fusion_attention as fa
from fusion_attention.npu.surface.cann_ops_from_definitions import lightning_indexer

Tensor = torch.Tensor
HEADS, DIM, TOP = 3, 8, 4
NEVER = 2**31 - 1  # a page that is not there


@dataclass
class Call:
    """Lengths and allocated lengths of a call's sequences; rows and keys beyond the lengths are NaN."""

    rows: tuple[int, ...]
    keys: tuple[int, ...]
    ratio: int = 1
    residual: tuple[int, ...] = ()
    q_room: tuple[int, ...] = ()
    k_room: tuple[int, ...] = ()
    mode: int = 3

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(sum(self.rows) * 100 + sum(self.keys))

        def drawn(count: int, room: int, *inner: int) -> Tensor:
            tensor = torch.full((room, *inner), math.nan)
            tensor[:count] = torch.randint(-2, 3, (count, *inner), generator=generator).float()
            return tensor

        self.q_room, self.k_room = self.q_room or self.rows, self.k_room or self.keys
        q_sizes, k_sizes = list(zip(self.rows, self.q_room)), list(zip(self.keys, self.k_room))  # noqa: B905
        self.q = [drawn(n, room, HEADS, DIM) for n, room in q_sizes]
        self.w = [drawn(n, room, HEADS) for n, room in q_sizes]
        self.k = [drawn(n, room, 1, DIM) for n, room in k_sizes]

    def words(self) -> dict[str, Any]:
        """Arguments of the call other than q, k and w."""
        result: dict[str, Any] = {"mask_mode": self.mode, "cmp_ratio": self.ratio, "return_value": 1}
        if self.ratio > 1 and self.mode == 3:
            result["cmp_residual_k"] = torch.tensor(self.residual, dtype=torch.int32)
        if self.rows != self.q_room:
            result["seqused_q"] = torch.tensor(self.rows, dtype=torch.int32)
        if self.keys != self.k_room:
            result["seqused_k"] = torch.tensor(self.keys, dtype=torch.int32)
        return result

    def wanted(self) -> list[tuple[Tensor, Tensor]]:
        """(indices, values) of each sequence's rows, padding rows included, by loops."""
        results = []
        for b, rows in enumerate(self.rows):
            indices = torch.full((self.q_room[b], TOP), -1)
            values = torch.full((self.q_room[b], TOP), -math.inf)
            for row in range(rows):
                scored = []
                for key in range(self.keys[b]):
                    if self.sees(b, row, key):
                        dots = [sum(x * y for x, y in zip(h.tolist(), self.k[b][key, 0].tolist(), strict=True))
                                for h in self.q[b][row]]  # fmt: skip
                        scored.append(
                            (-sum(w * max(d, 0) for w, d in zip(self.w[b][row].tolist(), dots, strict=True)), key)
                        )
                for slot, (score, key) in enumerate(sorted(scored)[:TOP]):
                    indices[row, slot], values[row, slot] = key, -score
            results.append((indices, values))
        return results

    def sees(self, b: int, row: int, key: int) -> bool:
        """True if the key's last token is not after the row's token; the last row is the sequence's last token."""
        behind = self.residual[b] if self.residual else 0
        last = (key + 1) * self.ratio - 1
        return self.mode == 0 or last <= self.keys[b] * self.ratio + behind - 1 - (self.rows[b] - 1 - row)


CALLS = [
    Call((5, 5), (5, 5)),
    Call((5, 2), (7, 9), mode=0, ratio=4),
    Call((23, 23), (5, 5), ratio=4, residual=(3, 3)),
    Call((9, 8), (4, 4), ratio=2, residual=(1, 0)),
    Call((9, 8), (1, 0), ratio=2, residual=(1, 0)),  # rows that see no key
    *(Call((1, 2), (3, 9), ratio=4, residual=(n, 3 - n)) for n in range(4)),  # decoding
    Call((5, 0, 7), (4, 3, 2), ratio=3, residual=(2, 0, 1), q_room=(7, 7, 7), k_room=(4, 4, 4)),
    Call((2, 3), (70, 40), ratio=2, residual=(1, 1)),
]


def padded(call: Call) -> dict[str, Any]:
    return {name: torch.nn.utils.rnn.pad_sequence(getattr(call, name), True, math.nan) for name in "qkw"}


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat(tensors)


def ends(room: tuple[int, ...]) -> Tensor:
    return torch.tensor((0, *room), dtype=torch.int32).cumsum(0).int()


def paged(call: Call, size: int) -> dict[str, Any]:
    """Pages in shuffled order; unused slots are NaN, and table entries after a sequence's last page are invalid."""
    counts = [-(-n // size) for n in call.keys]
    numbers = torch.randperm(sum(counts) + 1, generator=torch.Generator().manual_seed(0)).int()
    pool, table = (
        torch.full((sum(counts) + 1, size, 1, DIM), math.nan),
        torch.full((len(counts), max(counts) + 1), NEVER),
    )
    for b, count in enumerate(counts):
        table[b, :count] = numbers[sum(counts[:b]) : sum(counts[: b + 1])]
        for token in range(call.keys[b]):
            pool[table[b, token // size], token % size] = call.k[b][token]
    return {"k": pool, "block_table": table.int(), "layout_k": "PA_BBND", "seqused_k": torch.tensor(call.keys).int()}


def check(call: Call, indices: Tensor, values: Tensor, packed: bool) -> None:
    assert (indices.dtype, values.dtype) == (torch.int32, torch.float32)
    at = 0
    for b, (want, scores) in enumerate(call.wanted()):
        mine, theirs = (
            (t[at : at + call.q_room[b], 0] if packed else t[b, : call.q_room[b], 0]).cpu() for t in (indices, values)
        )
        same_bits(mine, want.int())
        same_bits(theirs, scores)
        if not packed:
            assert (indices[b, call.q_room[b] :] == -1).all()
        at += call.q_room[b]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_lightning_indexer_of_padded_rows_and_offset_matches_naive_loops(call: Call) -> None:
    given, words = padded(call), call.words()
    for side, lengths in (("q", call.rows), ("k", call.keys)):
        if len(set(lengths)) > 1:
            words[f"seqused_{side}"] = torch.tensor(lengths)
    result = lightning_indexer(**given, topk=TOP, **words)
    check(call, *result, packed=False)
    batch, rows = result[0].shape[:2]
    for offset in (torch.arange(7, 7 + batch).int(), torch.arange(batch * rows).view(batch, rows, 1).int()):
        moved, _ = lightning_indexer(**given, topk=TOP, output_idx_offset=offset, **words)
        same_bits(moved, torch.where(result[0] < 0, -1, result[0] + offset.view(batch, -1, 1, 1)).int())


@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.parametrize("pages", [0, 16])
def test_lightning_indexer_with_packed_rows_and_offset_matches_naive_loops(call: Call, pages: int) -> None:
    """Padding rows of a sequence have empty lists, and the next sequence's rows follow them in memory."""
    given = {"q": flat(call.q), "w": flat(call.w), "layout_q": "TND", "cu_seqlens_q": ends(call.q_room), **call.words()}
    if pages:
        given |= paged(call, pages)
    else:
        given |= {"k": flat(call.k), "layout_k": "TND", "cu_seqlens_k": ends(call.k_room)}
    result = lightning_indexer(**given, topk=TOP)
    check(call, *result, packed=True)
    for offset in (torch.tensor([100, 7, 9][: len(call.rows)]).int(), torch.arange(sum(call.q_room)).int()[:, None]):
        moved, values = lightning_indexer(**given, topk=TOP, output_idx_offset=offset)
        per_row = offset if offset.dim() == 2 else offset.repeat_interleave(torch.tensor(call.q_room))[:, None]
        same_bits(moved, torch.where(result[0] < 0, -1, result[0] + per_row[:, None]).int())
        same_bits(values, result[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_indexer_values_are_not_rounded_to_the_query_dtype(dtype: torch.dtype) -> None:
    """Rows are small integers, exact in every dtype; weights and scores stay float32."""
    call = CALLS[3]
    given = padded(call)
    w = given["w"] + torch.full_like(given["w"], 2.0**-12)
    words = {**call.words(), "seqused_q": torch.tensor(call.rows)}
    exact = lightning_indexer(given["q"], given["k"], w, TOP, **words)
    mine = lightning_indexer(given["q"].to(dtype), given["k"].to(dtype), w, TOP, **words)
    for one, other in zip(mine, exact, strict=True):
        same_bits(one, other)
    assert not torch.equal(exact[1], exact[1].to(dtype).float())


def test_indexer_values_are_optional_and_have_no_gradient() -> None:
    call = CALLS[2]
    given = {name: t.requires_grad_() for name, t in padded(call).items()}
    indices, values = lightning_indexer(**given, topk=TOP, **call.words() | {"return_value": 0})
    assert (values.shape, values.dtype) == ((0,), torch.float32)
    assert not any(t.requires_grad for t in lightning_indexer(**given, topk=TOP, **call.words()))
    assert indices.shape == (2, 23, 1, TOP)


def test_compiled_indexer_bitwise_equals_eager_indexer() -> None:
    call = CALLS[2]
    given, residual = padded(call), call.words()["cmp_residual_k"]

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(q: Tensor, k: Tensor, w: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        words = {"mask_mode": 3, "cmp_ratio": 4, "return_value": 1, "cmp_residual_k": residual}
        return lightning_indexer(q, k, w, TOP, **words)

    for one, other in zip(
        compiled(*(given[n] for n in "qkw"), residual),
        lightning_indexer(**given, topk=TOP, **call.words()),
        strict=True,
    ):
        same_bits(one, other)


def test_residual_that_contradicts_the_token_count_warns() -> None:
    """For 20 tokens and 5 keys the residual is 20 % 4; with 5 % 4, keys of later tokens would be visible."""
    q, k, w = torch.randn(1, 20, 2, 8), torch.randn(1, 5, 1, 8), torch.rand(1, 20, 2)
    with pytest.warns(fa.ContractWarning, match="cmp_residual_k: expected as many tokens as rows, got 21 tokens"):
        lightning_indexer(q, k, w, 2, mask_mode=3, cmp_ratio=4, cmp_residual_k=torch.tensor([1]))


WRONG: dict[str, dict[str, Any]] = {
    "cmp_residual_k: expected one number per sequence if cmp_ratio": {"mask_mode": 3, "cmp_ratio": 4},
    "cmp_residual_k: expected None": {"cmp_residual_k": [0, 0]},
    "cmp_residual_k: expected numbers from 0 to cmp_ratio - 1": {
        "mask_mode": 3, "cmp_ratio": 4, "cmp_residual_k": [4, 0]
    },
    "cmp_residual_k: expected one number per sequence": {"mask_mode": 3, "cmp_ratio": 4, "cmp_residual_k": [0]},
    "cmp_ratio": {"cmp_ratio": 0},
    "topk": {"topk": 0},
    "cu_seqlens_q: expected None": {"cu_seqlens_q": [0, 4, 8]},
    "seqused_q: expected numbers between 0 and the tokens": {"seqused_q": [4, 5]},
    "seqused_k: expected one number per sequence": {"seqused_k": [4]},
    "output_idx_offset": {"output_idx_offset": torch.zeros(3, dtype=torch.int32)},
    "output_idx_offset: ": {"output_idx_offset": torch.zeros(2, dtype=torch.int64)},
    "w: expected": {"w": torch.rand(2, 4, 2, dtype=torch.float16)},
    "layout_k": {"layout_k": "TND"},
    "block_table": {"layout_k": "PA_BBND"},
    "return_value": {"return_value": 2},
    "mask_mode": {"mask_mode": 4},
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_invalid_indexer_call_error_names_parameter(message: str) -> None:
    given = {"q": torch.randn(2, 4, 2, 8), "k": torch.randn(2, 4, 1, 8), "w": torch.rand(2, 4, 2), "topk": 2}
    with pytest.raises(fa.ContractError, match=message):
        lightning_indexer(**given | WRONG[message])
