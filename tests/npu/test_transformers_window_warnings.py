"""transformers' NPU path on an installed torch_npu equals eager attention, and warns in exactly the calls that ignore
windows or sinks."""

import inspect
import subprocess
import sys
from collections.abc import Callable

import pytest

from fusion_attention import ContractWarning
from fusion_attention.npu.transformers_window_warnings import _warning

HEAD = '''
import warnings
from fusion_attention import npu
npu.install()
import torch
from transformers import Gemma3TextConfig, Gemma3TextModel, LlamaConfig, LlamaModel, MistralConfig, MistralModel

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
IDS = torch.randint(0, 64, (2, 24), device="npu")
PADDING = torch.ones_like(IDS)
PADDING[1, 9:] = 0


def told(model, mask=None, implementation="flash_attention_2"):
    """(the texts of ContractWarnings, what was computed) of one forward."""
    model.set_attn_implementation(implementation)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        out = model(input_ids=IDS, attention_mask=mask).last_hidden_state
    return [str(w.message) for w in seen if w.category is npu_warning], out


from fusion_attention import ContractWarning as npu_warning
'''


# ruff: noqa: F821  (the names of HEAD)


def windowed_models() -> None:
    gemma = Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=8, layer_types=["sliding_attention", "full_attention"])
    models = {
        "mistral": (MistralModel(MistralConfig(**SIZES, sliding_window=8)), 2),
        "gemma": (Gemma3TextModel(gemma), 1),
        "llama": (LlamaModel(LlamaConfig(**SIZES)), 0),
        "as long as its window": (MistralModel(MistralConfig(**SIZES, sliding_window=24)), 0),
    }
    for name, (model, layers) in models.items():
        model = model.eval().npu()
        for mask in (None, PADDING):
            texts, out = told(model, mask)
            _, eager = told(model, mask, "eager")
            assert len(texts) == layers, (name, texts)
            assert all("ignores window_size: every row sees all keys" in text for text in texts)
            apart = (out - eager)[PADDING.bool()].abs().max()
            assert apart > 0.1 if layers else apart < 1e-4, (name, apart)


def trained() -> None:
    """Gradients equal those of eager attention; calls with padding use the packed layout TND."""
    from transformers import BertConfig, BertModel
    from transformers.integrations import npu_flash_attention

    layouts, original = [], npu_flash_attention.npu_fusion_attention

    def counted(*args, **kwargs):
        layouts.append(kwargs.get("input_layout", args[4] if len(args) > 4 else None))
        return original(*args, **kwargs)

    npu_flash_attention.npu_fusion_attention = counted
    for model in (LlamaModel(LlamaConfig(**SIZES)), BertModel(BertConfig(**SIZES))):
        model = model.eval().npu()
        for mask, layout in ((None, "BSND"), (PADDING, "TND")):
            results = []
            for implementation in ("eager", "flash_attention_2"):
                model.zero_grad()
                _, out = told(model, mask, implementation)
                out[PADDING.bool()].square().mean().backward()
                results.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
            assert layouts == [layout] * 2, layouts
            layouts.clear()
            eager, ours = results
            assert eager.keys() == ours.keys()
            for name, value in eager.items():
                assert (value - ours[name]).abs().max() <= 1e-6 + 1e-5 * value.abs().max(), (type(model), name)
    npu_flash_attention.npu_fusion_attention = original


def sinks() -> None:
    from transformers.modeling_flash_attention_utils import _flash_attention_forward, lazy_import_flash_attention

    lazy_import_flash_attention("flash_attention_2")
    q = torch.randn(1, 5, 4, 16)
    for sink in (None, torch.randn(4)):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            out = _flash_attention_forward(q, q, q, None, 5, True, s_aux=sink, attn_implementation="flash_attention_2")
        assert out.shape == q.shape
        assert [str(w.message).split(":")[0] for w in warned if w.category is npu_warning] == (
            [] if sink is None else ["transformers' attention for an NPU ignores s_aux"]
        )


def compiled() -> None:
    model = MistralModel(MistralConfig(**SIZES, sliding_window=8)).bfloat16().eval().npu()
    _, eager = told(model)
    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert torch.equal(fast(input_ids=IDS).last_hidden_state, eager)
    assert any("ignores window_size" in str(w.message) for w in warned)


def taken_back() -> None:
    import sys

    from transformers.integrations import npu_flash_attention as module

    functions = ("npu_flash_attn_func", "npu_flash_attn_varlen_func")
    wrapped = [getattr(module, name) for name in functions]
    npu.uninstall()
    bare = [getattr(module, name) for name in functions]
    assert [function.__wrapped__ for function in wrapped] == bare
    assert not any(type(finder).__name__ == "_Watch" for finder in sys.meta_path)
    npu.install()
    assert [getattr(module, name).__wrapped__ for name in functions] == bare
    model = MistralModel(MistralConfig(**SIZES, sliding_window=8)).eval().npu()
    assert len(told(model)[0]) == 2
    npu.uninstall()
    assert [getattr(module, name) for name in functions] == bare


@pytest.mark.slow
def test_transformers_attention_equals_eager_or_warns_of_ignored_window_or_sink() -> None:
    """The test runs in a new process, because transformers detects the NPU when it is imported."""
    bodies: list[Callable[[], None]] = [windowed_models, trained, sinks, compiled, taken_back]
    script = HEAD + "".join(f"\n{inspect.getsource(body)}\n{body.__name__}()\n" for body in bodies)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_wrapper_warns_only_of_parameters_missing_from_the_function() -> None:
    """Later versions of transformers with window parameters must not warn; each missing parameter has a text."""

    def knows_both(q: int, window_size: object = None, s_aux: object = None) -> int:
        return q

    def knows_windows(q: int, window_size: object = None) -> object:
        return window_size

    def knows_nothing(q: int, **kwargs: object) -> object:
        return kwargs

    assert _warning(knows_both) is knows_both
    wrapper = _warning(knows_windows)
    assert list(inspect.signature(wrapper).parameters) == ["q", "window_size", "s_aux"]
    assert wrapper(1, window_size=(3, 3)) == (3, 3)
    with pytest.warns(ContractWarning, match="ignores s_aux: the softmax has no attention sinks") as caught:
        assert wrapper(1, s_aux=3) is None
    assert caught[0].filename == __file__
    bare = _warning(knows_nothing)
    assert bare(1, window_size=(-1, -1), s_aux=None, causal=True) == {"causal": True}
