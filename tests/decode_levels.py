"""Levels and codes of decoding's rules restated (docs/rulings.md 15): what is not listed is meaning, and 561002."""

LIMITS = {
    ("atten_mask", "columns for every page of the table"),
    ("pse_shift", "columns for every page of the table"),
    ("antiquant_scale", "the dtype of query"),
    ("quant_scale2", "float32, or bfloat16 as query"),
    *((name, f"{name} is None") for name in ("dequant_scale1", "quant_scale1", "dequant_scale2")),
    ("query", "S1 == 1"),
    ("query", "D <= 512 or D > 768"),
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
