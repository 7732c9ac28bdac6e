"""Transcribes the C++ programs of CANN's pages for aclnnFlashAttentionUnpaddingScoreGradV3, ...ScoreV2,
aclnnIncreFlashAttentionV4, aclnnSparseFlashAttentionGrad and aclnnSparseLightningIndexerGradKLLoss.

The calls of acl and aclnn are in the programs' order, with the same arguments and with host data of the same
types. Omitted are printing and the returns after a failed call: every call must succeed, except those named in
comments. Additions for the tests:

* outputs are filled with 0x7E7E... between the phases, because the programs' initial data often equal the results;
* `given` replaces numbers of a tensor; longer host data of the program keep their end;
* where a program copies back more than its buffer contains, which is an error here, the tensor is copied too.

Some tensors read the programs' host data as another type: floats as pairs of bfloat16 or float16, shorts as float16.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from fusion_attention import acl, aclnn

Given = Mapping[str, torch.Tensor]
Printed = dict[str, np.ndarray]
FILL = 0x7E  # a NaN as float16, about 8e37 as bfloat16 and float32


def check(ret: int) -> None:
    """Asserts success, in place of the programs' CHECK_RET."""
    assert ret == acl.ACL_SUCCESS, (ret, acl.get_recent_err_msg())


class Device:
    """The addresses, tensors and byte counts of a program, by the names of its variables."""

    def __init__(self, given: Given, device_id: int = 0, with_context: bool = False) -> None:
        """Transcribes Init: aclInit, aclrtSetDevice, optionally a context, aclrtCreateStream."""
        self.given, self.id = given, device_id
        self.address: dict[str, int] = {}
        self.tensor: dict[str, acl.Tensor | None] = {}
        self.bytes: dict[str, int] = {}
        self.shape: dict[str, list[int]] = {}
        self.context: acl.Context | None = None
        self.workspace = 0
        check(acl.init(None))
        check(acl.rt.set_device(device_id))
        if with_context:
            self.context, ret = acl.rt.create_context(device_id)
            check(ret)
            check(acl.rt.set_context(self.context))
        self.stream, ret = acl.rt.create_stream()
        check(ret)

    def create(self, name: str, host_data: np.ndarray, shape: list[int], dtype: int) -> str:
        """Transcribes CreateAclTensor: aclrtMalloc, aclrtMemcpy, aclCreateTensor; returns the error message or ""."""
        assert host_data.size == math.prod(shape)
        size = host_data.nbytes
        if name in self.given:
            numbers = self.given[name].contiguous().view(torch.uint8).numpy().reshape(-1)
            host_data = host_data.copy()
            host_data.view(np.uint8).reshape(-1)[: numbers.size] = numbers
        address, ret = acl.rt.malloc(size, acl.ACL_MEM_MALLOC_HUGE_FIRST)
        check(ret)
        check(acl.rt.memcpy(address, size, host_data, size, acl.ACL_MEMCPY_HOST_TO_DEVICE))
        strides = [1] * len(shape)
        for i in range(len(shape) - 2, -1, -1):
            strides[i] = shape[i + 1] * strides[i + 1]
        # The programs do not check whether aclCreateTensor returns null.
        self.tensor[name] = acl.create_tensor(shape, dtype, strides, 0, acl.ACL_FORMAT_ND, shape, address)
        self.address[name], self.bytes[name], self.shape[name] = address, size, shape
        return "" if self.tensor[name] is not None else acl.get_recent_err_msg()

    def create_all(self, *rows: tuple[str, np.ndarray, list[int], int]) -> None:
        for row in rows:
            text = self.create(*row)
            assert not text, (row[0], text)

    def __getitem__(self, names: str) -> tuple[acl.Tensor | None, ...]:
        """Returns the tensors of space-separated names; "-" is a null pointer."""
        return tuple(None if name == "-" else self.tensor[name] for name in names.split())

    def destroy(self, names: str) -> None:
        for name in names.split():
            check(acl.destroy_tensor(self.tensor[name]))

    def free(self, names: str) -> None:
        for name in names.split():
            check(acl.rt.free(self.address[name]))

    def run(self, operator: str, args: tuple[Any, ...], outputs: str) -> None:
        """Runs both phases and synchronises the stream."""
        phase_1: Callable[..., Any] = getattr(aclnn, operator + "GetWorkspaceSize")
        ret, size, executor = phase_1(*args)
        check(ret)
        if size > 0:
            self.workspace, ret = acl.rt.malloc(size, acl.ACL_MEM_MALLOC_HUGE_FIRST)
            check(ret)
        for name in outputs.split():
            check(acl.rt.memset(self.address[name], self.bytes[name], FILL, self.bytes[name]))
        check(getattr(aclnn, operator)(self.workspace or None, size, executor, self.stream))
        check(acl.rt.synchronize_stream(self.stream))

    def print_out(self, outputs: str, dtype: type = np.float32) -> Printed:
        """Transcribes PrintOutResult: copies one number per element of each output to the host and returns them."""
        printed = {name: np.zeros(math.prod(self.shape[name]), dtype) for name in outputs.split()}
        for name, result in printed.items():
            ret = acl.rt.memcpy(result, result.nbytes, self.address[name], result.nbytes, acl.ACL_MEMCPY_DEVICE_TO_HOST)
            check(ret)
        return printed

    def end(self, names: str = "") -> None:
        """Runs steps 6 and 7 for names that they both destroy and free, and the end of step 7."""
        self.destroy(names)
        self.free(names)
        if self.workspace:
            check(acl.rt.free(self.workspace))
        check(acl.rt.destroy_stream(self.stream))
        if self.context is not None:
            check(acl.rt.destroy_context(self.context))
        check(acl.rt.reset_device(self.id))
        check(acl.finalize())


def floats(count: int, value: float) -> np.ndarray:
    return np.full(count, value, np.float32)


def shorts(shape: list[int], value: int) -> np.ndarray:
    return np.full(math.prod(shape), value, np.int16)


# ------------------------------------------------------------------------------------------------ UnpaddingScoreGradV3


def unpadding_score_grad_v3(given: Given) -> Printed:
    """Returns the floats that the program prints for each output; the first half is the whole bfloat16 tensor."""
    device, outputs = Device(given), "dq dqRope dk dkRope dv"
    head, rope, statistics, bf16 = [256, 1, 128], [256, 1, 64], [256, 1, 8], acl.ACL_BF16
    device.create_all(
        ("q", floats(32768, 1), head, bf16),
        ("qRope", floats(16384, 1), rope, bf16),
        ("k", floats(32768, 1), head, bf16),
        ("kRope", floats(16384, 1), rope, bf16),
        ("v", floats(32768, 1), head, bf16),
        ("dx", floats(32768, 1), head, bf16),
        ("attenmask", np.zeros(65536, np.uint8), [256, 256], acl.ACL_UINT8),
        ("softmaxMax", floats(2048, 3), statistics, acl.ACL_FLOAT),
        ("softmaxSum", floats(2048, 3), statistics, acl.ACL_FLOAT),
        ("attentionIn", floats(32768, 1), head, bf16),
        ("dq", floats(32768, 0), head, bf16),
        ("dqRope", floats(16384, 0), rope, bf16),
        ("dk", floats(32768, 0), head, bf16),
        ("dkRope", floats(16384, 0), rope, bf16),
        ("dv", floats(32768, 0), head, bf16),
    )
    prefix = acl.create_int_array([0])
    q_ends, kv_ends = acl.create_int_array([256]), acl.create_int_array([256])
    q_start, kv_start = acl.create_int_array([0]), acl.create_int_array([0])
    scale, keep_prob, pre, following, heads, layout = 0.088388, 1.0, 65536, 65536, 1, "TND"
    inner_precise, sparse_mode, pse_type = 0, 0, 1
    args = (
        *device["q qRope k kRope v dx - - - attenmask softmaxMax softmaxSum - attentionIn"],
        *(prefix, q_ends, kv_ends, q_start, kv_start, scale, keep_prob, pre, following, heads, layout),
        *(inner_precise, sparse_mode, pse_type, *device["dq dqRope dk dkRope dv -"]),
    )
    device.run("aclnnFlashAttentionUnpaddingScoreGradV3", args, outputs)
    printed = device.print_out(outputs)
    device.end("q qRope k kRope v dx attenmask softmaxMax softmaxSum attentionIn dq dqRope dk dkRope dv")
    return printed


# ------------------------------------------------------------------------------------------------------------- ScoreV2


def score_v2(given: Given) -> Printed:
    """Returns the outputs; the program reads the first one as floats, which are twice its bytes."""
    device = Device(given)
    rows, statistics = [256, 1, 128], [1, 1, 256, 8]
    device.create_all(
        ("q", shorts(rows, 1), rows, acl.ACL_FLOAT16),
        ("k", shorts(rows, 1), rows, acl.ACL_FLOAT16),
        ("v", shorts(rows, 1), rows, acl.ACL_FLOAT16),
        ("attenmask", np.zeros(65536, np.uint8), [256, 256], acl.ACL_UINT8),
        ("attentionOut", shorts(rows, 0), rows, acl.ACL_FLOAT16),
        ("softmaxMax", floats(2048, 3), statistics, acl.ACL_FLOAT),
        ("softmaxSum", floats(2048, 3), statistics, acl.ACL_FLOAT),
    )
    prefix, q_start, kv_start = (acl.create_int_array([0]) for _ in range(3))
    scale, keep_prob, pre, following, heads, layout = 0.088388, 1.0, 65536, 65536, 1, "SBH"
    inner_precise, sparse_mode, pse_type = 0, 0, 1
    args = (
        *(*device["q k v - - - attenmask"], prefix, q_start, kv_start, scale, keep_prob, pre, following, heads),
        *(layout, inner_precise, sparse_mode, pse_type, *device["softmaxMax softmaxSum - attentionOut"]),
    )
    device.run("aclnnFlashAttentionScoreV2", args, "softmaxMax softmaxSum attentionOut")
    # The program prints the error and continues.
    result, address = np.zeros(32768, np.float32), device.address["attentionOut"]
    ret = acl.rt.memcpy(result, result.nbytes, address, result.nbytes, acl.ACL_MEMCPY_DEVICE_TO_HOST)
    assert (ret, result.any()) == (107000, False)
    assert acl.get_recent_err_msg() == "131072 bytes asked at byte 0 of an allocation of 65536"
    printed = device.print_out("attentionOut", np.int16) | device.print_out("softmaxMax softmaxSum")
    device.end("q k v attenmask attentionOut softmaxMax softmaxSum")
    return printed


# ------------------------------------------------------------------------------------------------ IncreFlashAttentionV4


def incre_flash_attention_v4(given: Given) -> Printed:
    """Returns the output; the program reads it as doubles, which are four times its bytes."""
    device = Device(given)
    rows, keys, half = [1, 2, 1, 16], [1, 2, 16, 16], acl.ACL_FLOAT16
    # The floats, read as float16, are twice the bytes of the tensors.
    device.create_all(("query", floats(32, 1), rows, half), ("key", floats(512, 1), keys, half))
    key_list = acl.create_tensor_list(list(device["key"]))
    device.create_all(("value", floats(512, 1), keys, half))
    value_list = acl.create_tensor_list(list(device["value"]))
    device.create_all(("atten", np.zeros(16, np.int8), [1, 1, 1, 16], acl.ACL_INT8), ("out", floats(32, 1), rows, half))
    lengths = acl.create_int_array([16])
    scales = [None] * 9  # from dequantScale1 to kvPaddingSize
    heads, kv_heads, block_size, inner_precise, scale, layout = 2, 2, 1, 1, 1 / math.sqrt(16), "BNSD"
    args = (
        *(*device["query"], key_list, value_list, None, *device["atten"], lengths, *scales),
        *(heads, scale, layout, kv_heads, block_size, inner_precise, *device["out"]),
    )
    device.run("aclnnIncreFlashAttentionV4", args, "out")
    # The program reads twice the bytes of the output's buffer and returns here; the rest are the steps after that.
    result = np.zeros(32)
    ret = acl.rt.memcpy(result, result.nbytes, device.address["out"], 32 * 8, acl.ACL_MEMCPY_DEVICE_TO_HOST)
    assert (ret, result.any()) == (107000, False)
    assert acl.get_recent_err_msg() == "256 bytes asked at byte 0 of an allocation of 128"
    printed = device.print_out("out", np.float16)
    device.destroy("query key value atten out")
    check(acl.destroy_int_array(lengths))
    device.free("query key value atten out")
    device.end()
    return printed


# -------------------------------------------------------------------------------------------- SparseFlashAttentionGrad


def sparse_flash_attention_grad(given: Given) -> Printed:
    """Returns the outputs as the shorts that the program copies."""
    device, outputs = Device(given, with_context=True), "dq dk dv dqRope dkRope"
    q, k, q_rope, k_rope = [1, 16, 512], [2048, 1, 512], [1, 16, 64], [2048, 1, 64]
    half, statistics = acl.ACL_FLOAT16, [1, 1, 16]
    device.create_all(
        ("q", shorts(q, 1), q, half),
        ("k", shorts(k, 1), k, half),
        ("v", shorts(k, 1), k, half),
        ("sparseIndices", np.arange(2048, dtype=np.int32), [1, 1, 2048], acl.ACL_INT32),
        ("out", shorts(q, 1), q, half),
        ("dOut", shorts(q, 1), q, half),
        ("softmaxMax", floats(16, 3), statistics, acl.ACL_FLOAT),
        ("softmaxSum", floats(16, 3), statistics, acl.ACL_FLOAT),
        ("actSeqQLen", np.array([1]), [1], acl.ACL_INT64),
        ("actSeqKvLen", np.array([2048]), [1], acl.ACL_INT64),
        ("qRope", shorts(q_rope, 1), q_rope, half),
        ("kRope", shorts(k_rope, 1), k_rope, half),
        ("dq", shorts(q, 0), q, half),
        ("dk", shorts(k, 0), k, half),
        ("dv", shorts(k, 0), k, half),
        ("dqRope", shorts(q_rope, 0), q_rope, half),
        ("dkRope", shorts(k_rope, 0), k_rope, half),
    )
    scale, block_size, sparse_mode, pre, following = 0.088388, 1, 0, 2147483647, 2147483647
    deterministic, layout = False, "TND"
    args = (
        *device["q k v sparseIndices dOut out softmaxMax softmaxSum actSeqQLen actSeqKvLen qRope kRope"],
        *(scale, block_size, layout, sparse_mode, pre, following, deterministic, *device["dq dk dv dqRope dkRope"]),
    )
    device.run("aclnnSparseFlashAttentionGrad", args, outputs)
    printed = device.print_out(outputs, np.int16)
    device.destroy("q k v sparseIndices out dOut softmaxMax softmaxSum actSeqQLen actSeqKvLen qRope kRope")
    device.destroy("dq dk dv dqRope dkRope")
    device.free("q k v sparseIndices softmaxMax softmaxSum out dOut")
    # The program stores the addresses of the rope parts in the variables of dq and dk: those of the parts are null, and
    # the memory is never freed, like that of the two lengths. finalize() frees it.
    assert [acl.rt.free(0) for _ in ("qRope", "kRope")] == [100000, 100000]
    device.free("dq dk dv dqRope dkRope")
    device.end()
    return printed


# ------------------------------------------------------------------------------------ SparseLightningIndexerGradKLLoss

LOSS = "aclnnSparseLightningIndexerGradKLLoss"
PRINTED = {"weight": [4, 64], "sparseIndices": [1, 2048], "softmaxMax": [4, 64], "softmaxSum": [4, 64]}
CORRECTED = {"weight": [4, 32], "sparseIndices": [4, 1, 2048], "softmaxMax": [1, 4, 64], "softmaxSum": [1, 4, 64]}


def loss_tensors(device: Device, shapes: Mapping[str, list[int]], indices: type, numbers: type) -> dict[str, str]:
    """Runs step 2 and returns errors by tensor; indices, numbers: host types of int32 and of float32 tensors."""
    half, row = acl.ACL_FLOAT16, np.full(2048, -1, indices)
    row[:8] = np.arange(8)
    lists, statistics, weight = shapes["sparseIndices"], shapes["softmaxMax"], shapes["weight"]
    rows = (
        ("q", shorts([4, 64, 512], 1), [4, 64, 512], half),
        ("k", shorts([8, 1, 512], 2), [8, 1, 512], half),
        ("qRope", shorts([4, 64, 64], 3), [4, 64, 64], half),
        ("kRope", shorts([8, 1, 64], 4), [8, 1, 64], half),
        ("qIndex", shorts([4, 32, 128], 5), [4, 32, 128], half),
        ("kIndex", shorts([8, 1, 128], 6), [8, 1, 128], half),
        ("weight", shorts(weight, 1), weight, half),
        ("sparseIndices", np.tile(row, math.prod(lists) // 2048), lists, acl.ACL_INT32),
        ("softmaxMax", np.ones(math.prod(statistics), numbers), statistics, acl.ACL_FLOAT),
        ("softmaxSum", np.ones(math.prod(shapes["softmaxSum"]), numbers), shapes["softmaxSum"], acl.ACL_FLOAT),
        ("dQIndex", shorts([4, 32, 128], 1), [4, 32, 128], half),
        ("dKIndex", shorts([8, 1, 128], 1), [8, 1, 128], half),
        ("dWeight", shorts(weight, 1), weight, half),
        ("loss", np.ones(1, numbers), [1], acl.ACL_FLOAT),
    )
    return {row[0]: text for row in rows if (text := device.create(*row))}


def loss_args(device: Device) -> tuple[Any, ...]:
    """Returns the arguments of phase 1."""
    q_ends, kv_ends = acl.create_int_array([4]), acl.create_int_array([8])
    scale, pre, following, sparse_mode, deterministic, layout = 1.0, 65536, 65536, 3, False, "TND"
    return (
        *device["q k qIndex kIndex weight sparseIndices softmaxMax softmaxSum qRope kRope"],
        *(q_ends, kv_ends, scale, layout, sparse_mode, pre, following, deterministic),
        *device["dQIndex dKIndex dWeight loss"],
    )


def indexer_grad_kl_loss_refused(
    shapes: Mapping[str, list[int]], indices: type = np.int16, numbers: type = np.int16
) -> tuple[dict[str, str], int, str]:
    """Runs the program to the end of phase 1, where it returns: (errors of null tensors by name, code, message)."""
    device = Device({}, 3, with_context=True)
    nulls = loss_tensors(device, shapes, indices, numbers)
    ret, _, _ = getattr(aclnn, LOSS + "GetWorkspaceSize")(*loss_args(device))
    return nulls, ret, acl.get_recent_err_msg()


def indexer_grad_kl_loss(given: Given) -> Printed:
    """Returns the outputs with the shapes and types of host data that the page's tables specify."""
    device = Device(given, 3, with_context=True)
    assert not loss_tensors(device, CORRECTED, np.int32, np.float32)
    device.run(LOSS, loss_args(device), "dQIndex dKIndex dWeight loss")
    # The program reads all outputs as floats, which are twice the bytes of three of them.
    printed = device.print_out("dQIndex dKIndex dWeight", np.int16) | device.print_out("loss")
    device.end("q k qIndex kIndex qRope kRope weight sparseIndices softmaxMax softmaxSum dQIndex dKIndex dWeight loss")
    return printed
