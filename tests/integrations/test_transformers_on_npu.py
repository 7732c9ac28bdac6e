"""transformers models on device "npu" have the bits of the CPU, gradients included."""

import copy
import os
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from support.hf_models import BY_NAME, FAMILIES, VOCABULARY

CAUSAL = tuple(family.name for family in FAMILIES if "CausalLM" in family.model)
# Models take seconds, so `make test` runs only one with shared weights.
NAMES = [name if name == "Gemma 3" else pytest.param(name, marks=pytest.mark.slow) for name in CAUSAL]


def pair(name: str) -> tuple[Any, Any]:
    """(model on the CPU, copy on npu)."""
    family = BY_NAME[name]
    model = family.make()
    if family.has_experts:
        model.set_experts_implementation("grouped_mm")  # a model's default
    return model, copy.deepcopy(model).to("npu")


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_gradients_on_npu_equal_cpu_bitwise(name: str, torch_npu: Any) -> None:
    here, there = pair(name)
    ids = torch.randint(3, VOCABULARY, (2, 12))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    results = [
        m(input_ids=i, attention_mask=a, labels=i) for m, i, a in ((here, ids, mask), (there, ids.npu(), mask.npu()))
    ]
    assert results[1].logits.device.type == "npu"
    assert torch.equal(results[0].logits, results[1].logits.cpu())
    for result in results:
        result.loss.backward()
    wanted = dict(here.named_parameters())
    assert wanted.keys() == dict(there.named_parameters()).keys()
    for word, parameter in there.named_parameters():
        if (gradient := wanted[word].grad) is None:
            assert parameter.grad is None, word
            continue
        assert parameter.grad.device.type == "npu", word
        assert torch.equal(gradient, parameter.grad.cpu()), word


PROGRAM = """
    import sys
    import torch
    import transformers

    assert transformers.utils.is_torch_npu_available()
    folder = sys.argv[1]
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(64, (16, 12))]

    def trained(steps, last=None):
        torch.manual_seed(0)
        words = dict(bf16=True, gradient_checkpointing=True, save_steps=2, logging_steps=1, report_to=[])
        given = transformers.TrainingArguments(folder, max_steps=steps, learning_rate=0.01, **words)
        assert given.device.type == "npu"
        trainer = transformers.Trainer(transformers.LlamaForCausalLM(config), given, train_dataset=rows)
        trainer.train(resume_from_checkpoint=last)
        assert all(p.device.type == "npu" for p in trainer.model.parameters())
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    losses = trained(4)
    assert losses[-1] < losses[0], losses
    assert trained(4, folder + "/checkpoint-2") == losses
    print("trained")
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
def test_trainer_selects_npu_and_resumes_from_checkpoint(tmp_path: Any) -> None:
    """The program is unedited: transformers and accelerate detect torch_npu; training stops and resumes."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(PROGRAM), encoding="utf-8")
    command = [sys.executable, "-m", "fusion_attention.npu", str(script), str(tmp_path / "saved")]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=os.environ | {"HF_HUB_OFFLINE": "1"}
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.strip().endswith("trained")
