"""C definitions of the operators, from the declarations in their headers, for csrc/capi/operators.cpp to include.

    python codegen/c_definitions.py src/fusion_attention/capi/include operators.inc

The build runs this file, so it needs nothing but Python.
"""

import re
import sys
from pathlib import Path

_PHASE_1 = re.compile(r"\baclnn(\w+)GetWorkspaceSize\(\s*([^)]*),\s*uint64_t \*workspaceSize")


def definitions(include: Path) -> str:
    """Returns the includes of all headers, and for each operator OPERATOR(name, (parameters), names)."""
    lines = []
    for header in sorted((include / "aclnnop").glob("*.h")):
        lines.append(f'#include "aclnnop/{header.name}"\n')
        for name, parameters in _PHASE_1.findall(header.read_text(encoding="utf-8")):
            names = ", ".join(re.findall(r"(\w+)(?:,|$)", parameters))
            lines.append(f"OPERATOR({name}, ({parameters}), {names})\n")
    return "".join(lines)


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(definitions(Path(sys.argv[1])), encoding="utf-8")
