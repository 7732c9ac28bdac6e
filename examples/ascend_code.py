"""Runs a model file for Ascend's chips unchanged on a machine without one: a training step on device "npu".

ascend/model.py calls torch_npu's fused functions if `x.device.type == "npu"`, and plain torch on other devices. This
program runs both from the same weights, and plain torch again in float64, with which it compares the fused results.

    python examples/ascend_code.py
    fusion-attention npu --coverage examples/ascend    # lists the names of torch_npu in the files, and what is missing
"""

from fusion_attention import npu

npu.install()  # before the model file, which looks for torch_npu

import torch  # noqa: E402
from ascend.model import Config, Model  # noqa: E402

from fusion_attention.testing.estimated_rounding_errors import compare_with  # noqa: E402

ROWS, RATE = 96, 1e-2


def stepped(device: str, dtype: torch.dtype, config: Config, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns both losses, every gradient, and the weights after a step of SGD."""
    torch.manual_seed(0)
    model = Model(config).to(device, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loss, index_loss = model(tokens.to(device))
    (loss + index_loss).backward()
    gradients = {f"d {name}": p.grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    results = {"loss": loss, "index_loss": index_loss, **gradients, **dict(model.named_parameters())}
    assert {t.device.type for t in results.values()} == {torch.device(device).type}
    return {name: t.detach().cpu() for name, t in results.items()}


tokens = torch.randint(256, (2, ROWS + 1), generator=torch.Generator().manual_seed(1))
config = Config(width=64, latent=128, top_k=32)  # smaller than the chip's, for steps in float64
fused = stepped("npu", torch.float32, config, tokens)
eager = stepped("cpu", torch.float32, config, tokens)
# Compares every tensor with float64's. The allowed errors are those of 8 steps in float64 with random rounding errors.
compare_with("fused", fused, lambda: stepped("cpu", torch.float64, config, tokens), draws=8)
difference = max(((fused[name] - eager[name]).norm() / eager[name].norm()).item() for name in fused)
print(f"fused on npu and eager on cpu: losses {fused['loss']:.6f} + {fused['index_loss']:.6f} and")
print(f"{eager['loss']:.6f} + {eager['index_loss']:.6f}; {len(fused)} tensors of a step at most {difference:.0e} apart")

with npu.strict():  # calls that the chip would refuse are errors
    half = stepped("npu", torch.bfloat16, Config(), tokens)
print(f"the chip's own sizes in bfloat16, strict: losses {half['loss']:.4f} + {half['index_loss']:.4f}")
