"""cann_ops_transformer.msa_index_score is compared with loops over rows, heads and keys.

Rows and keys are small integers, so that every summation order computes their products exactly.
"""

import math
from importlib import import_module
from typing import Any

import pytest
import torch
from support.bits import same_bits

import fusion_attention as fa
from fusion_attention.npu.auxiliary.block_scores import msa_index_score

Tensor = torch.Tensor
HEADS, DIM, BLOCK, LEAST = 3, 8, 128, -3.4028234663852886e38
ROWS, KEYS, BLOCKS = (5, 0, 2, 1), (300, 40, 129, 0), (1, 0, 1, 0)


def drawn(*shape: int) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(sum(shape))).float()


def ends(lengths: tuple[int, ...]) -> list[int]:
    return [0, *torch.tensor(lengths).cumsum(0).tolist()]


def wanted(q: Tensor, keys: list[Tensor], columns: int, mode: int, init: int, local: int) -> Tensor:
    """Block scores [N, T, columns] by loops; keys: a float32 tensor per sequence."""
    result = torch.full((HEADS, sum(ROWS), columns), LEAST)
    for b, (rows, first) in enumerate(zip(ROWS, ends(ROWS), strict=False)):
        for row in range(rows):
            visible = KEYS[b] if mode == 0 else max(0, KEYS[b] - rows + row + 1)
            for block in range(math.ceil(KEYS[b] / BLOCK)):
                best = result[:, first + row, block]
                for h in range(HEADS):
                    for j in range(block * BLOCK, min(block * BLOCK + BLOCK, visible)):
                        result[h, first + row, block] = max(
                            result[h, first + row, block], q[first + row, h] @ keys[b][j]
                        )
                    if block < init:
                        best[h] = 1e30
                    if BLOCKS[b] - local < block <= BLOCKS[b]:
                        best[h] = 1e29
    return result


def paged(keys: list[Tensor]) -> tuple[Tensor, Tensor]:
    """(pages in shuffled order with NaN in unused slots, page table with invalid unused entries)."""
    pages, table = torch.full((9, BLOCK, 1, DIM), math.nan), torch.full((len(keys), 4), 2**31 - 1, dtype=torch.int32)
    free = iter([7, 2, 5, 0, 8, 1])
    for b, rows in enumerate(keys):
        for n, some in enumerate(rows.split(BLOCK)):
            if len(some):
                table[b, n] = next(free)
                pages[table[b, n], : len(some), 0] = some
    return pages, table


@pytest.mark.sampled(12)
@pytest.mark.parametrize("mode", [0, 3])
@pytest.mark.parametrize(("init", "local"), [(0, 0), (0, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("layout", ["BBND", "BBND without heads", "BNBD", "TND"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8])
def test_msa_index_score_matches_naive_loops(dtype: torch.dtype, layout: str, init: int, local: int, mode: int) -> None:
    q, keys = drawn(sum(ROWS), HEADS, DIM), [drawn(n, DIM) for n in KEYS]
    given: dict[str, Any] = {"actual_seq_qlen": ends(ROWS), "actual_seq_klen": list(KEYS), "layout_key": layout[:4]}
    if layout == "TND":
        key: Tensor = torch.cat(keys)[:, None]
        given |= {"actual_seq_klen": ends(KEYS), "layout_key": "TND"}
    else:
        key, given["block_table"] = paged(keys)
        if layout == "BNBD":
            key = key.transpose(1, 2)
        elif layout != "BBND":
            key = key.squeeze(2)
    if dtype == torch.int8:
        key, scales = key.nan_to_num(99), key.shape[:-1] if layout != "BBND without heads" else (len(key), 1, BLOCK)
        given["scale"] = torch.full((len(key), 1) if layout == "TND" else (len(key), 1, BLOCK), 0.5)
        keys = [0.5 * rows for rows in keys]
        assert math.prod(scales) == given["scale"].numel()
    query = q.to(torch.float16 if dtype == torch.int8 else dtype)
    blocks = torch.tensor(BLOCKS, dtype=torch.int32)
    words = {"sparse_mode": mode, "init_blocks": init, "local_blocks": local}
    same_bits(msa_index_score(query, key.to(dtype), blocks, **given, **words), wanted(q, keys, 16, mode, init, local))


def test_scores_in_small_row_chunks_bitwise_equal_scores_in_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = drawn(70, HEADS, DIM), drawn(300, 1, DIM)
    given = {"actual_seq_qlen": [0, 70], "actual_seq_klen": [0, 300], "layout_key": "TND"}
    blocks = torch.zeros(1, dtype=torch.int32)
    want = msa_index_score(q, k, blocks, **given)
    monkeypatch.setattr(import_module(msa_index_score.__module__), "_SCORES", 1)
    same_bits(msa_index_score(q, k, blocks, **given), want)


def test_msa_index_score_invalid_argument_error_names_parameter() -> None:
    q, k, blocks = drawn(2, HEADS, DIM), drawn(200, 1, DIM), torch.zeros(1, dtype=torch.int32)
    given: dict[str, Any] = {"actual_seq_qlen": [0, 2], "actual_seq_klen": [0, 200], "layout_key": "TND"}
    for change, message in (
        ({"actual_seq_klen": [0, 201]}, "actual_seq_klen: expected cumulative ends"),
        ({"actual_seq_qlen": None}, "actual_seq_qlen: expected the ends"),
        ({"layout_key": "BSND"}, "layout_key"),
        ({"scale": torch.ones(200, 1)}, "scale: expected a scale if keys are int8"),
        ({"init_blocks": -1}, "init_blocks"),
    ):
        with pytest.raises(fa.ContractError, match=message):
            msa_index_score(q, k, blocks, **given | change)
