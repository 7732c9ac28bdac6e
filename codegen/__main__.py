"""python -m codegen: writes stubs, the operators' C headers, and README's picture."""

from pathlib import Path

from codegen import headers, stub
from fusion_attention import aclnn
from fusion_attention.npu.surface.modules import functions
from fusion_attention.ops import RECORDS
from fusion_attention.ops.auxiliary_definitions.definitions import CONTRACTS
from website.overview_diagram import overview

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "src/fusion_attention"


def files() -> dict[str, str]:
    """Text by path below the root."""
    results = {f"{PACKAGE}/capi/include/{name}": text for name, text in headers.files(RECORDS).items()}
    results[f"{PACKAGE}/_aclnn.pyi"] = stub.stub([getattr(aclnn, name) for name in aclnn.__all__])
    stubbed = [f for name, f in sorted(functions().items()) if name in CONTRACTS or name.startswith("_npu_fused")]
    results[f"{PACKAGE}/npu/__init__.pyi"] = stub.npu_stub(stubbed)
    results["docs/pictures/overview.svg"] = overview().render()
    return results


if __name__ == "__main__":
    for name, text in files().items():
        (ROOT / name).write_text(text, encoding="utf-8", newline="\n")
