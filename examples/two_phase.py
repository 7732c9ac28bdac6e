"""Runs aclnnFlashAttentionScoreV2 as programs for CANN do: allocates device memory, creates tensors over it, and calls
the operator's two phases. Also shows how an error is reported, and one executor that runs several times."""

import numpy as np

from fusion_attention import acl, aclnn

BATCH, ROWS, HEADS, DIM = 2, 64, 4, 32


def check(ret: int) -> None:
    """Exits with the error text if a call failed."""
    if ret != acl.ACL_SUCCESS:
        raise SystemExit(f"{ret}: {acl.get_recent_err_msg()}")


def device_tensor(host: np.ndarray, dtype: int) -> tuple[int, acl.Tensor | None]:
    """Returns device memory filled from the host, and a tensor over it."""
    address, ret = acl.rt.malloc(host.nbytes, acl.ACL_MEM_MALLOC_HUGE_FIRST)
    check(ret)
    check(acl.rt.memcpy(address, host.nbytes, host, host.nbytes, acl.ACL_MEMCPY_HOST_TO_DEVICE))
    return address, acl.create_tensor(host.shape, dtype, None, 0, acl.ACL_FORMAT_ND, host.shape, address)


def main() -> None:
    """Runs phase 1 once and phase 2 three times, and prints results."""
    check(acl.init(device="cpu"))
    check(acl.rt.set_device(0))
    stream, ret = acl.rt.create_stream()
    check(ret)

    rng = np.random.default_rng(0)
    shape = (BATCH, ROWS, HEADS, DIM)
    (q_address, q), (_, k), (_, v) = (
        device_tensor(rng.standard_normal(shape).astype(np.float16), acl.ACL_FLOAT16) for _ in range(3)
    )
    out_address, out = device_tensor(np.zeros(shape, np.float16), acl.ACL_FLOAT16)
    statistics = np.zeros((BATCH, HEADS, ROWS, 8), np.float32)
    (_, softmax_max), (sum_address, softmax_sum) = (device_tensor(statistics, acl.ACL_FLOAT) for _ in range(2))
    _, mask = device_tensor(np.triu(np.ones((2048, 2048), np.uint8), 1), acl.ACL_UINT8)

    # Phase 1: the parameters in the order of CANN's page; sparse mode 2 is causal, with the compressed mask.
    def plan(layout: str) -> tuple[int, int, acl.Executor | None]:
        return aclnn.aclnnFlashAttentionScoreV2GetWorkspaceSize(
            *(q, k, v, None, None, None, mask, None, None, None, DIM**-0.5, 1.0, 65536, 65536, HEADS, layout, 0, 2, 1),
            *(softmax_max, softmax_sum, None, out),
        )

    ret, *_ = plan("bsnd")
    print(f"a wrong layout string is code {ret}:\n  {acl.get_recent_err_msg()}")
    ret, size, executor = plan("BSND")
    check(ret)
    workspace, ret = acl.rt.malloc(size, acl.ACL_MEM_MALLOC_HUGE_FIRST) if size else (None, 0)
    check(ret)
    print(f"phase 1: {size} bytes of workspace, {executor}")

    # Phase 2 runs the executor: a repeatable one any number of times, on the current content of its tensors.
    check(acl.set_acl_op_executor_repeatable(executor))
    for step in range(3):
        check(aclnn.aclnnFlashAttentionScoreV2(workspace, size, executor, stream))
        check(acl.rt.synchronize_stream(stream))
        host = np.zeros(shape, np.float16)
        check(acl.rt.memcpy(host, host.nbytes, out_address, host.nbytes, acl.ACL_MEMCPY_DEVICE_TO_HOST))
        sums = np.zeros_like(statistics)
        check(acl.rt.memcpy(sums, sums.nbytes, sum_address, sums.nbytes, acl.ACL_MEMCPY_DEVICE_TO_HOST))
        print(f"step {step}: mean |out| {np.abs(host.astype(np.float32)).mean():.4f}, largest sum {sums.max():.2f}")
        check(acl.rt.memcpy(q_address, host.nbytes, out_address, host.nbytes, acl.ACL_MEMCPY_DEVICE_TO_DEVICE))
    check(acl.destroy_acl_op_executor(executor))

    ret = aclnn.aclnnFlashAttentionScoreV2(workspace, size, executor, stream)
    print(f"after that it is code {ret}:\n  {acl.get_recent_err_msg()}")
    check(acl.rt.destroy_stream(stream))
    check(acl.rt.reset_device(0))
    check(acl.finalize())


if __name__ == "__main__":
    main()
