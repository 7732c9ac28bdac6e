"""A window of keys and compressed keys: golden against autograd, back ends against golden, calls with equal bits."""

from dataclasses import replace

import pytest
import torch
from support.bits import same_bits
from support.compressed import CASES, CompressedCase, arguments, lowered, wanted, witness
from support.sparse_checks import close

import fusion_attention as fa
from fusion_attention.testing import check
from fusion_attention.testing.estimated_rounding_errors import compare_with
from fusion_attention.testing.sparse import compute, in_float64

SMALL = [case for case in CASES if max(case.q_len) * max(case.kv_len) < 5000]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
def test_golden_compressed_attention_matches_autograd(case: CompressedCase) -> None:
    args = arguments(case)
    want, got = witness(case, args), compute(case, in_float64(lowered(args)), args["dy"].double(), "golden")
    close({name: got[name] for name in want if name in got}, {name: want[name] for name in want if name in got})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_cpu_back_end_compressed_attention_matches_reference(case: CompressedCase) -> None:
    args = arguments(case)
    check(case.id, compute(case, lowered(args), args["dy"], "cpu"), wanted(case, args))


def shown(case: CompressedCase, args: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns a case's arguments under the names of compressed_attention()."""
    names = {"query": "q", "key": "k", "key_compressed": "k_compressed", "sparse_indices": "indices", "sinks": "sink",
             "value": "v", "value_compressed": "v_compressed", "actual_seq_qlen": "q_len", "scale_value": "scale",
             "actual_seq_kvlen": "kv_len", "block_table": "page_table"}  # fmt: skip
    return {names.get(name, name): value for name, value in args.items() if name != "dy"}


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[6], CASES[15]], ids=lambda case: case.id)
@pytest.mark.parametrize("backend", ["cpu", "golden"])
def test_compressed_attention_is_bitwise_equal_to_lowered_call(case: CompressedCase, backend: str) -> None:
    args = arguments(case)
    want = compute(case, lowered(args), args["dy"], backend)
    leaves = {n: args[n].detach().clone().requires_grad_() for n in ("query", "key", "key_compressed")}
    out, lse = fa.compressed_attention(**shown(case, {**args, **leaves}), return_lse=True, backend=backend)
    same_bits(out, want["out"], "out")
    gradients = torch.autograd.grad((out * args["dy"]).nan_to_num().sum(), tuple(leaves.values()))
    for name, gradient in zip(leaves, gradients, strict=True):
        same_bits(gradient, want[f"d{name}"], name)
    assert lse.shape == (out.shape[:2] if case.packed else (len(out), out.shape[2], out.shape[1]))


def test_compressed_attention_is_bitwise_equal_for_packing_and_threads() -> None:
    case = CompressedCase(q_len=(7, 7), kv_len=(9, 9), ratio=2, window=4, heads_q=8, dim_qk=32, sink=True)
    args = arguments(case)
    want = compute(case, lowered(args), args["dy"], "cpu")
    flat = {n: t.flatten(0, 1) if isinstance(t, torch.Tensor) and t.dim() > 2 else t for n, t in args.items()}
    flat = {**flat, "layout": "TND"}
    packed = compute(replace(case, layout="TND"), lowered(flat), flat["dy"], "cpu")
    for name in ("out", "dquery", "dkey", "dkey_compressed", "dsinks"):
        same_bits(packed[name].view(want[name].shape), want[name], name)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        same_bits(compute(case, lowered(args), args["dy"], "cpu"), want)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("backend", ["cpu", "golden"])
def test_compressed_attention_without_window_keys_matches_formula(backend: str) -> None:
    q, c, sink = torch.randn(1, 2, 2, 8), torch.randn(1, 3, 1, 8, requires_grad=True), torch.randn(2)
    given = {"ratio": 2, "residual": [1], "sink": sink, "return_lse": True, "backend": backend}
    out, lse = fa.compressed_attention(q, c[:, :0], c, **given)
    (gradient,) = torch.autograd.grad(out.sum(), (c,))

    def formula() -> tuple[torch.Tensor, ...]:
        keys = c.detach().double().requires_grad_()
        scores = torch.einsum("bshd,bkhd->bhsk", q.double(), keys.expand(1, 3, 2, 8)) * 8**-0.5
        scores = torch.cat((scores, sink.double()[:, None, None].expand(1, 2, 2, 1)), -1)
        rows = torch.einsum("bhsk,bkhd->bshd", scores.softmax(-1)[..., :3], keys.expand(1, 3, 2, 8))
        return rows, scores.logsumexp(-1)

    compare_with(backend, (out.detach(), lse.detach()), lambda: tuple(t.detach() for t in formula()))
    assert gradient.isfinite().all()
    assert gradient.any()


def test_compressed_attention_with_only_window_keys_cached_equals_all_keys() -> None:
    """Positions count from the compressed keys, in packed and in padded layouts."""
    case = CompressedCase(layout="TND", q_len=(2, 3), kv_len=(9, 12), ratio=4, window=3, sink=True)
    args = shown(case, arguments(case))
    want = fa.compressed_attention(**args)
    window_keys = torch.cat((args["k"][9 - 4 : 9], args["k"][9 + 12 - 5 : 9 + 12]))
    given = {**args, "k": window_keys, "kv_len": [4, 5], "residual": [1, 0]}
    same_bits(fa.compressed_attention(**given), want, "packed")
    lengths = {"layout": "BSND", "q_len": None, "kv_len": None, "compressed_len": None}
    q, k, c = args["q"][None, 2:5], window_keys[None, 4:], args["k_compressed"][None, 2:5]
    one = {**given, **lengths, "q": q, "k": k, "k_compressed": c, "residual": [0]}
    same_bits(fa.compressed_attention(**one)[0], want[2:5], "padded")
    both = {**one, "q": q.expand(2, -1, -1, -1), "k": k.expand(2, -1, -1, -1), "k_compressed": c.expand(2, -1, -1, -1)}
    out = fa.compressed_attention(**{**both, "compressed_len": [3, 3], "residual": [0, 0]})
    same_bits(out[1], want[2:5], "two sequences")


def test_single_list_of_compressed_keys_applies_to_all_kv_heads() -> None:
    case = CompressedCase(lists="all", count=3, heads_q=4, heads_kv=2)
    args = shown(case, arguments(case))
    one = args["indices"][:, :, :1]
    both = fa.compressed_attention(**{**args, "indices": one.expand(-1, -1, 2, -1)})
    same_bits(fa.compressed_attention(**{**args, "indices": one}), both, "one list")


def test_compressed_attention_ignores_nan_and_infinity_in_invisible_keys() -> None:
    case = CompressedCase(q_len=(3,), kv_len=(12,), window=2, ratio=2, lists="all", count=2)
    args = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in arguments(case).items()}
    args["sparse_indices"].remainder_(4)
    want = compute(case, lowered(args), args["dy"], "cpu")
    args["key"][:, :8] = torch.nan
    args["key_compressed"][:, 4:] = torch.inf
    same_bits(compute(case, lowered(args), args["dy"], "cpu"), want)


BAD = [
    ({"ratio": 0}, r"ratio: expected ratio >= 1, got 0"),
    ({"band": fa.Band.prefix_causal([1])}, r"band: expected a band with integer edges, and no prefix or one per"),
    ({"residual": [0, 2]}, r"residual: expected numbers from 0 to ratio - 1"),
    ({"residual": [0]}, r"residual: expected one number per sequence"),
    ({"k_compressed": torch.ones(2, 4, 1, 9)}, r"k_compressed: expected axis 3 to be D=8 as in q, got 9"),
    ({"k_compressed": torch.ones(2, 4, 1, 8).half()}, r"k_compressed: expected float32"),
    ({"v": torch.ones(2, 9, 1, 8)}, r"v_compressed: expected compressed values if v is a tensor, otherwise None"),
    ({"compressed_len": [4, 5]}, r"compressed_len: expected the lengths of the sequences in the tensor"),
    ({"indices": torch.full((2, 5, 1, 2), 4)}, r"indices: expected .* got 4 at batch 0, row 0, slot 0"),
    ({"indices": torch.full((2, 5, 1, 2), -2)}, r"indices: expected .* got -2 at batch 0"),
    ({"sink": torch.ones(3)}, r"sink: expected axis 0 to be N1=2 as in q, got 3"),
    ({"layout": "TND"}, r"compressed_attention: "),
    (
        {"compressed_page_table": torch.zeros(2, 1, dtype=torch.int32)},
        r"compressed_len: expected the lengths of packed",
    ),
]


@pytest.mark.parametrize(
    ("change", "message"), BAD, ids=[str(sorted(change)) + str(n) for n, (change, _) in enumerate(BAD)]
)
def test_compressed_attention_refuses_invalid_arguments(change: dict[str, object], message: str) -> None:
    given = {
        "q": torch.ones(2, 5, 2, 8),
        "k": torch.ones(2, 9, 1, 8),
        "k_compressed": torch.ones(2, 4, 1, 8),
        "ratio": 2,
    }
    with pytest.raises(fa.ContractError, match=message):
        fa.compressed_attention(**{**given, **change})


def test_compressed_attention_warns_about_too_many_compressed_keys() -> None:
    q, k = torch.ones(1, 2, 1, 8), torch.ones(1, 9, 1, 8)
    with pytest.warns(fa.ContractWarning, match="expected the tokens of the keys // ratio"):
        fa.compressed_attention(q, k, k[:, :5], ratio=2)
