"""Decoding: golden against dense formulas, back ends against golden; cache layouts and interfaces give equal bits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import same
from support.decode_cases import CASES, STORES
from support.run_inference_calls import in_float64, run
from support.two_phase import call

import fusion_attention as fa
from fusion_attention import acl, aclnn, npu
from fusion_attention.contract import bind
from fusion_attention.ops import RECORDS
from fusion_attention.ops.inference import definitions as inference
from fusion_attention.ops.inference.lowered_call import InferenceCall
from fusion_attention.testing import check, expected_of
from fusion_attention.testing.decode import Args, DecodeCase, answer, arguments, logical, pages_of, place, query_of


def lowered(args: Args) -> InferenceCall:
    return inference.TORCH.lower(bind(inference.TORCH, args))  # type: ignore[misc, no-any-return]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_golden_and_cpu_back_end_match_dense_formulas(case: DecodeCase) -> None:
    call = lowered(arguments(case))
    exact, want = run(in_float64(call), "golden"), query_of(case, answer(case))
    torch.testing.assert_close(exact["attention_out"].double(), want, rtol=1e-12, atol=1e-12)
    check(case.id, run(call, "cpu"), expected_of(call, exact))


@pytest.mark.parametrize("layout", ["BSH", "BNSD", "BSND"])
@pytest.mark.parametrize("integers", ["", "channel"])
def test_decode_is_bitwise_equal_for_every_cache_storage(layout: str, integers: str) -> None:
    base = DecodeCase(layout=layout, integers=integers, offsets=bool(integers), kv_len=(40, 0, 33, 16), slots=48)
    n, calls = logical(base), []
    for store in (*STORES, *(["headed"] if layout == "BNSD" else [])):
        args, table = arguments(base), pages_of(replace(base, store=store))
        valid_table = None if table is None else table.masked_fill(table == 1 << 30, 0)
        kv = {name: place(replace(base, store=store), n[name[0]], valid_table) for name in ("key", "value")}
        calls.append(lowered(args | kv | {"block_table": table, "block_size": 16 if table is not None else 0}))
    for backend in ("golden", "cpu"):
        first, *rest = (run(call, backend)["attention_out"] for call in calls)
        assert all(same(first, other) for other in rest), backend


# ----------------------------------------------------------------------------------------------------------- interfaces


def two_phase(name: str, args: Args, out: torch.Tensor) -> tuple[int, int]:
    """Returns the status codes of both phases; key and value are passed as lists of tensors."""
    lists = {n: t if isinstance(t := args[n], list) else [t] for n in ("key", "value")}
    return call(RECORDS[name], {**args, **lists}, {"attention_out": out}, strict=False)


def pythonic(case: DecodeCase, args: Args) -> Args | None:
    """Returns the case as arguments of decode_attention; None if decode_attention cannot express it."""
    if case.padding >= 0 or case.blank or case.out or case.store == "pages" or case.rows > max(case.kv_len):
        return None
    if case.store == "list" and (case.mask or case.pse):
        return None  # here they count the longest tensor's slots

    def axes(t: Any, heads: int) -> Any:
        if isinstance(t, list):
            return [axes(one, heads) for one in t]
        return t.unflatten(-1, (heads, t.shape[-1] // heads)) if case.layout == "BSH" else t

    n, layout = logical(case), "BNSD" if case.layout == "BNSD" else "BSND"
    given: Args = {"q": axes(args["query"], case.heads_q), "layout": layout, "cache_layout": layout}
    given["cache"] = tuple(axes(args[name], case.heads_kv) for name in ("key", "value"))
    given |= {"kv_len": args["actual_seq_lengths"], "scale": args["scale_value"], "block_table": args["block_table"]}
    given["bias"] = args["pse_shift"]
    given["blocked"] = None if args["atten_mask"] is None else args["atten_mask"][:, None, None]
    if case.integers:
        for i, side in enumerate("kv"):
            given[f"{side}_scale"] = n["scale"][i].float()
            given[f"{side}_offset"] = n["offset"][i].float() if case.offsets else None
    return given


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_decode_interfaces_are_bitwise_equal(case: DecodeCase) -> None:
    args = arguments(case)
    want = npu.npu_incre_flash_attention(**{name: value for name, value in args.items() if value is not None})
    names = ["aclnnIncreFlashAttentionV4"]
    if case.padding < 0:
        names.append("aclnnIncreFlashAttentionV3")
        if not (case.integers or case.pse or case.store in ("pages", "headed")):
            names += ["aclnnIncreFlashAttentionV2", *([] if case.out else ["aclnnIncreFlashAttention"])]
    for name in names:
        out = torch.empty_like(want).fill_(77)
        assert two_phase(name, args, out) == (0, 0), acl.get_recent_err_msg()
        assert same(out, want), name
    given = pythonic(case, args)
    if given is not None:
        out = fa.decode_attention(**given)
        assert isinstance(out, torch.Tensor)
        assert same(out.reshape(want.shape), want)


@pytest.mark.usefixtures("runtime")
def test_aclnn_phase_2_reads_kv_padding_size_changed_after_phase_1() -> None:
    case = DecodeCase(padding=2, kv_len=(9, 5))
    args = arguments(case)
    want = npu.npu_incre_flash_attention(**{name: value for name, value in args.items() if value is not None})
    op, late = RECORDS["aclnnIncreFlashAttentionV4"], torch.tensor([7])
    out = torch.empty_like(want)
    values = {**args, "kv_padding_size": late, "attention_out": out}
    handles = [acl.Tensor.of(v) if isinstance(v := values.get(p.name), torch.Tensor) else v for p in op.params]
    ret, size, executor = aclnn.aclnnIncreFlashAttentionV4GetWorkspaceSize(*handles, strict=False)
    assert ret == 0, acl.get_recent_err_msg()
    late[0] = 2
    assert aclnn.aclnnIncreFlashAttentionV4(acl.rt.malloc(max(size, 1))[0], size, executor, None) == 0
    assert same(out, want)


# ------------------------------------------------------------------------------------------------------- invalid input

PAGED = DecodeCase(store="pages")
INT8 = DecodeCase(integers="channel")
FAR = torch.tensor([[0, 1], [4, 9]], dtype=torch.int32)
BAD: dict[str, tuple[DecodeCase, Args, str, str]] = {
    "page": (PAGED, {"block_table": FAR, "actual_seq_lengths": [21, 17]}, "block_table", r"9 at \[1, 1\]"),
    "negative page": (PAGED, {"block_table": -FAR}, "block_table", r"-1 at \[0, 1\]"),
    "length beyond cache": (DecodeCase(), {"actual_seq_lengths": [3, 25]}, "actual_seq_lengths", "25 for sequence 1"),
    "negative length": (DecodeCase(), {"actual_seq_lengths": [-1, 25]}, "actual_seq_lengths", "-1 for sequence 0"),
    "narrow table": (PAGED, {"actual_seq_lengths": [33, 5]}, "block_table", "33 tokens of sequence 0"),
    "scales": (INT8, {"antiquant_scale": torch.ones(2, 3).half()}, "antiquant_scale", r"\[2, 3\]"),
    "no scales": (INT8, {"antiquant_scale": None}, "antiquant_scale", "antiquant_scale=None"),
    "offsets alone": (DecodeCase(), {"antiquant_offset": torch.ones(2).half()}, "antiquant_offset", "without a scale"),
    "output offset alone": (DecodeCase(), {"quant_offset2": torch.ones(1)}, "quant_offset2", "without a scale"),
    "mask": (DecodeCase(), {"atten_mask": torch.zeros(3, 24, dtype=torch.bool)}, "atten_mask", r"\[3, 24\]"),
    "short mask": (DecodeCase(), {"atten_mask": torch.zeros(2, 20, dtype=torch.bool)}, "atten_mask", "21 columns"),
    "bias": (DecodeCase(), {"pse_shift": torch.zeros(3, 4, 1, 24).half()}, "pse_shift", r"\[3, 4, 1, 24\]"),
}


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize("name", BAD)
def test_invalid_decode_argument_is_named_by_every_interface(name: str) -> None:
    case, changes, param, words = BAD[name]
    args = {**arguments(case), **changes}
    if name == "offsets alone":
        args["antiquant_scale"] = None
    given = {key: value for key, value in args.items() if value is not None}
    with pytest.raises(fa.ContractError, match=rf"^npu_incre_flash_attention: {param}: expected .*{words}"):
        npu.npu_incre_flash_attention(**given)
    out = torch.full_like(args["query"], 77)
    first, second = two_phase("aclnnIncreFlashAttentionV4", args, out)
    assert first or second
    assert str(inference.V4.failure(param, "", "")) in acl.get_recent_err_msg()
    assert (out == 77).all()


# --------------------------------------------------------------------------------------------------------- PagedKVCache


def paged(stored: str = "", **options: Any) -> fa.PagedKVCache:
    return fa.PagedKVCache(2, 16, 8, page_size=4, stored=stored, **options)


def rows(batch: int, tokens: int, heads: int = 2) -> torch.Tensor:
    return torch.randn(batch, tokens, heads, 16, generator=torch.Generator().manual_seed(tokens))


def test_forked_paged_kv_cache_sequences_share_pages_until_append() -> None:
    cache = paged()
    a = cache.allocate()
    assert cache.block_table().shape == (1, 0)
    cache.append([a], rows(1, 6), rows(1, 6))
    cache.block_table().fill_(99)  # a copy
    b = cache.fork(a)
    assert cache.free_pages == 6
    cache.append([b], rows(1, 1), rows(1, 1))
    assert cache.lengths([a, b]) == [6, 7]
    table = cache.block_table([a, b])
    assert table[0, 0] == table[1, 0]
    assert table[0, 1] != table[1, 1]
    cache.append([a], rows(1, 1), rows(1, 1))  # b let go of the page: nothing is copied
    assert cache.free_pages == 5
    q = rows(2, 1, 8)
    both = fa.decode_attention(q, cache, sequences=[a, b], backend="golden")
    k = torch.cat((rows(1, 6), rows(1, 1)), 1)
    want = fa.decode_attention(q, (k.expand(2, -1, -1, -1), k.expand(2, -1, -1, -1)), backend="golden")
    assert same(both, want)
    cache.free(a)
    assert cache.lengths([b]) == [7]
    assert cache.block_table().tolist() == cache.block_table([b]).tolist()
    cache.free(b)
    assert cache.free_pages == 8
    for freed in (cache.lengths, cache.block_table):
        with pytest.raises(ValueError, match="sequence: expected a sequence of this cache that was not freed"):
            freed([a])


def test_full_paged_kv_cache_raises_and_leaves_lengths_unchanged() -> None:
    cache = paged()
    a, b = cache.allocate(), cache.allocate()
    cache.append([a, b], rows(2, 15), rows(2, 15))
    with pytest.raises(fa.CacheFullError, match=r"2 more pages needed, 0 free"):
        cache.append([a, b], rows(2, 2), rows(2, 2))
    assert cache.lengths() == [15, 15]
    cache.append([a, b], rows(2, 1), rows(2, 1))
    assert cache.free_pages == 0
    c = cache.allocate()
    for wrong in (rows(1, 0).half(), rows(1, 0, 3), rows(2, 0), rows(1, 0).to("meta"), rows(1, 0).numpy()):
        with pytest.raises(ValueError, match="PagedKVCache: k: expected"):
            cache.append([c], wrong, rows(1, 0))
    with pytest.raises(ValueError, match=r"v: expected .* on cpu, got .* on meta"):
        cache.append([c], rows(1, 0), rows(1, 0).to("meta"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"dim_v": 24, "shares_kv": True},
        {"dtype": torch.int32},
        {"dtype": "float32"},
        {"dim_v": 7, "stored": "int4"},
        {"dim_v": 16, "stored": "int4", "dim": 15},
    ],
    ids=str,
)
def test_paged_kv_cache_refuses_unusable_dims_and_dtypes(wrong: Args) -> None:
    with pytest.raises(ValueError, match=f"PagedKVCache: {next(iter(wrong))}: expected"):
        fa.PagedKVCache(**{"heads": 2, "dim": 16, "pages": 8, **wrong})


def test_decode_refuses_lengths_table_and_scales_beside_paged_kv_cache() -> None:
    """A length given beside a cache would otherwise be ignored, and the result would be wrong."""
    cache = paged()
    a = cache.allocate()
    cache.append([a], rows(1, 6), rows(1, 6))
    table, scale = cache.block_table([a]), torch.ones(2)
    for name, value in {"kv_len": [3], "block_table": table, "k_scale": scale, "v_offset": scale, "dim_v": 8}.items():
        with pytest.raises(fa.ContractError, match=f"decode_attention: {name}: expected nothing with a PagedKVCache"):
            fa.decode_attention(rows(1, 1, 4), cache, **{name: value})
    with pytest.raises(fa.ContractError, match="sequences: expected a PagedKVCache to choose from"):
        fa.decode_attention(rows(1, 1, 4), (rows(1, 6), rows(1, 6)), sequences=[a])


@pytest.mark.parametrize(
    ("k", "v", "table"),
    [
        ((2, 10, 2, 16), (2, 5, 2, 16), False),
        ((2, 5, 2, 16), (2, 10, 2, 16), False),
        ((6, 4, 2, 16), (3, 4, 2, 16), True),
        ((6, 4, 2, 16), (6, 2, 2, 16), True),
    ],
    ids=["fewer tokens", "more tokens", "fewer pages", "smaller pages"],
)
def test_decode_refuses_values_of_other_shape_than_keys(k: tuple[int, ...], v: tuple[int, ...], table: bool) -> None:
    pages = {"kv_len": [5, 5], "block_table": torch.tensor([[0, 1], [4, 5]], dtype=torch.int32)} if table else {}
    with pytest.raises(
        fa.ContractError, match=rf"v: expected the shape of k .* got float32 \[{v[0]}, {v[1]}, .* beside float32"
    ):
        fa.decode_attention(rows(2, 1, 4), (torch.zeros(k), torch.zeros(v)), **pages)
    if not table:
        lists = [list(torch.zeros(shape).split(1)) for shape in (k, v)]
        lists[0][0] = lists[1][0]  # so that the second one is wrong
        with pytest.raises(fa.ContractError, match="v: expected the shape of k"):
            fa.decode_attention(rows(2, 1, 4), tuple(lists))


def test_decode_refuses_scalar_tensors_as_cache() -> None:
    one, number = rows(2, 6), torch.zeros(())
    for wrong, name in (((one, number), "v"), ((number, one), "k")):
        with pytest.raises(fa.ContractError, match=f"decode_attention: {name}: expected"):
            fa.decode_attention(rows(2, 1, 4), wrong)


@pytest.mark.parametrize("name", ["v_scale", "v_offset"])
def test_value_scale_and_offset_without_v_are_refused(name: str) -> None:
    stored = torch.ones(2, 6, 2, 16, dtype=torch.int8)
    given: dict[str, Any] = {"k_scale": torch.ones(1), name: torch.ones(1)}
    with pytest.raises(fa.ContractError, match=f"{name}: expected None without v"):
        fa.decode_attention(rows(2, 1, 4), stored, dim_v=8, **given)


def test_decode_refuses_regrouped_key_and_value_lists_after_valid_call() -> None:
    """Accepted calls are cached: the same tensors divided differently between lists must be checked again."""
    q, one = rows(1, 1, 4), rows(1, 6)
    fa.decode_attention(q, (one, one))
    with pytest.raises(fa.ContractError, match="dim_v: expected v, or dim_v"):
        fa.decode_attention(q, [one, one])
    q = rows(2, 1, 4)
    fa.decode_attention(q, ([one, one], [one, one]))
    with pytest.raises(fa.ContractError, match="v: expected the shape of k"):
        fa.decode_attention(q, ([one], [one, one, one]))


@pytest.mark.parametrize("first", [0, 1])
def test_decode_accepts_tensor_list_with_0_or_1_token_in_first_cache(first: int) -> None:
    """Strides of axes of size 0 and 1 have no meaning: such tensors count as contiguous."""
    lengths, q = [first, 40, 0, 1], rows(4, 1, 4)
    k = [rows(1, n).transpose(1, 2) for n in lengths]
    k[1] = k[1].contiguous()
    assert k[0].is_contiguous()
    assert k[0].stride(2) != k[1].stride(2)
    want = torch.cat([fa.decode_attention(q[i : i + 1], ([t], [t]), cache_layout="BNSD") for i, t in enumerate(k)])
    assert torch.equal(fa.decode_attention(q, (k, k), cache_layout="BNSD"), want)


@pytest.mark.parametrize("stored", ["", "int8"])
def test_paged_kv_cache_made_in_inference_mode_is_writable_outside(stored: str) -> None:
    with torch.inference_mode():
        cache = paged(stored)
        a = cache.allocate()
        cache.append([a], rows(1, 6), rows(1, 6))
    cache.append([a], rows(1, 3), rows(1, 3))
    assert cache.lengths() == [9]


def test_paged_kv_cache_append_of_zero_tokens_leaves_lengths_unchanged() -> None:
    cache = paged()
    six = [cache.allocate() for _ in range(6)]
    cache.append(six, rows(6, 1), rows(6, 1))
    cache.append(six, rows(6, 0), rows(6, 0))
    assert cache.lengths() == [1] * 6


def test_forked_sequences_appended_together_copy_the_shared_page_once() -> None:
    cache = paged()
    a = cache.allocate()
    cache.append([a], rows(1, 6), rows(1, 6))
    b = cache.fork(a)
    cache.append([a, b], rows(2, 1), rows(2, 1))
    assert cache.free_pages == 5  # one copy: the other keeps the page
    assert len({*cache.block_table()[:, 1].tolist()}) == 2


@pytest.mark.parametrize(("stored", "error"), [("int8", 0.5 / 127), ("int4", 0.5 / 7)])
@pytest.mark.parametrize("dim", [16, 15])
def test_quantised_paged_kv_cache_values_are_within_half_a_step(stored: str, error: float, dim: int) -> None:
    cache = fa.PagedKVCache(2, dim, 8, page_size=4, stored=stored)
    a = cache.allocate()
    k = rows(1, 9)[..., :dim]
    cache.append([a], k, k)
    # A band of one token returns that token's values.
    for token in range(9):
        band = fa.Band(token - 8, token - 7)
        got = fa.decode_attention(rows(1, 1, 2)[..., :dim], cache, band=band, backend="golden")
        limit = k[:, token].abs().amax(-1, keepdim=True) * error * 1.001
        assert ((got[:, 0] - k[:, token]).abs() <= limit).all()
    assert cache.nbytes < paged().nbytes


def test_shared_kv_cache_uses_key_prefix_as_values_in_rows_and_decode() -> None:
    cache = fa.PagedKVCache(1, 24, 4, dim_v=16, page_size=4, shares_kv=True)
    a = cache.allocate()
    k, q = torch.randn(1, 7, 1, 24), torch.randn(1, 2, 8, 24)
    cache.append([a], k)
    assert same(cache.rows(a)[0], k[0])
    assert same(cache.rows(a)[1], k[0, ..., :16])
    got = fa.decode_attention(q, cache, backend="golden")
    assert same(got, fa.decode_attention(q, (k, k[..., :16]), backend="golden"))
    assert same(got, fa.decode_attention(q, k, dim_v=16, backend="golden"))


def test_decode_with_window_sink_and_several_tokens_equals_attention() -> None:
    q, k, v = torch.randn(2, 3, 4, 16), torch.randn(2, 9, 2, 16), torch.randn(2, 9, 2, 16)
    lengths: dict[str, Any] = {"kv_len": [9, 4], "return_lse": True, "backend": "golden"}
    for band in (fa.Band.causal(), fa.Band.window(2, 0), fa.Band.full()):
        more = {"band": band, "sink": torch.randn(4), "softcap": 0.7} | lengths
        got, want = fa.decode_attention(q, (k, v), **more), fa.attention(q, k, v, **more)
        assert all(same(one, other) for one, other in zip(got, want, strict=True))


@pytest.mark.parametrize("shape", [(1,), (2,), (2, 16), (2, 9, 2)], ids=["tensor", "head", "channel", "token"])
def test_decode_with_cache_scales_of_every_shape_matches_attention(shape: tuple[int, ...]) -> None:
    q = torch.randn(2, 1, 4, 16, dtype=torch.float64)
    k, v = (torch.randint(-128, 128, (2, 9, 2, 16), dtype=torch.int8) for _ in "kv")
    scales = {f"{side}_{what}": torch.rand(shape) / 50 for side in "kv" for what in ("scale", "offset")}
    got = fa.decode_attention(q, (k, v), **scales, backend="golden")

    def meaning(stored: torch.Tensor, side: str) -> torch.Tensor:
        last = (slice(None),) * len(shape) + ((None,) if len(shape) in (3,) or shape == (2,) else ())
        return (stored.double() + scales[f"{side}_offset"][last]) * scales[f"{side}_scale"][last]

    want = fa.attention(q, meaning(k, "k"), meaning(v, "v"), backend="golden")
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("store", ["stack", "list"])
def test_captured_decode_call_replays_without_differences(store: str, tmp_path: Path) -> None:
    args = {name: value for name, value in arguments(DecodeCase(store=store)).items() if value is not None}
    with fa.capture(tmp_path) as recorded:
        npu.npu_incre_flash_attention(**args)
    again = fa.replay(recorded.files[0])
    assert again.operator == "npu_incre_flash_attention"
    assert again.differences == {"attention_out": 0.0}
