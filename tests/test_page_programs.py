"""The C++ programs of CANN's pages for aclnnFlashAttentionUnpaddingScoreGradV3, ...ScoreV2,
aclnnIncreFlashAttentionV4, aclnnSparseFlashAttentionGrad and aclnnSparseLightningIndexerGradKLLoss, call for call.

What they should print comes from golden and from a few lines of arithmetic.

Their host data are odd: floats that the tensors read as pairs of bfloat16, shorts that they read as float16.
"""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from fusion_attention import acl, aclnn


@pytest.fixture(autouse=True)
def finalized() -> Iterator[None]:
    yield
    acl.finalize()
    acl.get_recent_err_msg()


def check(ret: int) -> None:
    """CHECK_RET."""
    assert ret == acl.ACL_SUCCESS, (ret, acl.get_recent_err_msg())


def start(device_id: int, backend: str) -> acl.Stream:
    """Init: aclInit, aclrtSetDevice, aclrtCreateStream."""
    check(acl.init(None, backend=backend))
    check(acl.rt.set_device(device_id))
    stream, ret = acl.rt.create_stream()
    check(ret)
    return stream


def create_acl_tensor(host_data: np.ndarray, shape: list[int], dtype: int) -> tuple[int, acl.Tensor]:
    """CreateAclTensor: aclrtMalloc, aclrtMemcpy, contiguous strides, aclCreateTensor."""
    assert host_data.size == math.prod(shape)
    size = host_data.nbytes
    address, ret = acl.rt.malloc(size, acl.ACL_MEM_MALLOC_HUGE_FIRST)
    check(ret)
    check(acl.rt.memcpy(address, size, host_data, size, acl.ACL_MEMCPY_HOST_TO_DEVICE))
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = shape[i + 1] * strides[i + 1]
    tensor = acl.create_tensor(shape, dtype, strides, 0, acl.ACL_FORMAT_ND, shape, address)
    assert tensor is not None, acl.get_recent_err_msg()
    return address, tensor


def print_out_result(shape: list[int], address: int, dtype: type = np.float32) -> np.ndarray:
    """PrintOutResult: what it copies to the host to print, one number per element."""
    result = np.zeros(math.prod(shape), dtype)
    check(acl.rt.memcpy(result, result.nbytes, address, result.nbytes, acl.ACL_MEMCPY_DEVICE_TO_HOST))
    return result


def end(tensors: list[acl.Tensor], addresses: list[int], stream: acl.Stream, device_id: int) -> None:
    """Steps 6 and 7: everything goes back, in the programs' order."""
    for tensor in tensors:
        check(acl.destroy_tensor(tensor))
    for address in addresses:
        check(acl.rt.free(address))
    check(acl.rt.destroy_stream(stream))
    check(acl.rt.reset_device(device_id))
    check(acl.finalize())


# ------------------------------------------------------------------------------------------------ UnpaddingScoreGradV3


def unpadding_score_grad_v3(device_id: int = 0, backend: str = "auto") -> dict[str, np.ndarray]:
    stream = start(device_id, backend)
    head, rope, stats = [256, 1, 128], [256, 1, 64], [256, 1, 8]
    ones = np.ones(32768, np.float32)
    memory: dict[str, tuple[int, acl.Tensor]] = {}
    for name, host, shape, dtype in (
        ("q", ones, head, acl.ACL_BF16),
        ("qRope", np.ones(16384, np.float32), rope, acl.ACL_BF16),
        ("k", ones, head, acl.ACL_BF16),
        ("kRope", np.ones(16384, np.float32), rope, acl.ACL_BF16),
        ("v", ones, head, acl.ACL_BF16),
        ("dx", ones, head, acl.ACL_BF16),
        ("attenmask", np.zeros(65536, np.uint8), [256, 256], acl.ACL_UINT8),
        ("softmaxMax", np.full(2048, 3.0, np.float32), stats, acl.ACL_FLOAT),
        ("softmaxSum", np.full(2048, 3.0, np.float32), stats, acl.ACL_FLOAT),
        ("attentionIn", ones, head, acl.ACL_BF16),
        ("dq", np.zeros(32768, np.float32), head, acl.ACL_BF16),
        ("dqRope", np.zeros(16384, np.float32), rope, acl.ACL_BF16),
        ("dk", np.zeros(32768, np.float32), head, acl.ACL_BF16),
        ("dkRope", np.zeros(16384, np.float32), rope, acl.ACL_BF16),
        ("dv", np.zeros(32768, np.float32), head, acl.ACL_BF16),
    ):
        memory[name] = create_acl_tensor(host, shape, dtype)
    t = {name: tensor for name, (_, tensor) in memory.items()}
    prefix = acl.create_int_array([0])
    q_ends, kv_ends = acl.create_int_array([256]), acl.create_int_array([256])
    q_start, kv_start = acl.create_int_array([0]), acl.create_int_array([0])
    pse = drop_mask = padding = softmax_in = dpse = None
    scale, keep_prob, pre, following, heads, layout = 0.088388, 1.0, 65536, 65536, 1, "TND"
    inner_precise, sparse_mode, pse_type = 0, 0, 1
    ret, size, executor = aclnn.aclnnFlashAttentionUnpaddingScoreGradV3GetWorkspaceSize(
        *(t["q"], t["qRope"], t["k"], t["kRope"], t["v"], t["dx"], pse, drop_mask, padding, t["attenmask"]),
        *(t["softmaxMax"], t["softmaxSum"], softmax_in, t["attentionIn"], prefix, q_ends, kv_ends, q_start, kv_start),
        *(scale, keep_prob, pre, following, heads, layout, inner_precise, sparse_mode, pse_type),
        *(t["dq"], t["dqRope"], t["dk"], t["dkRope"], t["dv"], dpse),
    )
    check(ret)
    workspace = None
    if size > 0:
        workspace, ret = acl.rt.malloc(size, acl.ACL_MEM_MALLOC_HUGE_FIRST)
        check(ret)
    check(aclnn.aclnnFlashAttentionUnpaddingScoreGradV3(workspace, size, executor, stream))
    check(acl.rt.synchronize_stream(stream))
    printed = {}
    for name, shape in (("dq", head), ("dqRope", rope), ("dk", head), ("dkRope", rope), ("dv", head)):
        printed[name] = print_out_result(shape, memory[name][0])
    addresses = [address for address, _ in memory.values()] + ([workspace] if workspace else [])
    end(list(t.values()), addresses, stream, device_id)
    return printed


def bf16(printed: np.ndarray) -> torch.Tensor:
    """The first half of what the program prints as floats is all of a bfloat16 tensor."""
    return torch.from_numpy(printed[: printed.size // 2]).view(torch.bfloat16).double()


def test_unpadding_score_grad_v3() -> None:
    got = unpadding_score_grad_v3()
    # A float 1 is the pair (0, 1): 96 products of ones per score. The saved statistics are max 3 and sum 3.
    p = math.exp(0.088388 * 96 - 3) / 3
    p, odd = torch.tensor(p).bfloat16().item(), torch.tensor([0.0, 1.0]).double()
    torch.testing.assert_close(bf16(got["dv"]).view(-1, 2), (256 * p * odd).expand(256 * 64, 2), rtol=2**-7, atol=0)
    # dY V^T and rowsum(dY * out) are both 64: nothing is left for q and k.
    assert all(not bf16(got[name]).any() for name in ("dq", "dqRope", "dk", "dkRope"))
    # The rest of each buffer is as the program filled it.
    assert all(not values[values.size // 2 :].any() for values in got.values())
    expected = unpadding_score_grad_v3(backend="golden")
    for name in got:
        torch.testing.assert_close(bf16(got[name]), bf16(expected[name]), rtol=2**-7, atol=0)


# ------------------------------------------------------------------------------------------------------------- ScoreV2


def score_v2(device_id: int = 0, backend: str = "auto") -> dict[str, np.ndarray]:
    stream = start(device_id, backend)
    rows, statistics = [256, 1, 128], [1, 1, 256, 8]
    shorts = np.ones(32768, np.int16)
    memory = {
        "q": create_acl_tensor(shorts, rows, acl.ACL_FLOAT16),
        "k": create_acl_tensor(shorts, rows, acl.ACL_FLOAT16),
        "v": create_acl_tensor(shorts, rows, acl.ACL_FLOAT16),
        "attenmask": create_acl_tensor(np.zeros(65536, np.uint8), [256, 256], acl.ACL_UINT8),
        "attentionOut": create_acl_tensor(np.zeros(32768, np.int16), rows, acl.ACL_FLOAT16),
        "softmaxMax": create_acl_tensor(np.full(2048, 3.0, np.float32), statistics, acl.ACL_FLOAT),
        "softmaxSum": create_acl_tensor(np.full(2048, 3.0, np.float32), statistics, acl.ACL_FLOAT),
    }
    t = {name: tensor for name, (_, tensor) in memory.items()}
    prefix, q_start, kv_start = (acl.create_int_array([0]) for _ in range(3))
    pse = drop_mask = padding = softmax_out = None
    scale, keep_prob, pre, following, heads, layout = 0.088388, 1.0, 65536, 65536, 1, "SBH"
    inner_precise, sparse_mode, pse_type = 0, 0, 1
    ret, size, executor = aclnn.aclnnFlashAttentionScoreV2GetWorkspaceSize(
        *(t["q"], t["k"], t["v"], pse, drop_mask, padding, t["attenmask"], prefix, q_start, kv_start, scale),
        *(keep_prob, pre, following, heads, layout, inner_precise, sparse_mode, pse_type),
        *(t["softmaxMax"], t["softmaxSum"], softmax_out, t["attentionOut"]),
    )
    check(ret)
    workspace = None
    if size > 0:
        workspace, ret = acl.rt.malloc(size, acl.ACL_MEM_MALLOC_HUGE_FIRST)
        check(ret)
    check(aclnn.aclnnFlashAttentionScoreV2(workspace, size, executor, stream))
    check(acl.rt.synchronize_stream(stream))
    # As printed, the program copies the output as floats: twice the bytes that it has. Here that is an error.
    result = np.zeros(32768, np.float32)
    ret = acl.rt.memcpy(result, result.nbytes, memory["attentionOut"][0], result.nbytes, acl.ACL_MEMCPY_DEVICE_TO_HOST)
    assert (ret, result.any()) == (107000, False)
    assert acl.get_recent_err_msg() == "131072 bytes asked at byte 0 of an allocation of 65536"
    printed = {
        "attentionOut": print_out_result(rows, memory["attentionOut"][0], np.int16),
        "softmaxMax": print_out_result(statistics, memory["softmaxMax"][0]),
        "softmaxSum": print_out_result(statistics, memory["softmaxSum"][0]),
    }
    addresses = [address for address, _ in memory.values()] + ([workspace] if workspace else [])
    end(list(t.values()), addresses, stream, device_id)
    return printed


def test_score_v2() -> None:
    got = score_v2()
    # The short 1 is the smallest float16, 2**-24: all scores are one number, and the mean of equal rows is that row.
    assert got["attentionOut"].tolist() == [1] * 32768
    np.testing.assert_allclose(got["softmaxMax"], 0.088388 * 128 * 2.0**-48, rtol=128 * 2.0**-24)
    assert got["softmaxSum"].tolist() == [256.0] * 2048
    expected = score_v2(device_id=7, backend="golden")
    assert got["attentionOut"].tolist() == expected["attentionOut"].tolist()
    np.testing.assert_allclose(got["softmaxMax"], expected["softmaxMax"], rtol=128 * 2.0**-24)
    np.testing.assert_allclose(got["softmaxSum"], expected["softmaxSum"], rtol=1e-6)


# ------------------------------------------------------------------------------------------------ IncreFlashAttentionV4


def incre_flash_attention_v4(device_id: int = 0, backend: str = "auto") -> np.ndarray:
    stream = start(device_id, backend)
    rows, keys = [1, 2, 1, 16], [1, 2, 16, 16]
    memory = {
        # The program fills these with floats and reads them as float16: twice the bytes that the tensors have.
        "query": create_acl_tensor(np.ones(32, np.float32), rows, acl.ACL_FLOAT16),
        "key": create_acl_tensor(np.ones(512, np.float32), keys, acl.ACL_FLOAT16),
        "value": create_acl_tensor(np.ones(512, np.float32), keys, acl.ACL_FLOAT16),
        "attenMask": create_acl_tensor(np.zeros(16, np.int8), [1, 1, 1, 16], acl.ACL_INT8),
        "attentionOut": create_acl_tensor(np.ones(32, np.float32), rows, acl.ACL_FLOAT16),
    }
    t = {name: tensor for name, (_, tensor) in memory.items()}
    keys_list, values_list = acl.create_tensor_list([t["key"]]), acl.create_tensor_list([t["value"]])
    lengths = acl.create_int_array([16])
    scales = [None] * 9  # from dequantScale1 to kvPaddingSize
    heads, scale, layout, block_size, inner_precise = 2, 1 / math.sqrt(16), "BNSD", 1, 1
    ret, size, executor = aclnn.aclnnIncreFlashAttentionV4GetWorkspaceSize(
        *(t["query"], keys_list, values_list, None, t["attenMask"], lengths, *scales),
        *(heads, scale, layout, heads, block_size, inner_precise, t["attentionOut"]),
    )
    check(ret)
    workspace = None
    if size > 0:
        workspace, ret = acl.rt.malloc(size, acl.ACL_MEM_MALLOC_HUGE_FIRST)
        check(ret)
    check(aclnn.aclnnIncreFlashAttentionV4(workspace, size, executor, stream))
    check(acl.rt.synchronize_stream(stream))
    # As printed, the program copies doubles: four times the bytes that the output has, twice those of its buffer.
    address, result = memory["attentionOut"][0], np.zeros(32)
    ret = acl.rt.memcpy(result, result.nbytes, address, 32 * 8, acl.ACL_MEMCPY_DEVICE_TO_HOST)
    assert (ret, result.any()) == (107000, False)
    assert acl.get_recent_err_msg() == "256 bytes asked at byte 0 of an allocation of 128"
    printed = print_out_result(rows, address, np.float16)
    addresses = [where for where, _ in memory.values()] + ([workspace] if workspace else [])
    end(list(t.values()), addresses, stream, device_id)
    return printed


def test_incre_flash_attention_v4() -> None:
    got = incre_flash_attention_v4()
    # A float 1 is the pair (0, 1.875): all keys are alike, and the mean of equal rows is that row.
    assert got.tolist() == [0.0, 1.875] * 16
    assert got.tolist() == incre_flash_attention_v4(device_id=7, backend="golden").tolist()


# -------------------------------------------------------------------------------------------- SparseFlashAttentionGrad


SHAPES = {
    "dq": [1, 16, 512],
    "dk": [2048, 1, 512],
    "dv": [2048, 1, 512],
    "dqRope": [1, 16, 64],
    "dkRope": [2048, 1, 64],
}


def sparse_memory() -> dict[str, tuple[int, acl.Tensor]]:
    """Step 2: inputs and outputs."""
    q_shape, k_shape, indices_shape, stats_shape = [1, 16, 512], [2048, 1, 512], [1, 1, 2048], [1, 1, 16]
    q_rope_shape, k_rope_shape = [1, 16, 64], [2048, 1, 64]

    def shorts(shape: list[int], value: int) -> np.ndarray:
        return np.full(math.prod(shape), value, np.int16)

    return {
        "q": create_acl_tensor(shorts(q_shape, 1), q_shape, acl.ACL_FLOAT16),
        "k": create_acl_tensor(shorts(k_shape, 1), k_shape, acl.ACL_FLOAT16),
        "v": create_acl_tensor(shorts(k_shape, 1), k_shape, acl.ACL_FLOAT16),
        "sparseIndices": create_acl_tensor(np.arange(2048, dtype=np.int32), indices_shape, acl.ACL_INT32),
        "out": create_acl_tensor(shorts(q_shape, 1), q_shape, acl.ACL_FLOAT16),
        "dOut": create_acl_tensor(shorts(q_shape, 1), q_shape, acl.ACL_FLOAT16),
        "softmaxMax": create_acl_tensor(np.full(16, 3.0, np.float32), stats_shape, acl.ACL_FLOAT),
        "softmaxSum": create_acl_tensor(np.full(16, 3.0, np.float32), stats_shape, acl.ACL_FLOAT),
        "actSeqQLen": create_acl_tensor(np.array([1]), [1], acl.ACL_INT64),
        "actSeqKvLen": create_acl_tensor(np.array([2048]), [1], acl.ACL_INT64),
        "qRope": create_acl_tensor(shorts(q_rope_shape, 1), q_rope_shape, acl.ACL_FLOAT16),
        "kRope": create_acl_tensor(shorts(k_rope_shape, 1), k_rope_shape, acl.ACL_FLOAT16),
        "dq": create_acl_tensor(shorts(q_shape, 0), q_shape, acl.ACL_FLOAT16),
        "dk": create_acl_tensor(shorts(k_shape, 0), k_shape, acl.ACL_FLOAT16),
        "dv": create_acl_tensor(shorts(k_shape, 0), k_shape, acl.ACL_FLOAT16),
        "dqRope": create_acl_tensor(shorts(q_rope_shape, 0), q_rope_shape, acl.ACL_FLOAT16),
        "dkRope": create_acl_tensor(shorts(k_rope_shape, 0), k_rope_shape, acl.ACL_FLOAT16),
    }


def sparse_flash_attention_grad(device_id: int = 0, backend: str = "auto") -> dict[str, np.ndarray]:
    check(acl.init(None, backend=backend))
    check(acl.rt.set_device(device_id))
    context, ret = acl.rt.create_context(device_id)
    check(ret)
    check(acl.rt.set_context(context))
    stream, ret = acl.rt.create_stream()
    check(ret)
    memory = sparse_memory()
    t = {name: tensor for name, (_, tensor) in memory.items()}
    scale, block_size, sparse_mode, pre, following = 0.088388, 1, 0, 2147483647, 2147483647
    deterministic, layout = False, "TND"
    ret, size, executor = aclnn.aclnnSparseFlashAttentionGradGetWorkspaceSize(
        *(t["q"], t["k"], t["v"], t["sparseIndices"], t["dOut"], t["out"], t["softmaxMax"], t["softmaxSum"]),
        *(t["actSeqQLen"], t["actSeqKvLen"], t["qRope"], t["kRope"], scale, block_size, layout, sparse_mode, pre),
        *(following, deterministic, t["dq"], t["dk"], t["dv"], t["dqRope"], t["dkRope"]),
    )
    check(ret)
    workspace = None
    if size > 0:
        workspace, ret = acl.rt.malloc(size, acl.ACL_MEM_MALLOC_HUGE_FIRST)
        check(ret)
    check(aclnn.aclnnSparseFlashAttentionGrad(workspace, size, executor, stream))
    check(acl.rt.synchronize_stream(stream))
    printed = {name: print_out_result(shape, memory[name][0], np.int16) for name, shape in SHAPES.items()}
    for tensor in t.values():
        check(acl.destroy_tensor(tensor))
    # As printed, the program keeps the addresses of the rope parts in the variables of dq and dk, which then take those
    # of the gradients: the rope parts' memory is never freed, and finalize() takes it back.
    for name in ("q", "k", "v", "sparseIndices", "softmaxMax", "softmaxSum", "out", "dOut"):
        check(acl.rt.free(memory[name][0]))
    for name in ("actSeqQLen", "actSeqKvLen", "dq", "dk", "dv", "dqRope", "dkRope"):
        check(acl.rt.free(memory[name][0]))
    if size > 0:
        check(acl.rt.free(workspace))
    check(acl.rt.destroy_stream(stream))
    check(acl.rt.destroy_context(context))
    check(acl.rt.reset_device(device_id))
    check(acl.finalize())
    return printed


def test_sparse_flash_attention_grad() -> None:
    got = {name: torch.from_numpy(values).view(torch.float16) for name, values in sparse_flash_attention_grad().items()}
    # Every number is 2**-24, so scores vanish beside the saved maximum 3; P = exp(-3) / 3 for each key and head.
    p = math.exp(-3) / 3
    # dv = P dY, summed over 16 heads; dq and dk carry the product of three such numbers, below what float16 holds.
    expected = torch.full((2048 * 512,), 16 * p * 2.0**-24, dtype=torch.float64).half()
    assert torch.equal(got["dv"], expected)
    assert all(not got[name].any() for name in ("dq", "dk", "dqRope", "dkRope"))
    judge = sparse_flash_attention_grad(device_id=7, backend="golden")
    assert all(torch.equal(got[name], torch.from_numpy(judge[name]).view(torch.float16)) for name in got)


# ------------------------------------------------------------------------------------ SparseLightningIndexerGradKLLoss

PRINTED = {"weight": [4, 64], "sparseIndices": [1, 2048], "softmaxMax": [4, 64], "softmaxSum": [4, 64]}
CORRECTED = {"weight": [4, 32], "sparseIndices": [4, 1, 2048], "softmaxMax": [1, 4, 64], "softmaxSum": [1, 4, 64]}


def loss_memory(shapes: dict[str, list[int]]) -> dict[str, tuple[int, acl.Tensor]]:
    """Step 2: inputs and outputs, with host data of the tensors' own types; a row of indices names the eight keys."""
    row = np.full(2048, -1, np.int32)
    row[:8] = np.arange(8)
    halves = {
        "q": ([4, 64, 512], 1),
        "k": ([8, 1, 512], 2),
        "qRope": ([4, 64, 64], 3),
        "kRope": ([8, 1, 64], 4),
        "qIndex": ([4, 32, 128], 5),
        "kIndex": ([8, 1, 128], 6),
        "weight": (shapes["weight"], 1),
        "dQIndex": ([4, 32, 128], 1),
        "dKIndex": ([8, 1, 128], 1),
        "dWeight": (shapes["weight"], 1),
    }
    found = {
        name: create_acl_tensor(np.full(math.prod(shape), value, np.int16), shape, acl.ACL_FLOAT16)
        for name, (shape, value) in halves.items()
    }
    shape = shapes["sparseIndices"]
    found["sparseIndices"] = create_acl_tensor(np.tile(row, math.prod(shape) // 2048), shape, acl.ACL_INT32)
    for name in ("softmaxMax", "softmaxSum"):
        shape = shapes[name]
        found[name] = create_acl_tensor(np.ones(math.prod(shape), np.float32), shape, acl.ACL_FLOAT)
    return found | {"loss": create_acl_tensor(np.ones(1, np.float32), [1], acl.ACL_FLOAT)}


LOSS_OUTPUTS = {"dQIndex": [4, 32, 128], "dKIndex": [8, 1, 128], "dWeight": [4, 32], "loss": [1]}


def sparse_lightning_indexer_grad_kl_loss(
    shapes: dict[str, list[int]], backend: str = "auto"
) -> tuple[int, str, dict[str, np.ndarray]]:
    """(the code of phase 1, its text, the outputs)."""
    stream = start(3, backend)
    memory = loss_memory(shapes)
    t = {name: tensor for name, (_, tensor) in memory.items()}
    q_ends, kv_ends = acl.create_int_array([4]), acl.create_int_array([8])
    scale, pre, following, sparse_mode, deterministic, layout = 1.0, 65536, 65536, 3, False, "TND"
    first, size, executor = aclnn.aclnnSparseLightningIndexerGradKLLossGetWorkspaceSize(
        *(t["q"], t["k"], t["qIndex"], t["kIndex"], t["weight"], t["sparseIndices"], t["softmaxMax"], t["softmaxSum"]),
        *(t["qRope"], t["kRope"], q_ends, kv_ends, scale, layout, sparse_mode, pre, following, deterministic),
        *(t["dQIndex"], t["dKIndex"], t["dWeight"], t["loss"]),
    )
    text, workspace = acl.get_recent_err_msg(), None
    if first == acl.ACL_SUCCESS:
        if size > 0:
            workspace, ret = acl.rt.malloc(size, acl.ACL_MEM_MALLOC_HUGE_FIRST)
            check(ret)
        check(aclnn.aclnnSparseLightningIndexerGradKLLoss(workspace, size, executor, stream))
        check(acl.rt.synchronize_stream(stream))
    types = {"loss": np.float32}
    sizes = {**LOSS_OUTPUTS, "dWeight": shapes["weight"]}
    printed = {n: print_out_result(shape, memory[n][0], types.get(n, np.int16)) for n, shape in sizes.items()}
    # As printed, the rope parts' addresses are never freed, nor those of the outputs: finalize() takes them back.
    for name, (address, tensor) in memory.items():
        check(acl.destroy_tensor(tensor))
        if name not in ("qRope", "kRope", *LOSS_OUTPUTS):
            check(acl.rt.free(address))
    if workspace:
        check(acl.rt.free(workspace))
    check(acl.rt.destroy_stream(stream))
    check(acl.rt.reset_device(3))
    check(acl.finalize())
    return first, text, printed


def test_sparse_lightning_indexer_grad_kl_loss_as_printed() -> None:
    """64 weights for 32 heads: refused, and nothing is written."""
    ret, text, printed = sparse_lightning_indexer_grad_kl_loss(PRINTED)
    assert ret == 161002
    assert text == (
        "aclnnSparseLightningIndexerGradKLLoss: weights: expected one weight for every head of query_index, got "
        "weights=float16 [4, 64], query_index=float16 [4, 32, 128] (a score is a sum over heads)"
    )
    assert all((values == 1).all() for values in printed.values())
    # The program's 16-bit host data are half of what its tensors of 32 bits need.
    check(acl.init(None))
    check(acl.rt.set_device(3))
    address, ret = acl.rt.malloc(2 * 2048, acl.ACL_MEM_MALLOC_HUGE_FIRST)
    check(ret)
    shape = [1, 2048]
    assert acl.create_tensor(shape, acl.ACL_INT32, [2048, 1], 0, acl.ACL_FORMAT_ND, shape, address) is None
    assert acl.get_recent_err_msg() == "data: the view ends at byte 8192 of an allocation of 4096"


@pytest.mark.parametrize("wrong", ["sparseIndices", "softmaxMax", "softmaxSum"])
def test_its_other_shapes_are_refused_too(wrong: str) -> None:
    names = {"sparseIndices": "sparse_indices", "softmaxMax": "softmax_max", "softmaxSum": "softmax_sum"}
    ret, text, printed = sparse_lightning_indexer_grad_kl_loss({**CORRECTED, wrong: PRINTED[wrong]})
    assert ret == 161002
    assert f"{names[wrong]}: expected 3 dimensions" in text
    assert all((values == 1).all() for values in printed.values())


def test_sparse_lightning_indexer_grad_kl_loss_corrected() -> None:
    ret, _, got = sparse_lightning_indexer_grad_kl_loss(CORRECTED)
    check(ret)
    # The shorts are 2**-24 and its multiples: all scores vanish, so that y is uniform over the n keys that a row sees,
    # and p is exp(0 - 1) / 1 for every key, as the saved statistics say.
    p = math.exp(-1)
    loss = sum(n * p * (math.log(p) + math.log(n)) for n in (5, 6, 7, 8))
    np.testing.assert_allclose(got["loss"], loss, rtol=1e-6)
    # dS carries a weight of 2**-24, dweights a score of 128 * 30 * 2**-48: both are below what float16 holds.
    assert all(not got[name].view(np.float16).any() for name in ("dQIndex", "dKIndex", "dWeight"))
    judge = sparse_lightning_indexer_grad_kl_loss(CORRECTED, "golden")[2]
    for name, values in judge.items():
        np.testing.assert_allclose(got[name], values, rtol=1e-6)


def test_a_device_that_is_not_there() -> None:
    check(acl.init(None))
    assert acl.rt.set_device(8) == 107001
    assert acl.get_recent_err_msg() == "device_id: expected 0 to 7, got 8"
