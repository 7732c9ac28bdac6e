"""Lists the levels and codes of the rules of training and decoding a second time (docs/rulings.md 15).

Rules that are not listed are of level "meaning" and have the code 561002.
"""

LIMITS = {
    # decoding
    ("atten_mask", "columns for every page of the table"),
    ("pse_shift", "columns for every page of the table"),
    ("antiquant_scale", "the dtype of query"),
    ("quant_scale2", "float32, or bfloat16 as query"),
    *((name, f"{name} is None") for name in ("dequant_scale1", "quant_scale1", "dequant_scale2")),
    ("query", "S1 == 1"),
    ("query", "D <= 512"),
    ("atten_mask", "a contiguous mask"),
    ("pse_shift", "a contiguous bias"),
    ("block_table", "a contiguous table"),
    ("attention_out", "a contiguous output"),
    *((f"antiquant_{t}", "a contiguous tensor") for t in ("scale", "offset")),
    *(("quant_scale2", "a contiguous scale"), ("quant_offset2", "a contiguous offset")),
    ("key", "pages of at most 65536 elements per token"),
    ("query", "B <= 65536"),
    ("query", "float16 or bfloat16"),
    ("query", "contiguous query, key and value"),
    ("num_key_value_heads", "N1 <= 64 * N2"),
    ("inner_precise", "inner_precise in (0, 1)"),
    ("block_size", "at most 512, a multiple of 16 (int8: 32)"),
    ("key", "at most 256 tensors"),
    ("key", "pages [blocks, block_size, N2*D]"),
    ("key", "as many pages as all items fill"),
    ("pse_shift", "no pse_shift"),
    # training
    ("value", "Dv <= D"),
    ("query", "N1 <= 256"),
    ("inner_precise", "inner_precise in (0, 1, 2)"),
    ("padding_mask", "padding_mask is None"),
    ("softmax_in", "softmax_in is None"),
    ("softmax_layout", "softmax_layout == ''"),
    *(("query", t) for t in ("at most 1048576 tokens in a sequence", "at most 1048576 tokens in all sequences")),
    *(("query", t) for t in ("B <= 2097152", "D <= 512", "D % 8 == 0")),
    *((t, "at most 2048 sequences") for t in ("actual_seq_qlen", "prefix")),
    *(("prefix", f"at most {t} with prefixes") for t in ("2048 sequences", "1024 packed sequences")),
    *(("padding_mask", "uint8 or bool"), ("softmax_in", "float16 or bfloat16 or float32")),
    *(
        ("value", "value rows as long as those of key"),
        ("pse", "no pse"),
        ("atten_mask", "a mask"),
        ("query_rope", "Dr <= D and Dr % 8 == 0"),
    ),
    ("drop_mask", "drop_mask is None and keep_prob == 1"),
    ("atten_mask", "a compressed mask of two dimensions"),
    ("atten_mask", "a mask beside rope"),
    ("pre_tokens", "lengths and a window that leave every row a key"),
    ("pse", "no empty sequence"),
    ("pse", "pse is None"),
    ("query_rope", "no rope in a padded layout"),
    ("query_rope", "Dr <= D and Dr % 8 == 0 and D % 8 == 0"),
    ("query_rope", "pse is None and drop_mask is None and keep_prob == 1"),
}
CONTENT = {
    ("softmax_max", "statistics in the order of softmax_layout"),
    ("atten_mask", "a mask that agrees with pre_tokens and next_tokens"),
    ("pse", "compressed rows that are shifted copies of each other"),
}
NOTES = {
    ("kv_padding_size", "left padding beside lengths, in one tensor"),
    ("sparse_mode", "atten_mask beside a sparse_mode other than 0"),
    ("actual_seq_qlen", "no lengths in a padded layout"),
    ("atten_mask", "a mask for every sequence"),
    ("scale", "a scale"),
}
DOUBTS = {
    *((name, "sequences that take up all T1 rows of the tensor") for name in ("q_len", "actual_seq_qlen")),
    *((name, "sequences that take up all T2 rows of the tensor") for name in ("kv_len", "actual_seq_kvlen")),
    ("pse", "slopes that do not require a gradient"),
    ("q", "at most max(S1, 256) heads"),
    ("atten_mask", "the documented content of a compressed mask"),
    ("alibi_slopes", "a tensor that does not require a gradient"),
}
MISSING = {
    ("actual_seq_qlen", "actual_seq_qlen is not None"),
    ("actual_seq_kvlen", "actual_seq_kvlen is not None"),
    ("query_rope", "query_rope and key_rope, or neither"),
    *(("atten_mask", t) for t in ("a mask beside rope", "a mask")),
    ("heads", "heads > 0"),
    ("q_len", "the lengths of packed sequences"),
    ("q_rope", "q_rope and k_rope, or neither"),
}
SHAPES_AND_DTYPES = {
    ("value", "the shapes of key"),
    ("key", "int8 or the dtype of query"),
    ("key", "no int8 cache"),
    ("antiquant_scale", "the dtype of query"),
    ("quant_scale2", "float32, or bfloat16 as query"),
    ("attention_out", "int8 or the dtype of query"),
    ("query", "float16 or bfloat16"),
    ("k", "int8, uint8 or the dtype of q"),
    *(("query", "1 <= D <= 768"), ("value", "1 <= Dv <= 768"), ("value", "Dv <= D")),
    ("softmax_layout", "softmax_layout == ''"),
    *(("query", t) for t in ("D <= 512", "D % 8 == 0")),
    *(
        ("value", "value rows as long as those of key"),
        ("pse", "no pse"),
        ("padding_mask", "uint8 or bool"),
        ("softmax_in", "float16 or bfloat16 or float32"),
    ),
    ("drop_mask", "drop_mask is None and keep_prob == 1"),
    *(("q", "1 <= D <= 768"), ("v", "1 <= Dv <= 768"), ("q_rope", "1 <= Dr <= 768")),
    *(("pse", "the dtype of query"), ("pse", "float32 slopes [B, N1] or [N1]"), ("dpse", "shape and dtype of pse")),
    *(pair for pair in LIMITS if pair[0] == "query_rope"),
}
# Rules with one wording and two levels: an invalid prefix is an error in mode 6 and a note in mode 5; S1 == S2 applies
# to tables and to slopes.
BOTH = {"per sequence a prefix between max(0, kv_len - q_len) and kv_len": "note", "S1 == S2": "limit"}
