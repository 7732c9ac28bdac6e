"""Calls the two-phase interface with arguments by canonical name: makes handles, poisons outputs, runs the phases."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from fusion_attention import ContractError, ContractWarning, acl, aclnn
from fusion_attention.contract import Attr, Op, Tensors, bind, size_of
from fusion_attention.ops import RECORDS

V2 = RECORDS["aclnnFlashAttentionScoreV2"]
Args = dict[str, Any]


def axes_of(op: Op, args: Args) -> dict[str, int]:
    """Returns the size of every axis name that the inputs determine."""
    sizes: dict[str, int] = {}
    for number in (q for q in op.params if isinstance(q, Attr) and q.axis and isinstance(args.get(q.name), int)):
        sizes[number.axis] = args[number.name]
    if isinstance(args.get("sparse_count"), int):
        sizes |= {"K": args["sparse_count"], "Kv": args["sparse_count"] if args["return_values"] else 0}
    paged = args.get("block_table") is not None
    for p in op.tensors():
        value, words = args[p.name], p.words(op.layout_of(p, args))
        if paged and isinstance(p, Tensors):
            continue  # pages have different axes
        if isinstance(value, torch.Tensor) and value.dim() == len(words):
            for word, size in zip(words, value.shape, strict=True):
                unknown = [axis for axis in word.split("*") if not axis.isdigit() and axis not in sizes]
                factor = size_of("*".join(axis for axis in word.split("*") if axis not in unknown), sizes) or 1
                if len(unknown) == 1:
                    sizes[unknown[0]] = size // factor
    if "max_seqlen_k" in op.by_name:  # columns of lists, of packed rows, of padded ones
        sizes["Kc"] = sizes.get("K") or args["max_seqlen_k"] or sizes.get("S2", 0)
    if "wgate" in op.by_name:  # windows of rows
        sizes |= windows_of(op, args)
    statistics = {"L": 1} if args.get("softmax_lse_flag", True) else {}
    sizes = {
        axis: size for axis, size in sizes.items() if not isinstance(size, int) or size >= 0
    }  # an illegal number is no size
    return {"Dv": sizes.get("D", 0), **statistics, **sizes}


def windows_of(op: Op, args: Args) -> dict[str, int]:
    """Returns the axes that a call of legal shapes derives from its windows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ContractWarning)
        try:
            names = bind(op, args, strict=False, reads=False).names
        except ContractError:
            return {}
    return {axis: size for axis, size in names.items() if axis[0].isupper() and isinstance(size, int)}


def outputs_of(op: Op, args: Args) -> dict[str, torch.Tensor | None]:
    """Returns poisoned memory for the outputs of a call; outputs among the arguments are kept."""
    sizes = axes_of(op, args)
    results: dict[str, torch.Tensor | None] = {}
    for p in op.tensors(output=True):
        words = p.words(op.layout_of(p, args))
        shape = [size_of(word, sizes) for word in words]
        alone = getattr(torch, p.dtypes, None) if p.dtypes else None
        like = [p.dtypes.removeprefix("=")] if p.dtypes.startswith("=") else [t.name for t in op.tensors()[:1]]
        source = args.get(like[0]) if like else None
        dtype = alone or (source.dtype if isinstance(source, torch.Tensor) else torch.float32)
        rope = args.get("query_rope")
        dtype = (torch.float16 if rope is None else rope.dtype) if dtype == torch.int8 else dtype
        dtype = torch.int8 if args.get("quant_scale2") is not None else dtype
        dtype = torch.float32 if p.name == "softmax_lse" else dtype
        if p.name == "dpse":
            pse = args["pse"]
            results[p.name] = None if not isinstance(pse, torch.Tensor) else torch.empty_like(pse)
        elif args.get(p.name) is not None or not words or None in shape or (p.name == "dsink" and args["sink"] is None):
            results[p.name] = None
        else:
            results[p.name] = torch.empty(shape, dtype=dtype)  # type: ignore[arg-type]
    for tensor in results.values():
        if tensor is not None and tensor.numel():
            tensor.view(-1).view(torch.uint8).fill_(0xA5)
    return results


def handle(value: Any, tensors: bool = False) -> Any:
    """Returns a value as a program passes it; tensors: pass integers as a tensor instead of an array."""
    if isinstance(value, torch.Tensor):
        return acl.Tensor.of(value)
    if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
        return acl.create_tensor_list([acl.Tensor.of(tensor) for tensor in value])
    if isinstance(value, list) and value and tensors:
        return acl.Tensor.of(torch.tensor(value))
    return acl.create_int_array(value) if isinstance(value, list) else value


def handles_of(
    op: Op, args: Mapping[str, Any], outputs: Mapping[str, torch.Tensor | None], tensors: bool = False
) -> dict[str, Any]:
    """Returns the arguments of phase 1 by canonical name."""
    values = {p.name: args[p.name] if args.get(p.name) is not None else outputs.get(p.name) for p in op.params}
    return {name: handle(value, tensors) for name, value in values.items()}


def call(
    op: Op,
    args: Mapping[str, Any],
    outputs: Mapping[str, torch.Tensor | None],
    check_content: bool = False,
    tensors: bool = False,
    **options: Any,
) -> tuple[int, int]:
    """Returns (ret of phase 1, ret of phase 2) with outputs by name; tensors: as in handle()."""
    handles, options = handles_of(op, args, outputs, tensors).values(), options | {"check_content": check_content}
    first, size, executor = getattr(aclnn, op.name + "GetWorkspaceSize")(*handles, **options)
    if first:
        assert (size, executor) == (0, None)
        return first, 0
    workspace = acl.rt.malloc(size)[0] if size else None
    second = getattr(aclnn, op.name)(workspace, size, executor, None)
    return first, second


def done(
    op: Op, args: Args, outputs: dict[str, torch.Tensor | None] | None = None, **options: Any
) -> dict[str, torch.Tensor]:
    given = outputs_of(op, args) if outputs is None else outputs
    assert call(op, args, given, **options) == (0, 0), acl.get_recent_err_msg()
    return {name: tensor for name, tensor in given.items() if tensor is not None}


def failed(ret: int, code: int, *words: str) -> None:
    text = acl.get_recent_err_msg()
    assert ret == code, (ret, text)
    assert all(word in text for word in words), text
    assert acl.get_recent_err_msg() == ""
