"""Which names speak of sizes that vary from call to call, and which tensors have such a size as their first.

A name alone convicts only where it is unmistakable in this field (num_tokens, seqlen_q, bsz). Everything else is
taken to stay: hidden sizes, heads, strides, blocks, pages, whatever has `max` in it.
"""

from __future__ import annotations

import re

from .values import BATCH_BITS, COUNT_BITS, UNKNOWN, Value, count, feature

#: What is counted.
_THINGS = {
    "token", "tokens", "tok", "toks", "row", "rows", "req", "reqs", "request", "requests", "seq", "seqs", "sequence",
    "sequences", "query", "queries", "prefill", "prefills", "decode", "decodes", "batch", "batches", "sample",
    "samples", "prompts", "slots", "logits",
}  # fmt: skip
#: What says that it is a count.
_COUNTING = {"num", "n", "nr", "total", "actual", "valid", "padded", "nums", "count"}
#: Whole names that need nothing else.
_WHOLE = {
    "tokens", "ntokens", "nrows", "rows", "batch_size", "bs", "bsz", "batch", "nnz", "seqlen", "seq_len", "q_len",
    "query_len", "context_len", "kv_len", "k_len", "total_q", "total_k", "seqlen_q", "seqlen_k", "seqlens_q",
    "max_seqlen", "max_seqlen_q", "max_seqlen_k", "max_query_len", "max_seq_len", "max_q_len", "max_kv_len",
}  # fmt: skip
_LETTERS = {"M", "T", "EM"}  # tokens, tokens, padded tokens: rows of an activation in this field's kernels
_ROUNDED = {"aligned", "padded", "total", "tma", "num", "n"}
#: With one of these it is something else: a limit, a block, an id, a property of the model.
_NEVER = {
    "max", "min", "per", "block", "blocks", "tile", "tiles", "chunk", "chunks", "group", "groups", "stride",
    "strides", "config", "cfg", "speculative", "spec", "draft", "vocab", "hidden", "head", "heads", "dim", "dims",
    "ptr", "ptrs", "dtype", "type", "is", "has", "use", "enable", "capacity", "limit", "budget", "page", "pages",
    "id", "idx", "index", "offset", "start", "end", "loc", "cu", "mask", "scale", "name", "cache", "world", "rank",
    "expert", "experts", "layer", "layers", "stages", "warps", "split", "splits", "pad", "bos", "eos", "special",
    "step", "factor", "ratio", "size", "width", "new", "extra", "shared", "image", "lookahead", "bytes", "bits",
    "log2", "ids", "indices", "lens", "mapping", "map", "list", "tensor", "gpu", "cpu", "sm", "sms", "programs",
    "grid", "kvcache",
}  # fmt: skip
_FEATURES = {
    "hidden", "hidden_size", "hidden_dim", "dim", "d", "D", "d_model", "head_dim", "head_size", "headdim",
    "intermediate_size", "n_cols", "num_cols", "cols", "vocab_size", "N", "K", "width", "feature_dim", "chunk_size",
    "block_size", "page_size", "group_size",
}  # fmt: skip
#: Sizes that stay, by what they are called; among them letters that mean heads, experts and widths here.
_FIXED_SIZES = {
    "dim", "dims", "head", "heads", "expert", "experts", "groups", "ngroups", "hidden", "vocab", "layers", "max",
    "rank", "nheads", "channels",
}  # fmt: skip
_FIXED_LETTERS = {"H", "HV", "HK", "HQ", "E", "D", "d", "h", "hv"}
#: Middle sizes of a tensor with three or more: [batch, heads, n, d], [B, T, H, D].
MIDDLE = {"M", "T", "L", "S", "n", "t", "l", "s"}
_REQUESTS = {
    "req", "reqs", "request", "requests", "seq", "seqs", "sequence", "sequences", "batch", "batches", "bs", "bsz",
}  # fmt: skip

#: Tensors whose first size follows the tokens or the batch.
_ACTIVATIONS = {
    "x", "xs", "a", "q", "k", "v", "o", "y", "z", "u", "c", "dt", "hidden", "input", "inputs", "inp", "out", "outs",
    "output", "outputs", "query", "queries", "key", "keys", "value", "values", "attn", "qkv", "logits", "ids",
    "indices", "positions", "pos", "tokens", "token", "residual", "act", "acts", "activation", "activations", "lens",
    "lengths", "seqlens", "topk", "probs", "scores", "gates", "gating", "sorted", "mixed", "dout", "slot", "indptr",
    "loc", "lse", "seqused", "requests", "reqs",
}  # fmt: skip
#: Tensors that belong to the model or to a pool, whatever else their name says.
_FIXED = {
    "weight", "weights", "w", "w1", "w2", "w3", "w13", "wq", "wk", "wv", "wo", "qweight", "qzeros", "cache",
    "caches", "table", "tables", "bias", "lora", "stacked", "pool", "state", "states", "buffer", "buffers", "emb",
    "embedding", "norm", "gamma", "freqs", "cos", "sin", "map", "page", "pages", "block", "blocks", "sinks", "sink",
    "zeros", "zp", "perm", "scale", "scales", "workspace", "b", "bs", "mat", "config", "codebook", "centroids",
    "param", "params", "ref", "strides", "max", "mem", "mems", "log", "eos", "bos", "stop",
}  # fmt: skip
#: These say activation even beside a word of _FIXED: hidden_states, topk_weights, slot_mapping, block_ids.
_STRONG = {"hidden_states", "topk_weights", "slot_mapping", "router_logits", "routing_weights", "sorted_token_ids"}
#: Activations whose other sizes are small, so that a product with them need not be a multiple of 16.
_NARROW = {
    "ids", "indices", "topk", "positions", "pos", "lens", "lengths", "seqlens", "indptr", "mapping", "probs", "loc",
    "weights", "scores", "tokens", "token", "slot", "lse",
}  # fmt: skip


def words(name: str) -> list[str]:
    """
    >>> words("seqlens_q"), words("numTokens"), words("w13_scale")
    (['seqlens', 'q'], ['num', 'tokens'], ['w13', 'scale'])
    """
    return [part.lower() for part in re.sub(r"([a-z])([A-Z])", r"\1_\2", name).split("_") if part]


def is_count(name: str) -> bool:
    """Whether a number of that name varies from call to call.

    >>> [is_count(name) for name in ("num_tokens", "M", "tma_aligned_T", "seqlen_q", "num_valid_tokens")]
    [True, True, True, True, True]
    >>> [is_count(name) for name in ("max_num_tokens", "N", "BLOCK_M", "num_tokens_per_block", "block_T", "row_stride")]
    [False, False, False, False, False, False]
    """
    if name in _WHOLE or name in _LETTERS:
        return True
    parts = words(name)
    if _NEVER & set(parts):
        return False
    letters = [part for part in name.split("_") if part in _LETTERS]
    if letters and _ROUNDED & set(parts):
        return True
    return bool(_COUNTING & set(parts)) and bool(_THINGS & set(parts))


def is_requests(name: str) -> bool:
    """Whether it counts requests, of which there are far fewer than tokens."""
    return bool(_REQUESTS & set(words(name)))


def is_feature(name: str) -> bool:
    """Whether a number of that name is a width of the model: it stays, and is a multiple of 16."""
    return name in _FEATURES


def is_fixed(name: str) -> bool:
    """Whether a size of that name stays even where it is the first of an activation (heads first, features first).

    >>> [is_fixed(name) for name in ("num_experts", "dim", "max_num_reqs", "H", "num_tokens", "max_seqlen", "stride_h")]
    [True, True, True, True, False, False, False]
    """
    parts = set(words(name))
    if name in _WHOLE or "stride" in parts:
        return False
    return name.strip("_") in _FIXED_LETTERS or bool(parts & _FIXED_SIZES)


def is_activation(name: str) -> bool:
    """Whether the first size of a tensor of that name follows the tokens.

    >>> [is_activation(name) for name in ("x", "hidden_states", "topk_ids", "A", "q_nope", "sorted_token_ids")]
    [True, True, True, True, True, True]
    >>> [is_activation(name) for name in ("w13", "kv_cache", "block_table", "B", "weight_scale", "lora_a", "foo")]
    [False, False, False, False, False, False, False]
    """
    if any(strong in name for strong in _STRONG):
        return True
    parts = set(words(name))
    return bool(parts & _ACTIVATIONS) and not parts & _FIXED


def is_of_weights(function: str) -> bool:
    """Whether a function of that name works on the model's weights, whatever it calls its arguments.

    >>> is_of_weights("weight_dequant"), is_of_weights("fused_topk_weights"), is_of_weights("quantize")
    (True, False, False)
    """
    parts = set(words(function))
    return bool(parts & {"weight", "weights"}) and not parts & {"topk", "routing", "router"}


def is_narrow(name: str) -> bool:
    return bool(set(words(name)) & _NARROW)


def by_name(name: str, because: str, letters: bool = False) -> Value:
    """What a number's name alone says; `letters`: whether M and T may speak too, as they do among arguments."""
    if is_count(name) and (letters or name not in _LETTERS):
        return count(because, BATCH_BITS if is_requests(name) else COUNT_BITS)
    if is_feature(name) or name.startswith(("BLOCK", "block_size")):
        return feature()
    return UNKNOWN
