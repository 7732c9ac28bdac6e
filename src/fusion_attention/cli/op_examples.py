"""The example program on an operator's page, made from the operator's definition and values of its arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusion_attention.cli import package_examples
from fusion_attention.cli.docstring_markdown import filled
from fusion_attention.cli.example_call import Call, empty, named

if TYPE_CHECKING:
    from fusion_attention.contract import Op

MASK = "mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1)  # CANN's compressed causal mask"
QKV = named("query", "key", "value")
STATISTICS = named("softmax_max", "softmax_sum", "attention_in", "dy")
PADDED = Call(
    ("query, key, value = (torch.randn(2, 128, 8, 64) for _ in range(3))  # [B, S, N, D]", MASK),
    QKV | {"head_num": "8", "input_layout": '"BSND"', "scale": "0.125", "atten_mask": "mask", "sparse_mode": "2"},
    empty(softmax_max="2, 8, 128, 8", softmax_sum="2, 8, 128, 8"),
    "out, softmax_max, softmax_sum, *_",
)
ENDS = "[100, 250, 300]"
PACKED = Call(
    ("query, key, value = (torch.randn(300, 8, 128) for _ in range(3))  # [T, N, D]: three sequences", MASK),
    QKV
    | {"head_num": "8", "input_layout": '"TND"', "scale": "128**-0.5", "atten_mask": "mask", "sparse_mode": "3"}
    | {"actual_seq_qlen": ENDS, "actual_seq_kvlen": ENDS},
    empty(softmax_max="300, 8, 8", softmax_sum="300, 8, 8"),
    "out, softmax_max, softmax_sum, *_",
)
ROPES = ("query_rope", "key_rope")
ROPED = PACKED.plus("query_rope, key_rope = torch.randn(300, 8, 64), torch.randn(300, 8, 64)", **named(*ROPES))
WITH_SINK = PADDED.plus("sink = torch.zeros(8)", sink="sink")


def backward(call: Call, forward: str, *more: str) -> Call:
    """Returns the arguments of a gradient function's example; its setup runs the forward. call: the arguments of the
    forward. forward: torch_npu's name of the forward. more: further tensors that both calls take."""
    given = [*("query", "key", "value", "8"), call.values["input_layout"]]
    words = ["scale", "atten_mask", "sparse_mode", "actual_seq_qlen", "actual_seq_kvlen", *more]
    given += [f"{name}={call.values.get(name, name)}" for name in words if name in call.values or name in more]
    lines = filled(f"attention_in, softmax_max, softmax_sum, *_ = {forward}(", given)
    setup = (*call.setup, *lines, "dy = torch.randn_like(attention_in)")
    return Call(setup, {**call.values, **STATISTICS}, empty(dsink="8") if "sink" in more else {}, "dq, dk, dv, *_")


ROPED_GRAD = backward(ROPED, "npu_fusion_attention_v2", *ROPES)
TOKEN = "query = torch.randn(2, 1, 8 * 128, dtype=torch.float16)  # one new token for each of two sequences"
PAGES = (
    "key, value = (torch.randn(5, 128, 2 * 128, dtype=torch.float16) for _ in range(2))  # five pages of 128",
    "block_table = torch.tensor([[4, 0], [2, 1]], dtype=torch.int32)",
)
HEADS = {"num_heads": "8", "num_key_value_heads": "2", "input_layout": '"BSH"', "scale_value": "128**-0.5"}
STEP = Call(
    (TOKEN, "key, value = (torch.randn(2, 256, 2 * 128, dtype=torch.float16) for _ in range(2))"),
    QKV | HEADS | {"actual_seq_lengths": "[256, 100]"},
)
PAGED = Call((TOKEN, *PAGES), {**STEP.values, "block_table": "block_table", "block_size": "128"})
PROMPT = Call(
    ("query, key, value = (torch.randn(2, 256, 8 * 128, dtype=torch.float16) for _ in range(3))", MASK),
    QKV
    | {"num_heads": "8", "input_layout": '"BSH"', "scale_value": "128**-0.5"}
    | {"actual_seq_lengths": "[256, 100]", "actual_seq_lengths_kv": "[256, 100]"},
)
FUSED = Call(
    (TOKEN, *PAGES),
    QKV | HEADS | {"actual_seq_lengths_kv": "[256, 200]", "block_table": "block_table", "block_size": "128"},
    empty(softmax_lse="0"),
    "out, lse",
)
INDEX = Call(
    (
        "query = torch.randn(1, 128, 8, 128, dtype=torch.bfloat16)  # the indexer's heads",
        "key = torch.randn(1, 4096, 1, 128, dtype=torch.bfloat16)",
        "weights = torch.rand(1, 128, 8, dtype=torch.bfloat16)",
    ),
    named("query", "key", "weights") | {"sparse_count": "2048"},
    empty(sparse_indices_out="1, 128, 1, 2048, dtype=torch.int32", sparse_values_out="0, dtype=torch.bfloat16"),
    "indices, values",
)
INDEX_GRAD = Call(
    (
        *INDEX.setup,
        "sparse_indices, values = npu_lightning_indexer(query, key, weights, sparse_count=2048, return_value=True)",
        "dy = torch.randn_like(values)",
    ),
    named("query", "key", "weights", "sparse_indices", "dy") | {"head_num": "8"},
    returns="dquery, dkey, dweights",
)
SELECT = Call(
    (
        "query = torch.randn(1, 64, 8, 512, dtype=torch.bfloat16)",
        "key = torch.randn(1, 4096, 1, 512, dtype=torch.bfloat16)  # latents: each row is a key and its value",
        "query_rope = torch.randn(1, 64, 8, 64, dtype=torch.bfloat16)",
        "key_rope = torch.randn(1, 4096, 1, 64, dtype=torch.bfloat16)",
        "sparse_indices = torch.rand(1, 64, 1, 4032).argsort(-1)[..., :2048].int()  # 2048 keys that the row sees",
    ),
    named("query", "key", "sparse_indices", "query_rope", "key_rope")
    | {"value": "key", "scale_value": "576**-0.5", "sparse_block_size": "1", "attention_mode": "2"}
    | {"return_softmax_lse": "True"},
    empty(softmax_max="1, 1, 64, 8", softmax_sum="1, 1, 64, 8"),
    "out, softmax_max, softmax_sum",
)
SELECT_GRAD = Call(
    (
        *SELECT.setup,
        "attention_in, softmax_max, softmax_sum = npu_sparse_flash_attention(",
        "    query, key, key, sparse_indices, 576**-0.5, query_rope=query_rope, key_rope=key_rope, attention_mode=2,",
        "    return_softmax_lse=True,",
        ")",
        "dy = torch.randn_like(attention_in)",
    ),
    {**SELECT.values, **STATISTICS},
    returns="dquery, dkey, dvalue, *_",
)
TEACHER = (
    "query_index = torch.randn(1, 64, 8, 128, dtype=torch.bfloat16)  # of the indexer, which is trained",
    "key_index = torch.randn(1, 4096, 1, 128, dtype=torch.bfloat16)",
    "weights = torch.rand(1, 64, 8, dtype=torch.bfloat16)",
)
LOSS = Call(
    (*SELECT_GRAD.setup[:-1], *TEACHER),
    {**SELECT.values, **named("query_index", "key_index", "weights", "softmax_max", "softmax_sum"), "layout": '"BSND"'},
    empty(loss="1"),
    "dquery_index, dkey_index, dweights, loss",
)
DENSE_TEACHER = (
    "query = torch.randn(1, 128, 32, 128, dtype=torch.bfloat16)  # of the attention; its probabilities are the target",
    "key = torch.randn(1, 128, 32, 128, dtype=torch.bfloat16)",
    "query_rope, key_rope = (torch.randn(1, 128, 32, 64, dtype=torch.bfloat16) for _ in range(2))",
    "query_index = torch.randn(1, 128, 8, 128, dtype=torch.bfloat16)  # of the indexer, which is trained",
    "key_index = torch.randn(1, 128, 1, 128, dtype=torch.bfloat16)",
    "weights = torch.rand(1, 128, 8, dtype=torch.bfloat16)",
)
INDEX_LSE = Call(
    DENSE_TEACHER[3:],
    named("query_index", "key_index", "weights"),
    empty(softmax_max="1, 1, 128", softmax_sum="1, 1, 128"),
    "softmax_max, softmax_sum",
)
DENSE_LOSS = Call(
    (
        *DENSE_TEACHER,
        "_, lse = fa.attention(",
        "    query, key, key, q_rope=query_rope, k_rope=key_rope, band=fa.Band.causal(), return_lse=True",
        ")",
        "softmax_max = lse.unsqueeze(-1)  # [B, N2, S1, G]; the lse is max + ln(sum)",
        "softmax_sum = torch.ones_like(softmax_max)",
        "softmax_max_index, softmax_sum_index = npu_dense_lightning_indexer_softmax_lse(",
        "    query_index, key_index, weights",
        ")",
    ),
    named("query", "key", "query_rope", "key_rope", "query_index", "key_index", "weights", "softmax_max")
    | named("softmax_sum", "softmax_max_index", "softmax_sum_index")
    | {"scale_value": "192**-0.5", "layout": '"BSND"'},
    empty(loss="1"),
    "dquery_index, dkey_index, dweights, loss",
)
EXAMPLES = {
    "attention": """
q = torch.randn(2, 128, 8, 64, requires_grad=True)  # [B, S, N, D]
k, v = (torch.randn(2, 128, 2, 64, requires_grad=True) for _ in range(2))  # grouped heads

out = fa.attention(q, k, v, band=fa.Band.causal())
out = fa.attention(q, k, v, band=fa.Band.window(63, 0), sink=torch.zeros(8))
out, lse = fa.attention(q, k, v, alibi_slopes=torch.rand(8), keep_prob=0.9, return_lse=True)
out.sum().backward()

packed = torch.randn(300, 8, 64)  # three sequences end to end
out = fa.attention(
    packed, packed, packed, layout="TND", q_len=[100, 150, 50], band=fa.Band.causal()
)
""",
    "decode_attention": """
cache = fa.PagedKVCache(heads=2, dim=64, pages=32, page_size=16, stored="int8")
a, b = cache.allocate(), cache.allocate()
for sequence, tokens in ((a, 40), (b, 25)):
    cache.append([sequence], torch.randn(1, tokens, 2, 64), torch.randn(1, tokens, 2, 64))

q = torch.randn(2, 1, 8, 64)  # the newest token of each sequence
out = fa.decode_attention(q, cache, sequences=[a, b])

k, v = torch.randn(2, 100, 2, 64), torch.randn(2, 100, 2, 64)  # tensors instead of a cache object
out, lse = fa.decode_attention(q, (k, v), kv_len=[100, 31], band=fa.Band.window(15, 0), return_lse=True)
""",
    "lightning_indexer": """
q, k = torch.randn(2, 128, 4, 32), torch.randn(2, 128, 1, 32)
weights = torch.rand(2, 128, 4)
indices, values = fa.lightning_indexer(q, k, weights, 16)  # for each query row the 16 keys of highest score
assert indices.shape == (2, 128, 1, 16)
""",
    "sparse_attention": """
index_q, index_k, weights = torch.randn(2, 128, 4, 32), torch.randn(2, 128, 1, 32), torch.rand(2, 128, 4)
indices, _ = fa.lightning_indexer(index_q, index_k, weights, 16)

q = torch.randn(2, 128, 8, 64, requires_grad=True)
latent = torch.randn(2, 128, 1, 64, requires_grad=True)  # each row is a key and its value
out, lse = fa.sparse_attention(q, latent, None, indices, return_lse=True)
out.sum().backward()
""",
    "compressed_attention": """
q = torch.randn(2, 128, 8, 64, requires_grad=True)
latent = torch.randn(2, 128, 1, 64, requires_grad=True)  # each row is a key and its value
compressed = latent.unflatten(1, (32, 4)).mean(2)  # a compressed key for every four tokens
out, lse = fa.compressed_attention(q, latent, compressed, ratio=4, band=fa.Band.window(15), return_lse=True)
out.sum().backward()
""",
    "compress": """
rows, gate = torch.randn(2, 128, 1, 64, requires_grad=True), torch.randn(2, 128, 1, 64)
keys = fa.compress(rows, gate, ratio=4)  # a compressed key for every four tokens
keys.sum().backward()
""",
    "indexer_loss": """
index_q, index_k = torch.randn(2, 128, 4, 32, requires_grad=True), torch.randn(2, 128, 1, 32)
weights = torch.rand(2, 128, 4)
indices, _ = fa.lightning_indexer(index_q, index_k, weights, 16)
q, latent = torch.randn(2, 128, 8, 64), torch.randn(2, 128, 1, 64)
out, lse = fa.sparse_attention(q, latent, None, indices, return_lse=True)

loss = fa.indexer_loss(q, latent, lse, index_q, index_k, weights, indices) / (2 * 128)
loss.backward()  # gradients of the indexer's query, key and weights only
""",
    "indexer_target_loss": package_examples.TARGET_LOSS,
}
FAMILIES = {  # by prefix of operators' names, of which the longest counts
    prefix: call
    for call, prefixes in (
        *package_examples.CALLS,
        (PADDED, "aclnnFlashAttentionScore"),
        (WITH_SINK, "aclnnFlashAttentionScoreV3"),
        (PACKED, "aclnnFlashAttentionVarLenScore npu_fusion_attention"),
        (ROPED, "aclnnFlashAttentionVarLenScoreV3 aclnnFlashAttentionVarLenScoreV5 npu_fusion_attention_v2"),
        (backward(PADDED, "npu_fusion_attention"), "aclnnFlashAttentionScoreGrad npu_fusion_attention_grad"),
        (backward(WITH_SINK, "npu_fusion_attention", "sink"), "aclnnFlashAttentionScoreGradV3"),
        (backward(PACKED, "npu_fusion_attention"), "aclnnFlashAttentionUnpaddingScoreGrad"),
        (ROPED_GRAD, "aclnnFlashAttentionUnpaddingScoreGradV3 aclnnFlashAttentionUnpaddingScoreGradV5"),
        (ROPED_GRAD, "npu_fusion_attention_grad_v2"),
        (STEP, "aclnnIncreFlashAttention"),
        (PAGED, "aclnnIncreFlashAttentionV3 aclnnIncreFlashAttentionV4 npu_incre_flash_attention"),
        (PROMPT, "aclnnPromptFlashAttention npu_prompt_flash_attention"),
        (FUSED, "aclnnFusedInferAttentionScore npu_fused_infer_attention_score"),
        (INDEX, "aclnnLightningIndexer npu_lightning_indexer"),
        (INDEX_GRAD, "aclnnLightningIndexerGrad npu_lightning_indexer_grad"),
        (SELECT, "aclnnSparseFlashAttention npu_sparse_flash_attention"),
        (SELECT_GRAD, "aclnnSparseFlashAttentionGrad npu_sparse_flash_attention_grad"),
        (LOSS, "aclnnSparseLightningIndexerGradKLLoss npu_sparse_lightning_indexer_grad_kl_loss"),
        (DENSE_LOSS, "aclnnDenseLightningIndexerGradKLLoss npu_dense_lightning_indexer_grad_kl_loss"),
        (INDEX_LSE, "aclnnDenseLightningIndexerSoftmaxLse npu_dense_lightning_indexer_softmax_lse"),
    )
    for prefix in prefixes.split()
}


def program(op: Op) -> str:
    """Returns the text of an example program that calls an operator; "" if the tables here have no arguments for it."""
    if op.name in EXAMPLES:
        return f"import torch\nimport fusion_attention as fa\n{EXAMPLES[op.name]}".rstrip()
    prefix = max(filter(op.name.startswith, FAMILIES), key=len, default="")
    if not prefix:
        return ""
    call = FAMILIES[prefix]
    return _two_phase(op, call) if op.name.startswith("aclnn") else _function(op, call)


def _function(op: Op, call: Call) -> str:
    """Returns an example program that calls an operator's function: required arguments by position, others by name."""
    from fusion_attention.contract import REQUIRED, Attr

    arguments, by_place = [], True
    for p in op.params:
        given = call.values.get(p.name)
        needed = p.default is REQUIRED if isinstance(p, Attr) else not p.optional
        by_place = by_place and needed
        if given is not None and not getattr(p, "output", False):
            arguments.append(given if by_place else f"{p.shown}={given}")
    lines = filled(f"{call.returns} = {op.called}(", arguments)
    if op.name == op.called:
        return _text(["import torch"], [op.name], call, lines)
    return _text([installed(op)], [], call, lines)


def installed(op: Op) -> str:
    """Returns the import statements of an example that calls an operator of CANN's package cann_ops_transformer."""
    package = op.name.removesuffix(f".{op.called}")
    return f"import torch\nfrom fusion_attention import npu\n\nnpu.install()\nfrom {package} import {op.called}"


def _two_phase(op: Op, call: Call) -> str:
    """Returns the text of an example program that calls an operator by CANN's two-phase interface:
    aclnnXxxGetWorkspaceSize() checks and prepares the call, aclnnXxx() computes it."""
    from fusion_attention.captures.gradients import gradient_name
    from fusion_attention.contract import Attr, Tensor

    arguments, outputs = [], []
    # An output that call.outputs lacks has the shape of the query, or of the input whose gradient it is.
    like = {gradient_name(op, name): text for name, text in call.values.items()}
    like["attention_out"] = call.values.get("query", "")
    for p in op.params:
        given = call.values.get(p.name)
        if isinstance(p, Tensor) and p.output:
            memory = call.outputs.get(p.name) or (f"torch.empty_like({like[p.name]})" if like.get(p.name) else "")
            outputs += [f"{p.shown} = {memory}"] if memory else []
            given = p.shown if memory else None
        if given is None and isinstance(p, Attr):
            given = _shown(p.default)
        elif given is not None and isinstance(p, Tensor):
            given = f"of({given})"
        arguments.append(f"{p.shown}={given}")
    lines = [
        'acl.init(device="cpu")',
        "acl.rt.set_device(0)",
        "of = acl.Tensor.of",
        *filled(f"ret, size, executor = aclnn.{op.name}GetWorkspaceSize(", arguments),
        "assert ret == 0, acl.get_recent_err_msg()",
        "workspace = acl.rt.malloc(size, acl.ACL_MEM_MALLOC_HUGE_FIRST)[0] if size else None",
        f"assert aclnn.{op.name}(workspace, size, executor, None) == 0, acl.get_recent_err_msg()",
        "acl.finalize()",
    ]
    return _text(["import torch", "from fusion_attention import acl, aclnn"], [], call, [*outputs, "", *lines])


def _shown(value: object) -> str:
    if value in (2**31 - 1, 2**63 - 1):
        return "2**31 - 1" if value == 2**31 - 1 else "2**63 - 1"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _text(imports: list[str], called: list[str], call: Call, lines: list[str]) -> str:
    """Returns a program's text: imports, call.setup, `lines`; it imports the functions `called`, and others it uses."""
    body = "\n".join([*call.setup, *lines])
    words = ["npu_fusion_attention_v2", "npu_fusion_attention", "npu_lightning_indexer", "npu_sparse_flash_attention"]
    words += ["npu_dense_lightning_indexer_softmax_lse", "npu_block_sparse_attention"]
    used = {name for name in words if f" {name}(" in body} | {*called}
    imports += ["import fusion_attention as fa"] if "fa." in body else []
    imports += [f"from fusion_attention.npu import {', '.join(sorted(used))}"] if used else []
    gap = [""] if call.setup else []
    return "\n".join([*imports, "", *call.setup, *gap, *lines])
