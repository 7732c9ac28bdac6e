"""The flash-attn integration: functions are compared with float64 formulas; install() provides an importable module.

The formulas are those of flash-attn's documentation, one sequence at a time.
"""

import copy
import importlib.metadata
import importlib.util
import inspect
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from support.bits import same_bits
from support.flash_attn import WORDS, ends, formula, of_sequence, packed_call

import fusion_attention as fa
from fusion_attention import npu
from fusion_attention.integrations import flash_attn as integration
from fusion_attention.integrations.flash_attn import argument_conversion, functions
from fusion_attention.integrations.transformers_masks import cached
from fusion_attention.testing.estimated_rounding_errors import compare_with

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    integration.uninstall()
    assert importlib.util.find_spec("flash_attn") is None
    assert not [name for name in sys.modules if name.split(".")[0] == "flash_attn"]


def judged(got: list[Tensor], call: Any, inputs: list[Tensor], dout: Tensor) -> None:
    """Compare got = [out, lse, dq, dk, dv] with call(*inputs) -> (out, lse) and its gradients in float64."""

    def computed() -> list[Tensor]:
        leaves = [t.detach().double().requires_grad_() for t in inputs]
        out, lse = call(*leaves)
        return [out, lse, *torch.autograd.grad(out, leaves, dout.double())]

    compare_with("[out, lse, dq, dk, dv]", got, computed)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", WORDS)
def test_flash_attn_func_matches_float64_formula(name: str, dtype: torch.dtype) -> None:
    how = WORDS[name]
    inputs = [torch.randn(3, s, n, 16).to(dtype).requires_grad_() for s, n in ((6, 4), (9, 2), (9, 2))]
    out, lse, none = integration.flash_attn_func(*inputs, **how, return_attn_probs=True)
    assert none is None
    assert lse.shape == (3, 4, 6)
    same_bits(integration.flash_attn_func(*inputs, **how), out)
    dout = torch.randn(out.shape).to(dtype)
    got = [out, lse, *torch.autograd.grad(out, inputs, dout)]

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        results = [formula(q[b], k[b], v[b], **of_sequence(how, b)) for b in range(3)]
        return torch.stack([o for o, _ in results]), torch.stack([x for _, x in results])

    judged(got, call, inputs, dout)


LENGTHS = [3, 0, 7], [5, 4, 2]


@pytest.mark.sampled(30)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", WORDS)
def test_flash_attn_varlen_func_matches_float64_formula(name: str, dtype: torch.dtype) -> None:
    how = WORDS[name]
    inputs = [torch.randn(s, n, 16).to(dtype).requires_grad_() for s, n in ((10, 4), (11, 2), (11, 2))]
    cu = ends(LENGTHS[0]), ends(LENGTHS[1])
    out, lse, none = integration.flash_attn_varlen_func(*inputs, *cu, 7, 5, **how, return_attn_probs=True)
    assert none is None
    assert lse.shape == (4, 10)
    dout = torch.randn(out.shape).to(dtype)
    judged([out, lse, *torch.autograd.grad(out, inputs, dout)], packed_call(how, LENGTHS), inputs, dout)


def test_qkvpacked_and_kvpacked_functions_equal_separate_tensors_bitwise() -> None:
    qkv, kv = torch.randn(2, 6, 3, 4, 16, requires_grad=True), torch.randn(2, 6, 2, 2, 16, requires_grad=True)
    q = torch.randn(2, 6, 4, 16, requires_grad=True)
    how = {"causal": True, "window_size": (3, 0), "softcap": 2.0, "return_attn_probs": True}
    cu = ends([6, 6])

    def flat(t: Tensor) -> Tensor:
        return t.flatten(0, 1)

    pairs = [
        (integration.flash_attn_qkvpacked_func(qkv, **how), integration.flash_attn_func(*qkv.unbind(2), **how)),
        (integration.flash_attn_kvpacked_func(q, kv, **how), integration.flash_attn_func(q, *kv.unbind(2), **how)),
        (
            integration.flash_attn_varlen_qkvpacked_func(flat(qkv), cu, 6, **how),
            integration.flash_attn_varlen_func(*flat(qkv).unbind(1), cu, cu, 6, 6, **how),
        ),
        (
            integration.flash_attn_varlen_kvpacked_func(flat(q), flat(kv), cu, cu, 6, 6, **how),
            integration.flash_attn_varlen_func(flat(q), *flat(kv).unbind(1), cu, cu, 6, 6, **how),
        ),
    ]
    for one, apart in pairs:
        same_bits(one[:2], apart[:2])
        assert one[2] is None
        for t in (qkv, q, kv):
            gradients = [
                torch.autograd.grad(o[0].sum(), t, allow_unused=True, retain_graph=True)[0] for o in (one, apart)
            ]
            assert (gradients[0] is None) == (gradients[1] is None)
            if gradients[0] is not None:
                same_bits(*gradients)


def test_varlen_func_has_the_same_autograd_nodes_as_attention() -> None:
    q = torch.randn(7, 2, 16, requires_grad=True)
    cu = ends([3, 4])
    out = integration.flash_attn_varlen_func(q, q, q, cu, cu, 4, 4, causal=True)
    direct = fa.attention(q, q, q, layout="TND", q_len=[3, 4], kv_len=[3, 4], band=fa.Band.causal())
    assert type(out.grad_fn) is type(direct.grad_fn)
    assert [type(node) for node, _ in out.grad_fn.next_functions] == [
        type(node) for node, _ in direct.grad_fn.next_functions
    ]
    same_bits(out, direct)


def test_dropout_follows_the_torch_seed_and_keeps_the_mean() -> None:
    q, ones = torch.randn(2, 64, 4, 16), torch.ones(2, 64, 4, 16)

    def drawn(seed: int, **how: Any) -> Tensor:
        torch.manual_seed(seed)
        return integration.flash_attn_func(q, q, ones, dropout_p=0.5, **how)

    same_bits(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))
    torch.manual_seed(1)
    flat = [t.flatten(0, 1) for t in (q, q, ones)]
    packed = integration.flash_attn_varlen_func(*flat, ends([64, 64]), ends([64, 64]), 64, 64, dropout_p=0.5)
    same_bits(packed, drawn(1).flatten(0, 1))
    keep = drawn(3)[..., 0]
    # Values are 1, so an element is twice the sum of the kept probabilities: 1 on average, with at most this deviation.
    weights = torch.einsum("bqnd,bknd->bnqk", q / 4, q).softmax(-1)
    deviation = weights.square().sum().sqrt() / keep.numel()
    assert (keep.mean() - 1).abs() < 6 * deviation


def test_cu_seqlens_are_read_and_validated_on_every_call() -> None:
    q, cu = torch.randn(7, 2, 16), ends([3, 4])
    before = integration.flash_attn_varlen_func(q, q, q, cu, cu, 4, 4)
    cu.numpy()[1] = 5  # unseen by torch
    after = integration.flash_attn_varlen_func(q, q, q, cu, cu, 5, 5)
    same_bits(after, integration.flash_attn_varlen_func(q, q, q, ends([5, 2]), ends([5, 2]), 5, 5))
    assert not torch.equal(before, after)
    for bad, message in ((cu[1:], "begin with 0, got 5 in front"), (cu[:0], "begin with 0, got none")):
        with pytest.raises(ValueError, match=f"flash_attn: cu_seqlens_q: expected cumulative lengths that {message}"):
            integration.flash_attn_varlen_func(q, q, q, bad, cu, 4, 4)
    with pytest.raises(fa.ContractError, match="q_len"):
        integration.flash_attn_varlen_func(q, q, q, ends([5, 9]), ends([5, 2]), 5, 5)


def test_cu_seqlens_on_another_device_are_read_once_per_version() -> None:
    class Elsewhere(torch.Tensor):
        """A tensor that counts its reads, because each read of a CUDA tensor synchronises the device."""

        device, reads = torch.device("cuda"), 0

        def tolist(self) -> list[int]:
            self.reads += 1
            return [int(n) for n in self.as_subclass(torch.Tensor)]

    tensor = torch.tensor([0, 3]).as_subclass(Elsewhere)
    assert argument_conversion.numbers(tensor) == argument_conversion.numbers(tensor) == [0, 3]
    assert tensor.reads == 1
    tensor[1] = 4
    assert argument_conversion.numbers(tensor) == argument_conversion.numbers(tensor) == [0, 4]
    assert tensor.reads == 2


def test_copy_of_a_tensor_is_read_again() -> None:
    cumulative, read = ends([3]), torch.Tensor.tolist
    cumulative[0], cumulative[1] = 0, 4
    assert cached(cumulative, "numbers", read) == [0, 4]
    copied = copy.deepcopy(cumulative)
    copied[1] = 5
    assert copied._version == cumulative._version
    assert cached(copied, "numbers", read) == [0, 5]


# ------------------------------------------------------------------------------- compiled functions, installed module


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_functions_equal_eager_bitwise(dynamic: bool) -> None:
    q, cu = torch.randn(7, 4, 16, requires_grad=True), ends([3, 4])

    def program(q: Tensor, cu: Tensor) -> Tensor:
        how: dict[str, Any] = {"causal": True, "window_size": (2, 0)}
        padded = integration.flash_attn_func(q[None], q[None], q[None], softcap=2.0)
        return integration.flash_attn_varlen_func(q, q, q, cu, cu, 4, 4, **how) + padded[0]

    got, want = torch.compile(program, fullgraph=True, backend="aot_eager", dynamic=dynamic)(q, cu), program(q, cu)
    same_bits(got, want)
    same_bits(torch.autograd.grad(got.sum(), q)[0], torch.autograd.grad(want.sum(), q)[0])


def test_install_provides_an_importable_flash_attn_module() -> None:
    integration.install()
    integration.install()
    import flash_attn  # type: ignore[import-not-found]
    from flash_attn.bert_padding import pad_input, unpad_input  # type: ignore[import-not-found]  # noqa: F401
    from flash_attn.flash_attn_interface import flash_attn_varlen_func  # type: ignore[import-not-found]
    from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb  # type: ignore[import-not-found]
    from flash_attn.losses.cross_entropy import CrossEntropyLoss  # type: ignore[import-not-found]
    from flash_attn.ops.rms_norm import RMSNorm, rms_norm  # type: ignore[import-not-found]

    assert (
        importlib.metadata.version("flash_attn") == importlib.metadata.version("flash-attn") == flash_attn.__version__
    )
    assert flash_attn.__version__.split(".")[0] == "2"
    assert flash_attn_varlen_func is flash_attn.flash_attn_varlen_func is integration.flash_attn_varlen_func
    assert set(flash_attn.__all__) == {n for n in integration.__all__ if n.startswith("flash_attn")}
    with pytest.raises(ImportError):
        from flash_attn.ops.triton.layer_norm import layer_norm_fn  # type: ignore[import-not-found]  # noqa: F401
    with pytest.raises(
        AttributeError, match=r"fusion_attention's flash_attn has no flash_attn_3 \(docs/with_flash_attn.md"
    ):
        flash_attn.flash_attn_3  # noqa: B018
    x = torch.randn(2, 5, 3, 2, 16)
    turned = RotaryEmbedding(16)(x)
    angles = torch.outer(torch.arange(5).float(), 10000.0 ** -(torch.arange(0, 16, 2) / 16))
    same_bits(turned[:, :, 0], apply_rotary_emb(x[:, :, 0], angles.cos(), angles.sin()))
    same_bits(turned[:, :, 2], x[:, :, 2])
    same_bits(RMSNorm(16)(x), rms_norm(x, torch.ones(16), 1e-5))
    assert CrossEntropyLoss(inplace_backward=True)(torch.randn(3, 4), torch.tensor([0, 1, -100])).isfinite()


@pytest.mark.parametrize(("version", "count"), [("2.6.3", 4), ("2.7.0.post2", 5), ("2.10.1", 5)])
def test_install_of_an_older_version_sets_version_and_unpad_input(version: str, count: int) -> None:
    integration.install()
    integration.install(version)
    from flash_attn.bert_padding import unpad_input

    assert importlib.metadata.version("flash_attn") == sys.modules["flash_attn"].__version__ == version
    assert len(unpad_input(torch.randn(2, 3, 4), torch.ones(2, 3, dtype=torch.bool))) == count


def test_flash_attn_and_torch_npu_uninstall_in_either_order() -> None:
    for last in (integration.uninstall, npu.uninstall):
        integration.install()
        npu.install()
        (npu.uninstall if last is integration.uninstall else integration.uninstall)()
        assert ("flash_attn" in sys.modules) == (last is integration.uninstall)
        last()
        assert not {"flash_attn", "torch_npu"} & set(sys.modules)


def test_install_refuses_an_already_imported_flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
        with pytest.raises(RuntimeError, match=r"expected no other flash_attn, got <module 'flash_attn'"):
            integration.install()


def test_signatures_equal_those_of_flash_attn_2_8() -> None:
    tail = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
    cu = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
    expected = {
        "flash_attn_func": f"q k v {tail}",
        "flash_attn_kvpacked_func": f"q kv {tail}",
        "flash_attn_qkvpacked_func": f"qkv {tail}",
        "flash_attn_varlen_func": f"q k v {cu} {tail} block_table",
        "flash_attn_varlen_kvpacked_func": f"q kv {cu} {tail}",
        "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {tail}",
        "flash_attn_with_kvcache": "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx "
        "cache_leftpad block_table softmax_scale causal window_size softcap rotary_interleaved alibi_slopes num_splits "
        "return_softmax_lse",
    }
    for name, parameters in expected.items():
        assert list(inspect.signature(getattr(integration, name)).parameters) == parameters.split()
    assert all(name in expected for name in vars(functions) if name.startswith("flash_attn_"))


TRANSFORMERS = """
from fusion_attention.integrations import flash_attn
flash_attn.install()
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

torch.manual_seed(0)
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
ids = torch.randint(0, 64, (2, 24))
mask = torch.ones_like(ids)
mask[1, :9] = 0
for config, kind in (
    (LlamaConfig(**sizes, num_key_value_heads=2), LlamaForCausalLM),
    (MistralConfig(**sizes, num_key_value_heads=2, sliding_window=8), MistralForCausalLM),
    (BertConfig(**sizes), BertModel),
):
    model = kind._from_config(config, attn_implementation="flash_attention_2", dtype=torch.float32).eval()
    found = {}
    for implementation in ("flash_attention_2", "eager"):
        model.set_attn_implementation(implementation)
        out = model(ids, attention_mask=mask)
        out = (out.last_hidden_state if kind is BertModel else out.logits)[mask.bool()]
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        found[implementation] = out, torch.autograd.grad((out * weights).sum(), [*model.parameters()][:3])
    (one, grads), (other, others) = found.values()
    assert (one - other).abs().max() < 1e-5 * other.abs().max(), kind
    assert all((a - b).abs().max() < 1e-4 * b.abs().max() for a, b in zip(grads, others)), kind
    if kind is not BertModel:
        tokens = []
        for implementation in ("flash_attention_2", "eager"):
            model.set_attn_implementation(implementation)
            tokens.append(model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0))
        assert torch.equal(*tokens), kind
flash_attn.uninstall()
from transformers.utils import import_utils
assert import_utils.is_flash_attn_2_available.__name__ == "is_flash_attn_2_available"
"""


@pytest.mark.slow
def test_transformers_flash_attention_2_matches_eager_attention() -> None:
    """The test runs in a new process, because transformers detects flash_attn when it is imported."""
    done = subprocess.run(
        [sys.executable, "-c", TRANSFORMERS], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
