"""torch_npu's names besides operators: profiles, marks, counters, memory, transfer from CUDA, other chip packages."""

import importlib
import importlib.metadata
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import same_bits
from support.installed_state import surroundings

import fusion_attention as fa
from fusion_attention import npu


def imported(name: str) -> Any:
    return importlib.import_module(name)


# ----------------------------------------------------------------------------------------------------------- profiling


def test_torch_npu_profiler_writes_trace_with_mstx_marks_and_ranges(torch_npu: Any, tmp_path: Path) -> None:
    profiler, mstx = imported("torch_npu.profiler"), imported("torch_npu").npu.mstx
    settings = profiler._ExperimentalConfig(
        profiler_level=profiler.ProfilerLevel.Level1,
        aic_metrics=profiler.AiCMetrics.PipeUtilization,
        export_type=[profiler.ExportType.Text],
        l2_cache=False,
    )

    @mstx.mstx_range("marked function")
    def marked() -> torch.Tensor:
        return torch.ones(3) * 2

    with profiler.profile(
        activities=[profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.NPU],
        schedule=profiler.schedule(wait=1, active=1, repeat=1),
        on_trace_ready=profiler.tensorboard_trace_handler(str(tmp_path), analyse_flag=True),
        experimental_config=settings,
        record_shapes=True,
    ) as result:
        for _ in range(2):
            number = mstx.range_start("my range", torch_npu.npu.current_stream())
            mstx().mark("my mark")
            assert marked().tolist() == [2, 2, 2]
            mstx.range_end(number)
            result.step()
    (file,) = tmp_path.glob("*.json")
    names = {event.get("name") for event in json.loads(file.read_text())["traceEvents"]}
    assert {"my range", "my mark", "marked function", "aten::mul"} <= names
    assert mstx.range_start("") == 0
    mstx.range_end(0)
    mstx.range_end(10**9)
    profiler.analyse(str(tmp_path))
    assert profiler.supported_activities() == {profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.NPU}


def test_flops_counter_starts_pauses_resumes_and_stops(torch_npu: Any) -> None:
    counter = imported("torch_npu.utils.flops_count").FlopsCounter()
    x = torch.ones(4, 8)
    with counter:
        x @ x.mT
        counter.pause()
        x @ x.mT
        counter.resume()
        assert counter.get_flops() == [256, 256]
        x @ x.mT
    assert counter.get_flops() == [512, 512]
    counter.start()
    x @ x.mT
    assert torch_npu.utils.FlopsCounter is type(counter)
    assert counter.get_flops() == [256, 256]
    counter.stop()
    assert counter.get_flops() == [0, 0]
    x @ x.mT
    assert counter.get_flops() == [0, 0]


def test_memory_version_dtype_and_format_queries_return_host_values(
    torch_npu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, total = torch_npu.npu.mem_get_info()
    assert 0 < free <= total
    assert torch_npu.npu.memory.mem_get_info is torch_npu.npu.mem_get_info
    assert torch_npu.npu.memory_stats() == {}
    assert "does not count" in torch_npu.npu.memory_summary()
    environment = imported("torch_npu.utils.collect_env")
    monkeypatch.setattr(torch.utils.collect_env, "get_pretty_env_info", lambda: "what torch says")  # in seconds
    report = environment.get_pretty_env_info()
    assert re.match(r"what torch says\n\ntorch_npu: implemented by fusion_attention, version \S+", report)
    assert environment.get_torch_npu_version() == torch_npu.__version__
    assert torch_npu.float8_e8m0fnu is torch.float8_e8m0fnu
    assert torch_npu.hifloat8 == "torch_npu.hifloat8"
    for name in ("int4", "float4_e1m2fn_x2", "float8_e8m0"):
        assert getattr(torch_npu, name) in (getattr(torch, name, None), f"torch_npu.{name}")
    with pytest.raises(TypeError):
        torch.ones(2).to(dtype=torch_npu.hifloat8)
    weight = torch.ones(4, 4)
    assert torch_npu.npu_format_cast_(weight, torch_npu.Format.FRACTAL_NZ) is weight
    assert torch_npu.get_npu_format(weight) == torch_npu.Format.FRACTAL_NZ == 29
    assert torch_npu.get_npu_format(torch_npu.npu_format_cast_(weight, weight)) == 29
    assert torch_npu.get_npu_format(torch_npu.npu_format_cast_(weight, torch_npu.Format.NCHW)) == torch_npu.Format.ND
    skip = imported("torch_npu.testing.common_utils").SkipIfNotGteCANNVersion
    assert skip("9.9.9")(len) is len
    torch_npu.npu.matmul.allow_hf32 = True
    for call in ("init_dump", "finalize_dump", "set_deterministic_level", "ipc_collect"):
        assert getattr(torch_npu.npu, call)() is None


# --------------------------------------------------------------------------------------------------- programs for CUDA


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_transfer_to_npu_redirects_cuda_calls_until_uninstall(torch_npu: Any, tmp_path: Path) -> None:
    imported("torch_npu.contrib.transfer_to_npu")
    saved = tmp_path / "saved"
    torch.save(torch.randn(3, 4, device="npu"), saved)
    loaded = torch.load(saved)  # now, for it loads modules of torch
    npu.uninstall()
    before, cuda, scaler = surroundings(), dict(vars(torch.cuda)), vars(torch.amp.GradScaler)["__init__"]
    npu.install()
    exec("from torch_npu.contrib import transfer_to_npu")
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 8
    assert torch.cuda.get_device_name() == torch_npu.npu.get_device_name()
    assert torch.cuda.get_device_capability() < (7, 0)  # as programs and torch.compile compare it
    assert torch.cuda.get_device_properties(0).major < 7
    x = torch.randn(3, 4, device="cuda:0")
    tensors = [x.cuda(), x.to("cuda"), x.to(0), x.to(device=torch.device("cuda", 0)), x.new_ones(2, device="cuda")]
    tensors += [torch.zeros(2, device=torch.device("cuda")), torch.nn.Linear(4, 4).cuda().to("cuda:0").weight]
    tensors += [torch.nn.Linear(4, 4, device="cuda").to(0).weight, torch.as_tensor([1.0], device="cuda")]
    for tensor in tensors:
        assert tensor.is_cuda
        assert tensor.is_npu
        assert tensor.device == x.device
    assert torch.full((2,), 3, device="cuda").tolist() == [3, 3]  # numbers stay numbers
    layer = torch.nn.Linear(4, 4).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    with torch.cuda.amp.autocast(dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    for grad_scaler in (torch.cuda.amp.GradScaler(), torch.amp.GradScaler(), torch.amp.GradScaler("cuda")):
        assert grad_scaler.is_enabled()
        grad_scaler.scale(layer(x).sum()).backward()
    assert torch.Generator | None
    generator = torch.Generator(device="cuda")
    assert isinstance(generator, torch.Generator)
    assert not isinstance(3, torch.Generator)
    assert generator.device == torch.rand(2, device="cuda", generator=generator).device == x.device
    for place in ("cuda", "cuda:0", {"cuda:0": "cuda:0"}, lambda storage, _: storage.cuda(0)):
        result = torch.load(saved, map_location=place)
        assert result.device == x.device
        same_bits(result, loaded)
    storages = x.cpu().untyped_storage(), torch.storage.TypedStorage(2, dtype=torch.half, _internal=True)
    assert {storage.cuda().device for storage in storages} == {x.device}
    torch.cuda.manual_seed(3)
    one = torch.randn(2, device="cuda")
    torch.cuda.manual_seed_all(3)
    same_bits(one, torch.randn(2, device="cuda"))
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().synchronize()
    assert torch.distributed.is_nccl_available()
    npu.uninstall()
    assert "torch_npu.contrib.transfer_to_npu" not in sys.modules
    assert vars(torch.cuda) == cuda
    assert vars(torch.amp.GradScaler)["__init__"] is scaler
    assert surroundings() == before


@pytest.mark.slow
def test_transfer_to_npu_function_compiles_with_fullgraph(torch_npu: Any, fresh: None) -> None:
    imported("torch_npu.contrib.transfer_to_npu")

    @torch.compile(backend="aot_eager", fullgraph=True)
    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.ones(3, device="cuda") + x.to("cuda")

    assert layer(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]


def test_transfer_to_npu_is_found_but_not_imported_by_install(torch_npu: Any) -> None:
    assert importlib.util.find_spec("torch_npu.contrib.transfer_to_npu") is not None
    assert "torch_npu.contrib.transfer_to_npu" not in sys.modules


# ------------------------------------------------------------------------------------------------------ other packages


def test_mindspeed_attention_functions_match_torch_npu(torch_npu: Any) -> None:
    ring = imported("mindspeed.ops.npu_ring_attention_update")
    attention = imported("mindspeed.ops.fusion_attention_v2")
    q, k = torch.randn(2, 6, 1, 32)
    steps = [attention.npu_fusion_attention(q, chunk, chunk, 4, "SBH")[:3] for chunk in k.split(3)]
    result = ring.npu_ring_attention_update(*steps[0], *steps[1])
    again = ring.op_builder.load().npu_ring_attention_update(*steps[0], *steps[1], None, "SBH")
    want = torch_npu.npu_ring_attention_update(*steps[0], *steps[1])
    for one, other, right in zip(result, again, want, strict=True):
        same_bits(one, right)
        same_bits(other, right)
    gradients = attention.npu_fusion_attention_grad(
        q, k, k, result[0], 4, "SBH", softmax_max=result[1], softmax_sum=result[2], attention_in=result[0]
    )
    assert gradients[0].shape == q.shape
    scaled = {"scale": 0.25, "keep_prob": 0.5, "offset": 8}
    words = {"softmax_max": result[1], "softmax_sum": result[2], "attention_in": result[0]}
    ours = attention.npu_fusion_attention_grad(
        q, k, k, grad_outputs=q, head_num=4, input_layout="SBH", **scaled, **words
    )
    scaled["scale_value"] = scaled.pop("scale")
    theirs = torch_npu.npu_fusion_attention_grad_v2(q, k, k, q, 4, "SBH", **scaled, seed=1234, **words)
    for one, other in zip(ours, theirs, strict=True):
        same_bits(one, other)
    with pytest.raises(TypeError):
        attention.npu_fusion_attention_grad(q, k, k, q, 4, "SBH", scale_value=0.25, **words)
    npu.uninstall()
    assert importlib.util.find_spec("mindspeed") is None


def test_mindspeed_matmul_add_accumulates_into_the_gradient(torch_npu: Any) -> None:
    x, dy = torch.randn(5, 4).bfloat16(), torch.randn(5, 3).bfloat16()
    grad = torch.ones(3, 4)
    imported("mindspeed.ops.npu_matmul_add").npu_matmul_add_fp32(x, dy, grad)
    same_bits(grad, 1 + dy.float().T @ x.float())
    grouped = torch.ones(2 * 4, 3)
    imported("mindspeed.ops.npu_groupmatmul_add").npu_groupmatmul_add_fp32(x, dy, torch.tensor([2, 5]), grouped)
    want = [1 + x[a:b].float().T @ dy[a:b].float() for a, b in ((0, 2), (2, 5))]
    same_bits(grouped, torch.cat(want))


def test_mindspeed_has_no_package_version_and_missing_names_raise(torch_npu: Any) -> None:
    """Programs that ask for a version of MindSpeed learn that it is not installed."""
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("mindspeed")
    with pytest.raises(AttributeError, match=r"fusion_attention's mindspeed\.ops has no lcal_functional"):
        imported("mindspeed.ops").lcal_functional  # noqa: B018
    with pytest.raises(ModuleNotFoundError):
        imported("mindspeed.megatron_adaptor")


def cann() -> Any:
    assert imported("cann_ops_transformer").flash_attn is imported("cann_ops_transformer.ops").flash_attn
    return imported("cann_ops_transformer.ops")


def test_cann_flash_attn_of_packed_rows_matches_attention(torch_npu: Any) -> None:
    """flash_attn takes cu_seqlens with a leading 0 and returns lse as [N, T]; some rows have no keys."""
    ends, heads = torch.tensor([0, 3, 7], dtype=torch.int32, device="npu"), 2
    q, k, v = (t.npu().requires_grad_() for t in torch.randn(3, 7, heads, 16))
    metadata = cann().flash_attn_metadata(heads, heads, 16, cu_seqlens_q=ends, mask_mode=3)
    assert (metadata.dtype, metadata.device.type) == (torch.int32, "npu")
    words: dict[str, Any] = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "metadata": metadata, "layout_q": "TND"}
    words |= {"layout_kv": "TND", "layout_out": "TND", "softmax_scale": 0.25}
    out, lse = cann().flash_attn(q, k, v, **words, mask_mode=3, return_softmax_lse=True)
    want, sums = fa.attention(q, k, v, layout="TND", q_len=[3, 4], scale=0.25, band=fa.Band.causal(), return_lse=True)
    same_bits(out, want)
    same_bits(lse, sums.T)
    out.sum().backward()
    assert q.grad is not None
    assert q.grad.device.type == "npu"
    near, _ = cann().flash_attn(q, k, v, **words, mask_mode=4, win_left=1, win_right=-1)
    same_bits(near, fa.attention(q, k, v, layout="TND", q_len=[3, 4], scale=0.25, band=fa.Band(lo=-1)))


def test_cann_flash_attn_of_padded_rows_matches_attention(torch_npu: Any) -> None:
    q, k = torch.randn(2, 4, 3, 16), torch.randn(2, 4, 3, 16)
    used = torch.tensor([2, 0], dtype=torch.int32)
    words = {"layout_q": "BNSD", "layout_kv": "BNSD", "seqused_kv": used, "return_softmax_lse": True}
    out, lse = cann().flash_attn(q, k, k, **words)
    assert out.shape == (2, 3, 4, 16)
    same_bits(out.transpose(1, 2), fa.attention(q, k, k, layout="BNSD", kv_len=used, scale=1.0))
    assert lse[0].isfinite().all()
    assert (lse[1] == torch.inf).all()
    none = cann().flash_attn(q, k, k)[1]
    assert none.tolist() == [0.0]


def test_cann_partial_rotary_and_moe_token_permute_match_torch_npu(torch_npu: Any) -> None:
    x, r1, r2 = torch.randn(2, 3, 2, 8), torch.randn(1, 3, 1, 4), torch.randn(1, 3, 1, 4)
    leaf = x.clone().requires_grad_()
    turned = leaf * 1
    cann().inplace_partial_rotary_mul(turned, r1, r2, partial_slice=[2, 6])
    want = torch.cat([x[..., :2], torch_npu.npu_rotary_mul(x[..., 2:6], r1, r2, "interleave"), x[..., 6:]], -1)
    same_bits(turned.detach(), want)
    turned.sum().backward()
    ones = torch.ones_like(x)
    dx = torch_npu.npu_rotary_mul_backward(ones[..., 2:6], x[..., 2:6], r1, r2, "interleave")[0]
    same_bits(leaf.grad, torch.cat([ones[..., :2], dx, ones[..., 6:]], -1))
    cann().inplace_partial_rotary_mul(x, r1, r2)
    same_bits(x, leaf.detach())
    rows, positions, scale = cann().moe_token_permute(torch.randn(4, 8), torch.tensor([1, 0, 1, 0]))
    assert (rows.shape, positions.tolist(), scale.numel()) == ((4, 8), [2, 0, 3, 1], 0)


def test_unsupported_cann_arguments_and_functions_raise_named_errors(torch_npu: Any) -> None:
    q, ends, ops = torch.randn(1, 4, 2, 8), torch.tensor([0, 4]), cann()
    k = q[:, :, :1]
    refused: dict[str, Any] = {
        "flash_attn: layout_kv": lambda: ops.flash_attn(q, k, k, layout_kv="PA_BBND", block_table=ends[None]),
        "flash_attn: layout_out": lambda: ops.flash_attn(q, k, k, layout_out="BNSD"),
        "flash_attn: attn_mask": lambda: ops.flash_attn(q, k, k, attn_mask=torch.ones(4, 4).triu(1)),
        "flash_attn: win_left": lambda: ops.flash_attn(q, k, k, win_left=2),
        "flash_attn: win_right": lambda: ops.flash_attn(q, k, k, mask_mode=3, win_right=0),
        "flash_attn: mask_mode": lambda: ops.flash_attn(q, k, k, mask_mode=1),
        "flash_attn: seqused_q": lambda: ops.flash_attn(q, k, k, cu_seqlens_q=ends, seqused_q=ends[1:]),
        "moe_token_permute: quant_mode": lambda: ops.moe_token_permute(q[0, 0], ends, quant_mode=3),
    }
    for message, call in refused.items():
        with pytest.raises(fa.ContractError, match=message):
            call()
    with pytest.raises(AttributeError, match=r"no compressor_grad; instead: cann_ops_transformer\.compressor"):
        ops.compressor_grad  # noqa: B018
