"""Arguments for example programs of CANN's newer operators, which are also in its package cann_ops_transformer."""

from fusion_attention.cli.example_call import Call, empty, named

INDEX_OF_TOKENS = Call(
    (
        "query = torch.randn(1, 128, 8, 128, dtype=torch.bfloat16)  # the indexer's heads",
        "key = torch.randn(1, 32, 1, 128, dtype=torch.bfloat16)  # one for every 4 tokens",
        "weights = torch.rand(1, 128, 8)",
    ),
    named("query", "key", "weights")
    | {"sparse_count": "16", "residual": "[0]", "sparse_mode": "3", "ratio": "4", "return_values": "1"},
    empty(sparse_indices_out="1, 128, 1, 16, dtype=torch.int32", sparse_values_out="1, 128, 1, 16"),
    "sparse_indices, values",
)
SHARED_KEYS = Call(
    (
        "query = torch.randn(1, 64, 8, 512, dtype=torch.bfloat16)",
        "key = torch.randn(1, 64, 1, 512, dtype=torch.bfloat16)  # each row is a key and its value",
        "key_compressed = torch.randn(1, 16, 1, 512, dtype=torch.bfloat16)  # one for every 4 tokens",
        "row, entry = torch.arange(64).view(-1, 1), torch.arange(16)",
        "visible = entry < (row + 1) // 4  # compressed keys whose tokens are all at or before the row",
        "sparse_indices = entry.where(visible, -1).int().view(1, 64, 1, 16)",
        "sinks = torch.zeros(8)",
    ),
    named("query", "key", "key_compressed", "sparse_indices", "sinks")
    | {"cmp_residual_kv": "[0]", "scale_value": "512**-0.5", "ratio": "4", "ori_mask_mode": "4"}
    | {"cmp_mask_mode": "3", "ori_win_left": "15", "ori_win_right": "0", "return_softmax_lse": "True"},
    empty(softmax_lse="1, 1, 64, 8"),
    "out, lse",
)
SHARED_KEYS_SAVED = (
    *SHARED_KEYS.setup,
    "attention_in, lse = fa.compressed_attention(",
    "    query, key, key_compressed, sparse_indices, ratio=4, band=fa.Band.window(15), sink=sinks,",
    "    scale=512**-0.5, return_lse=True,",
    ")",
    "softmax_lse = lse.mT[:, None].contiguous()  # [B, 1, S, N], over both kinds of keys and the sink",
)
SHARED_KEYS_GRAD = Call(
    (*SHARED_KEYS_SAVED, "dout = torch.randn_like(attention_in)"),
    {**SHARED_KEYS.values, **named("dout", "attention_in", "softmax_lse")},
    empty(cmp_softmax_l1_norm="1, 64, 1, 16"),
    "dq, dori_kv, dcmp_kv, dsinks, _, cmp_softmax_l1_norm",
)
SHARED_KEYS_L1 = Call(
    SHARED_KEYS_SAVED,
    named("query", "softmax_lse", "sparse_indices")
    | {"key": "key_compressed", "cmp_residual_k": "[0]", "scale_value": "512**-0.5", "ratio": "4", "mask_mode": "3"},
    empty(l1_norm="1, 64, 1, 16"),
    "target",
)
SIZES_OF_HEADS = {"num_heads_q": "64", "num_heads_kv": "1", "num_heads_k": "1", "head_dim": "512"}
SHARED_KEYS_METADATA = Call((), SIZES_OF_HEADS, empty(meta_data="1024, dtype=torch.int32"))
L1_METADATA = Call((), SIZES_OF_HEADS, empty(meta_data="64, dtype=torch.int32"))
INDEXER = (
    "query_index = torch.randn(1, 128, 8, 128, dtype=torch.bfloat16)  # of the indexer, which is trained",
    "key_index = torch.randn(1, 128, 1, 128, dtype=torch.bfloat16)",
    "weights = torch.rand(1, 128, 8)",
)
GIVEN = named("query_index", "key_index", "weights")
GIVEN |= {"layout": '"BSND"', "layout_kv": '"BSND"', "sparse_mode": "3"}
OUTPUTS = {"softmax_out": "torch.empty_like(target)"}
LSE = (
    'dots = torch.einsum("bihd,bjd->bihj", query_index, key_index[:, :, 0])',
    "scores = (dots.relu().float() * weights[..., None]).sum(2)",
    "hidden = torch.ones(128, 128).triu(1) > 0",
    "softmax_lse = scores.masked_fill(hidden, -torch.inf).logsumexp(-1)[:, None]",
)
TARGET = "target = torch.rand(1, 128, 1, {}).softmax(-1)  # the attention's probability of every key"
LISTED = Call(
    (
        *INDEXER,
        "sparse_indices = torch.full((1, 128, 1, 512), -1, dtype=torch.int32)",
        "sparse_indices[..., :128] = torch.arange(128)  # a row reads the listed keys that it sees",
        TARGET.format(512),
    ),
    {**GIVEN, "sparse_indices": "sparse_indices", "target": "target"},
    OUTPUTS,
    "dq, dk, dw, softmax_out",
)
DENSE = Call(
    (*INDEXER, TARGET.format(128), *LSE),
    {**GIVEN, "target": "target", "softmax_lse": "softmax_lse"},
    OUTPUTS,
    "dq, dk, dw, softmax_out",
)
STATISTICS = Call(INDEXER, GIVEN, empty(softmax_lse="1, 1, 128"), "softmax_lse")
NUMBERS = {"num_heads_q": "8", "num_heads_k": "1", "head_dim": "128"}
OPAQUE = Call((), NUMBERS, empty(meta_data="64, dtype=torch.int32"))
BLOCKS = Call(
    (
        "query = torch.randn(1, 8, 512, 128, dtype=torch.bfloat16)  # [B, N, S, D]",
        "key, value = (torch.randn(1, 2, 512, 128, dtype=torch.bfloat16) for _ in range(2))",
        "block_mask = torch.ones(1, 8, 4, 4, dtype=torch.int8).tril()  # by head, the visible blocks of 128 x 128",
    ),
    named("query", "key", "value", "block_mask")
    | {"block_shape": "[128, 128]", "layout": '"BNSD"', "layout_kv": '"BNSD"', "num_key_value_heads": "2"}
    | {"scale_value": "128**-0.5", "softmax_lse_flag": "1", "inner_precise": "0"},
    empty(softmax_lse="1, 8, 512, 1"),
    "out, lse",
)
BLOCKS_GRAD = Call(
    (
        *BLOCKS.setup,
        "attention_in, softmax_lse = npu_block_sparse_attention(",
        '    query, key, value, block_mask, [128, 128], q_input_layout="BNSD", kv_input_layout="BNSD",',
        "    num_key_value_heads=2, scale_value=128**-0.5, inner_precise=0,",
        ")",
        "dy = torch.randn_like(attention_in)",
    ),
    {**BLOCKS.values, **named("dy", "attention_in", "softmax_lse")},
    returns="dq, dk, dv",
)
COMPRESSED_ROWS = (
    "x = torch.randn(1, 64, 1024, dtype=torch.bfloat16)",
    "wkv, wgate = (torch.randn(256, 1024, dtype=torch.bfloat16) / 32 for _ in range(2))  # overlap: 2 * 128 rows",
    "ape = torch.zeros(4, 256)",
)
COMPRESSOR = Call(
    (
        *COMPRESSED_ROWS,
        "state_cache = torch.zeros(2, 64, 512)  # block 0 is not used",
        "state_block_table = torch.ones(1, 1, dtype=torch.int32)",
    ),
    named("x", "wkv", "wgate", "state_cache", "ape", "state_block_table")
    | {"cmp_ratio": "4", "coff": "2", "grad_enabled": "True"},
    empty(cmp_kv="1, 16, 128, dtype=torch.bfloat16", softmax_score="1, 16, 8, 128", kv="1, 16, 8, 128"),
    "cmp_kv, softmax_score, kv",
)
COMPRESSOR_GRAD = Call(
    (
        *COMPRESSED_ROWS[:2],
        "dcmp_kv = torch.randn(1, 16, 128, dtype=torch.bfloat16)",
        "softmax_score = torch.full((1, 16, 8, 128), 1 / 8)  # saved by the forward, and so is kv",
        "kv = torch.randn(1, 16, 8, 128)",
    ),
    named("x", "wkv", "wgate", "dcmp_kv", "softmax_score", "kv") | {"cmp_ratio": "4", "coff": "2"},
    empty(dape="4, 256"),
    "dx, dwkv, dwgate, dape",
)
CALLS = (  # (call, prefixes of operators' names), as in op_examples.FAMILIES
    (BLOCKS, "aclnnBlockSparseAttention npu_block_sparse_attention"),
    (BLOCKS.plus(softmax_lse_flag="True"), "cann_ops_transformer.block_sparse_attention"),
    (BLOCKS_GRAD, "aclnnBlockSparseAttentionGrad npu_block_sparse_attention_backward"),
    (BLOCKS_GRAD, "cann_ops_transformer.block_sparse_attention_grad"),
    (INDEX_OF_TOKENS, "aclnnLightningIndexerV2 cann_ops_transformer.lightning_indexer"),
    (COMPRESSOR, "aclnnCompressor"),
    (COMPRESSOR_GRAD, "aclnnCompressorGrad"),
    (SHARED_KEYS, "aclnnSparseFlashMla cann_ops_transformer.sparse_flash_mla"),
    (SHARED_KEYS_GRAD, "aclnnSparseFlashMlaGrad cann_ops_transformer.sparse_flash_mla_grad"),
    (SHARED_KEYS_L1, "aclnnSparseFlashMlaSoftmaxL1Norm cann_ops_transformer.sparse_flash_mla_softmax_l1_norm"),
    (SHARED_KEYS_METADATA, "aclnnSparseFlashMlaMetadata aclnnSparseFlashMlaGradMetadata"),
    (L1_METADATA, "aclnnSparseFlashMlaSoftmaxL1NormMetadata"),
    (OPAQUE, "aclnnSparseLightningIndexerKLLossGradMetadata aclnnDenseLightningIndexerKLLossGradMetadata"),
    (OPAQUE, "aclnnDenseLightningIndexerSoftmaxLseV2Metadata"),
    (LISTED, "aclnnSparseLightningIndexerKLLossGrad cann_ops_transformer.sparse_lightning_indexer_kl_loss_grad"),
    (DENSE, "aclnnDenseLightningIndexerKLLossGrad cann_ops_transformer.dense_lightning_indexer_kl_loss_grad"),
    (STATISTICS, "aclnnDenseLightningIndexerSoftmaxLseV2 cann_ops_transformer.dense_lightning_indexer_softmax_lse"),
)
TARGET_LOSS = """
index_q, weights = torch.randn(2, 128, 4, 32, requires_grad=True), torch.rand(2, 128, 4)
index_k = torch.randn(2, 32, 1, 32)  # a key for every four tokens
indices, _ = fa.lightning_indexer(index_q, index_k, weights, 16, ratio=4)
target = 0.7 * torch.rand(2, 128, 1, 16).softmax(-1)  # the attention's probabilities of the listed keys

loss = fa.indexer_target_loss(index_q, index_k, weights, target, indices, ratio=4) / (2 * 128)
loss.backward()
"""
