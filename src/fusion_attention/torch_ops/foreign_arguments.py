"""TypeErrors for parameter names of other attention libraries, with the equivalent parameter here.

docs/coming_from.md has more, with examples.
"""

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

_PACKED = 'layout="TND" with q_len={} (lengths, not ends)'
_FLEX = "fusion_attention.integrations.flex_attention takes it"
_NEEDLESS = "leave it out: {}"

# From another library's parameter name to the equivalent here.
_WORDS = {
    "is_causal": 'band=Band.causal(align="start"): torch aligns the diagonal to the first key',
    "causal": "band=Band.causal(): the diagonal ends at the last key, as flash-attn's",
    "attn_mask": "blocked=~attn_mask (here true removes a score), or bias=attn_mask where it holds floats",
    "attention_mask": "where 1 keeps a key: blocked=(attention_mask == 0)[:, None, None, :], or "
    "kv_len=attention_mask.sum(-1) where padding comes last",
    "key_padding_mask": "blocked=key_padding_mask[:, None, None, :] (true removes a key in both)",
    "atten_mask": "blocked=atten_mask, or a sparse_mode, which needs no mask",
    "mask": "blocked=, where true removes a score, or band=",
    "attn_bias": 'bias=, or band= and layout="TND" with q_len= for masks and blocks of sequences',
    "dropout_p": "keep_prob=1 - dropout_p",
    "dropout": "keep_prob=1 - dropout",
    "p": "keep_prob=1 - p",
    "softmax_scale": "scale=",
    "sm_scale": "scale=",
    "scaling": "scale=",
    "scale_value": "scale=",
    "score_mod": f"bias=, alibi_slopes= or a sink=, where it is one; {_FLEX}",
    "block_mask": f"band=, or blocked_tiles= and blocked_bits= where it is no interval; {_FLEX}",
    "kernel_options": _NEEDLESS.format("tiles follow from the problem and the machine"),
    "return_aux": "return_lse=True",
    "op": "backend=",
    "enable_gqa": _NEEDLESS.format("heads share keys wherever q has a multiple of k's"),
    "window_size": "band=Band.window(left, right), with 2**31 - 1 where window_size has -1",
    "sliding_window": "band=Band.window(sliding_window - 1, 0): the row's own key is not counted",
    "cu_seqlens": _PACKED.format("cu_seqlens.diff()"),
    "cu_seqlens_q": _PACKED.format("cu_seqlens_q.diff()"),
    "cu_seqlens_k": _PACKED.format("cu_seqlens_q.diff(), kv_len=cu_seqlens_k.diff()"),
    "cu_seq_q": _PACKED.format("cu_seq_q.diff()"),
    "cu_seq_k": _PACKED.format("cu_seq_q.diff(), kv_len=cu_seq_k.diff()"),
    "max_seqlen_q": _NEEDLESS.format("q_len says it"),
    "max_seqlen_k": _NEEDLESS.format("kv_len says it"),
    "max_q": _NEEDLESS.format("q_len says it"),
    "max_k": _NEEDLESS.format("kv_len says it"),
    "seqused_k": "kv_len=seqused_k",
    "cache_seqlens": "kv_len=cache_seqlens, or decode_attention() with a PagedKVCache",
    "block_table": "decode_attention() with a PagedKVCache",
    "k_cache": "k=, or decode_attention() with a PagedKVCache",
    "v_cache": "v=, or decode_attention() with a PagedKVCache",
    "deterministic": _NEEDLESS.format("results and gradients are the same bits at every call"),
    "return_attn_probs": "return_lse=True; probabilities are not kept",
    "return_softmax_lse": "return_lse=True",
    "return_softmax": "return_lse=True; probabilities are not kept",
    "need_weights": "return_lse=True; probabilities are not kept",
    "s_aux": "sink=",
    "sinks": "sink=",
    "learnable_sink": "sink=",
    "logits_soft_cap": "softcap=",
    "soft_cap": "softcap=",
    "tensor_layout": 'layout="BNSD" for [B, N, S, D]',
    "input_layout": "layout=",
    "qkv_format": 'layout="BSND" for "bshd", "TND" for "thd"',
    "head_num": "heads=, for layouts BSH and SBH alone",
    "num_heads": "heads=, for layouts BSH and SBH alone",
    "pse": "bias=, or alibi_slopes=",
    "actual_seq_qlen": "q_len=: lengths, not cumulative ends",
    "actual_seq_kvlen": "kv_len=: lengths, not cumulative ends",
    "query": "the first argument, or q=",
    "key": "the second argument, or k=",
    "value": "the third argument, or v=",
}


def refuse(function: Callable[..., Any], words: Iterable[str]) -> NoReturn:
    """Raises TypeError with a line of advice for each of the keywords `words`, which a function does not have."""
    raise TypeError("\n".join(_line(function, word) for word in words))


def _line(function: Callable[..., Any], word: str) -> str:
    hint = _WORDS.get(word)
    if hint is None:
        near = difflib.get_close_matches(word, inspect.signature(function).parameters, 1)
        hint = f"did you mean {near[0]}=?" if near else "help(fusion_attention.attention) lists its parameters"
        return f"{function.__name__}: {word}: no parameter of this function ({hint})"
    return f"{function.__name__}: {word}: another library's word; here: {hint}"
