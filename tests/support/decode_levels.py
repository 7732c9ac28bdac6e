"""Levels and codes of decoding's rules restated (docs/rulings.md 15): what is not listed is meaning, and 561002."""

LIMITS = {
    ("atten_mask", "columns for every page of the table"),
    ("pse_shift", "columns for every page of the table"),
    ("antiquant_scale", "the dtype of query"),
    ("quant_scale2", "float32, or bfloat16 as query"),
    *((name, f"{name} is None") for name in ("dequant_scale1", "quant_scale1", "dequant_scale2")),
    ("query", "S1 == 1"),
    ("query", "D <= 512"),
    ("atten_mask", "a mask without gaps"),
    ("pse_shift", "a bias without gaps"),
    ("block_table", "a table without gaps"),
    ("attention_out", "an output without gaps"),
    *((f"antiquant_{t}", f"{t}s without gaps") for t in ("scale", "offset")),
    *(("quant_scale2", "a scale without gaps"), ("quant_offset2", "an offset without gaps")),
    ("key", "pages of at most 65536 elements per token"),
    ("query", "B <= 65536"),
    ("query", "float16 or bfloat16"),
    ("query", "query, key and value without gaps"),
    ("num_key_value_heads", "N1 <= 64 * N2"),
    ("inner_precise", "inner_precise in (0, 1)"),
    ("block_size", "at most 512, a multiple of 16 (int8: 32)"),
    ("key", "at most 256 tensors"),
    ("key", "pages [blocks, block_size, N2*D]"),
    ("key", "as many pages as all items fill"),
    ("pse_shift", "no pse_shift"),
}
NOTES = {("kv_padding_size", "left padding beside lengths, in one tensor")}
SHAPES_AND_DTYPES = {
    ("value", "the shapes of key"),
    ("key", "int8 or the dtype of query"),
    ("key", "no int8 cache"),
    ("antiquant_scale", "the dtype of query"),
    ("quant_scale2", "float32, or bfloat16 as query"),
    ("attention_out", "int8 or the dtype of query"),
    ("query", "float16 or bfloat16"),
    ("k", "int8, uint8 or the dtype of q"),
}
