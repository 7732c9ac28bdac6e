"""call(): the text of a call with a given mask, for each interface: setup and call, which can be run.

python_to_javascript.py translates this module to JavaScript, so it uses only the syntax that that module supports.
"""

from fusion_attention.explorer.visible import (
    BAND,
    FULL_MODES,
    Mask,
    Setting,
    as_mode,
    mask_of,
    own_band,
    own_says,
    picture,
    window_of,
)
from fusion_attention.ir.mask import UNLIMITED, Band
from fusion_attention.ops.shared.sparse_modes import sparse_band

HEADS, DIM = 8, 64
# The elements of a mask are written in a call only up to these numbers of ones and of elements.
MOST_ONES, MOST_CELLS = 48, 4096


def call(s: Setting, api: str) -> dict[str, str] | None:
    """Returns the text of a call with the mask arguments `s`: {"before": setup, "call": the call}; None: no call has
    this mask. api: one of INTERFACES, e.g. "training" for torch_npu.npu_fusion_attention()."""
    canonical = as_mode(s)
    if api == "own":
        return _native_call(s) if canonical is None or own_says(canonical) else None
    if canonical is None:
        return None
    if api == "training":
        return _training(canonical)
    return _inference(canonical) if api == "inference" else _two_phase(canonical)


def _shape(s: Setting, side: str) -> str:
    length = s.q_len if side == "q" else s.kv_len
    return f"{sum(length)}, {HEADS}, {DIM}" if s.packed else f"1, {length[0]}, {HEADS}, {DIM}"


def _list(numbers: list[int] | tuple[int, ...]) -> str:
    return "[" + ", ".join([str(n) for n in numbers]) + "]"


def _ends(lengths: tuple[int, ...]) -> list[int]:
    return [sum(lengths[: b + 1]) for b in range(len(lengths))]


def _call(function: str, words: list[str]) -> str:
    """Returns the text of a call with arguments `words`: one line, or lines of at most 58 characters."""
    line = f"{function}({', '.join(words)})"
    if len(line) <= 60:
        return line
    lines, current = [], "   "
    for word in words:
        if len(current) + len(word) > 58 and current != "   ":
            lines.append(current)
            current = "   "
        current = f"{current} {word},"
    lines.append(current)
    return f"{function}(\n" + "\n".join(lines) + "\n)"


# --------------------------------------------------------------------------------------------------------------- masks


def mask_lines(s: Setting, shape: Mask, npu: bool) -> list[str]:
    """Returns lines of a program that make the tensor `mask`: a triangle of `shape` that the operator expects for
    compressed masks, or the mask elements in `s`. npu: True to make it on device npu."""
    place = ', device="npu"' if npu else ""
    if s.mode not in FULL_MODES:
        lines = [f"mask = torch.ones({shape.shape[0]}, {shape.shape[1]}{place}).triu(1).bool()"]
        if s.mode == 6:
            lines.append(f"mask[{shape.shape[1]}:] = torch.arange({shape.shape[1]}{place}) >= {shape.shape[1] // 2}")
        return lines
    rows = max(s.q_len)
    columns = rows if s.mode == 9 else max(s.kv_len)
    if s.mask == "triangle":
        return [f"mask = torch.ones({rows}, {columns}{place}).triu(1).bool()"]
    lines = [f"mask = torch.zeros({rows}, {columns}, dtype=torch.bool{place})"]
    cells = [] if s.mask != "own" else _cells(s, rows, columns)
    if s.mask == "own" and (len(cells) > MOST_ONES or rows * columns > MOST_CELLS):
        lines.append("mask[...] = your_mask")
    elif len(cells) > 0:
        lines.append(f"mask[{_list([i for i, _ in cells])}, {_list([j for _, j in cells])}] = True")
    return lines


def _cells(s: Setting, rows: int, columns: int) -> list[list[int]]:
    if s.own is None or rows * columns > MOST_CELLS:
        return []
    high = min(rows, len(s.own))
    return [[i, j] for i in range(high) for j in range(min(columns, len(s.own[i]))) if s.own[i][j]]


def tree_lines(s: Setting) -> list[str]:
    """Returns program lines that reshape square masks [S, S] as sparse mode 9 (a tree of draft tokens) requires."""
    if not s.packed:
        return ["mask = mask[None]  # [B, rows, rows]"]
    return [f"mask = torch.cat([mask[:n, :n].flatten() for n in {_list(s.q_len)}])  # one square per sequence"]


# ----------------------------------------------------------------------------------------------------------- interfaces


def _native_call(s: Setting) -> dict[str, str]:
    canonical = as_mode(s)
    p = picture(s, "own")
    lines = ["import torch", "import fusion_attention as fa", ""]
    lines.append(f"q = torch.randn({_shape(s, 'q')})")
    lines.append(f"k, v = torch.randn(2, {_shape(s, 'k')})")
    words = ["q", "k", "v"]
    if s.packed:
        words.append('layout="TND"')
        words.append(f"q_len={_list(s.q_len)}")
        words.append(f"kv_len={_list(s.kv_len)}")
    if s.mode == BAND or canonical is None:
        words.append(f"band=fa.{own_band(s)!r}")
    elif canonical.mode in (7, 8) and canonical.mask != "none":
        words.append(f"sparse_mode={s.mode}")
        if s.next < UNLIMITED:
            words.append(f"next_tokens={s.next}")
    elif canonical.mask != "none":
        band = _own_band(s)
        if band != Band.full():
            words.append(f"band=fa.{band!r}")
    if p is not None and p["mask"] != "":
        lines += mask_lines(s, Mask((0, 0)), False)
        lines += _tree_of_own(s) if p["mask"] == "tree" else []
        words.append("blocked=mask")
    return {"before": "\n".join(lines), "call": _call("out = fa.attention", words)}


def _own_band(s: Setting) -> Band:
    """Returns the Band, a range of keys around the diagonal, of the sparse mode of `s`, without its mask tensor."""
    p = picture(s, "training")
    if s.mode in (5, 6):
        ignored = p is None or (max(p["prefix"]) == 0 and max(s.prefix, default=0) > 0)
        return Band.full() if ignored or len(s.prefix) == 0 else Band.prefix_causal(s.prefix)
    return sparse_band(s.mode, s.pre, s.next, None)


def _tree_of_own(s: Setting) -> list[str]:
    return [
        "tree = mask",
        f"mask = torch.zeros({len(s.q_len)}, 1, {max(s.q_len)}, {max(s.kv_len)}, dtype=torch.bool)",
        f"for b, (rows, keys) in enumerate(zip({_list(s.q_len)}, {_list(s.kv_len)})):",
        "    mask[b, 0, :rows, keys - rows : keys] = tree[:rows, :rows]",
    ]


def _tensors(s: Setting) -> list[str]:
    return [
        "import torch",
        "import torch_npu",
        "",
        'options = {"dtype": torch.bfloat16, "device": "npu"}',
        f"query = torch.randn({_shape(s, 'q')}, **options)",
        f"key, value = torch.randn(2, {_shape(s, 'k')}, **options)",
    ]


def _window(s: Setting, pre: str, next_: str) -> list[str]:
    given = [(pre, window_of(s)[0]), (next_, window_of(s)[1])]
    return [f"{name}={count}" for name, count in given if count < UNLIMITED]


def _training(s: Setting) -> dict[str, str]:
    lines, words = _tensors(s), ["query", "key", "value", str(HEADS)]
    words.append('"TND"' if s.packed else '"BSND"')
    shape = mask_of(s)
    if shape is not None:
        lines += mask_lines(s, shape, True)
        words.append("atten_mask=mask")
    if s.mode != 0:
        words.append(f"sparse_mode={s.mode}")
    words += _window(s, "pre_tockens", "next_tockens")
    if s.mode in (5, 6) and len(s.prefix) > 0:
        words.append(f"prefix={_list(s.prefix)}")
    if s.packed:
        words.append(f"actual_seq_qlen={_list(_ends(s.q_len))}")
        words.append(f"actual_seq_kvlen={_list(_ends(s.kv_len))}")
    words.append(f"scale={DIM}**-0.5")
    text = _call("out, *statistics = torch_npu.npu_fusion_attention", words)
    return {"before": "\n".join(lines), "call": text}


def _inference(s: Setting) -> dict[str, str]:
    lines, words = _tensors(s), ["query", "key", "value"]
    shape = mask_of(s)
    if shape is not None:
        lines += mask_lines(s, shape, True)
        lines += tree_lines(s) if s.mode == 9 else []
        words.append("atten_mask=mask")
    if s.mode != 0:
        words.append(f"sparse_mode={s.mode}")
    words += _window(s, "pre_tokens", "next_tokens")
    if s.packed:
        words.append(f"actual_seq_qlen={_list(_ends(s.q_len))}")
        words.append(f"actual_seq_kvlen={_list(_ends(s.kv_len))}")
    words.append(f"num_query_heads={HEADS}")
    words.append(f"num_key_value_heads={HEADS}")
    words.append('input_layout="TND"' if s.packed else 'input_layout="BSND"')
    words.append(f"softmax_scale={DIM}**-0.5")
    text = _call("out, lse = torch_npu.npu_fused_infer_attention_score_v2", words)
    return {"before": "\n".join(lines), "call": text}


def _two_phase(s: Setting) -> dict[str, str]:
    operator = "aclnnFlashAttentionVarLenScoreV2" if s.packed else "aclnnFlashAttentionScoreV2"
    statistics = f"{sum(s.q_len)}, {HEADS}, 8" if s.packed else f"1, {HEADS}, {s.q_len[0]}, 8"
    lines = ["import torch", "from fusion_attention import acl, aclnn", ""]
    lines.append('acl.init(device="cpu")')
    lines.append("acl.rt.set_device(0)")
    lines.append("stream, _ = acl.rt.create_stream()")
    lines.append(f"q, out = torch.randn({_shape(s, 'q')}), torch.zeros({_shape(s, 'q')})")
    lines.append(f"k, v = torch.randn(2, {_shape(s, 'k')})")
    lines.append(f"smax, ssum = torch.zeros(2, {statistics})")
    shape = mask_of(s)
    if shape is not None:
        lines += mask_lines(s, shape, False)
        lines.append("atten_mask = acl.Tensor.of(mask)")
    lines.append("query, key, value, attention_out, softmax_max, softmax_sum = map(")
    lines.append("    acl.Tensor.of, (q, k, v, out, smax, ssum)")
    lines.append(")")
    words = ["query", "key", "value", "None", "None", "None"]
    words.append("atten_mask" if shape is not None else "None")
    words.append(_list(s.prefix) if s.mode in (5, 6) and len(s.prefix) > 0 else "None")
    if s.packed:
        words += [_list(_ends(s.q_len)), _list(_ends(s.kv_len))]
    words += ["None", "None", f"{DIM}**-0.5", "1.0", *map(str, window_of(s)), str(HEADS)]
    words.append('"TND"' if s.packed else '"BSND"')
    words += ["0", str(s.mode), "1", "softmax_max", "softmax_sum", "None", "attention_out"]
    text = _call(f"ret, size, executor = aclnn.{operator}GetWorkspaceSize", words)
    second = [
        "workspace = acl.rt.malloc(size, 0)[0] if size else None",
        f"ret = ret or aclnn.{operator}(workspace, size, executor, stream)",
    ]
    return {"before": "\n".join(lines), "call": text + "\n" + "\n".join(second)}
