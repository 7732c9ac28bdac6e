"""Device functions that find the keys of a query row: a list of selected keys, or a band plus compressed keys.

An entry of a list is the number of a block of BLOCK keys: slot n of the list is key n % BLOCK of the block in entry n
// BLOCK. Loops run over slots and load a slot's key number one iteration ahead, so that the key's elements can be
loaded ahead too. Listed keys outside the row's band, the interval of keys that it sees, are not read.

With compressed keys (each represents several tokens) a row has slots for keys of the band and slots for compressed
keys: those of its list, or (SELECT = 0) all visible ones.
"""

# mypy: disable-error-code="no-untyped-def"
# Annotations are for Triton, which evaluates them: tl.constexpr marks compile-time values.

import triton
import triton.language as tl

from fusion_attention.backends.triton.common import layout_index
from fusion_attention.backends.triton.common.kernels import lengths_at, rows_at

SCANNED = tl.constexpr(512)  # entries per iteration


@triton.jit
def token_at(tokens, n):
    """Returns int64 (sequence, query row in it) of token n, from `tokens`, a table [tokens, 2] of all sequences."""
    at = tokens + n.to(tl.int64) * 2
    return tl.load(at).to(tl.int64), tl.load(at + 1).to(tl.int64)


@triton.jit
def band_of(row, kv_len, lo, hi, prefix, RATIO: tl.constexpr = 1):
    """Returns int32 (first, end) of the keys that a query row sees: row + lo to before max((row + hi) // RATIO,
    prefix), clamped to 0 and kv_len, the sequence's keys. RATIO: tokens of a key; prefix: first keys, which all see."""
    first = tl.minimum(tl.maximum(row + lo, 0), kv_len)
    end = tl.minimum(tl.maximum((row + hi) // RATIO, prefix), kv_len)
    return first.to(tl.int32), tl.maximum(end, 0).to(tl.int32)


@triton.jit
def compressed_end(lengths, count, b, row, RATIO: tl.constexpr):
    """Returns int32 (row + hi) // RATIO, clamped to 0 and kv_len: the compressed keys, each of RATIO tokens, that a row
    of sequence b sees; kv_len, hi: rows 6 and 7 of `lengths`, a table [rows, count] of `count` sequences."""
    kv_len, hi = tl.load(lengths + 6 * count + b), tl.load(lengths + 7 * count + b)
    return tl.minimum(tl.maximum((row + hi) // RATIO, 0), kv_len).to(tl.int32)


@triton.jit
def list_at(indices, strides, count, b, hk, row):
    """Returns the address of the list of selected keys of a query row and key head hk in sequence b. indices: address
    of all lists; strides: table of the tensors' strides in `count` sequences."""
    first, token = rows_at(strides, count, b, hk, layout_index.INDICES, 1)
    return indices + first + row * token


@triton.jit
def slots_read(entries, end, SELECT: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the int32 number of keys that a row reads from its list at address `entries`: BLOCK times the entries
    before the first negative one, at most SELECT and ceil(end / BLOCK) entries; end: end of the visible keys."""
    most = tl.minimum((end + (BLOCK - 1)) // BLOCK, SELECT)
    for n0 in tl.range(0, most, SCANNED):
        n = n0 + tl.arange(0, SCANNED)
        entry = tl.load(entries + n, mask=n < most, other=0)
        most = tl.minimum(most, tl.min(tl.where(entry < 0, n, SELECT), 0))
    return most * BLOCK


@triton.jit
def entry_ahead(entries, n, slots, BLOCK: tl.constexpr):
    """Loads entries n // BLOCK of a list, int32 numbers of blocks of BLOCK keys; -1 for n >= slots, the keys read."""
    return tl.load(entries + n // BLOCK, mask=n < slots, other=-1)


@triton.jit
def named(entry, n, end, BLOCK: tl.constexpr):
    """Returns int32 keys entry * BLOCK + n % BLOCK, the n-th of a list whose block number for n is `entry`; a block
    after the visible keys (end: their end) is replaced by the first such block, whose keys are invisible too."""
    # An entry beyond the last block may have any value; it is limited so that the product stays behind the band.
    return tl.minimum(entry, (end + (BLOCK - 1)) // BLOCK) * BLOCK + n % BLOCK


@triton.jit
def in_band(key, first, end):
    """Returns true for keys in [first, end); the unsigned comparison also excludes keys below `first`."""
    return (key - first).to(tl.uint32, bitcast=True) < tl.maximum(end - first, 0).to(tl.uint32, bitcast=True)


@triton.jit
def key_ahead(entries, n, slots, first, end, BLOCK: tl.constexpr):
    """Returns the int32 n-th keys of the list at address `entries`, numbers of blocks of BLOCK keys; -1 for n >= slots,
    the number of keys read, and for keys outside [first, end), the visible ones."""
    key = named(entry_ahead(entries, n, slots, BLOCK), n, end, BLOCK)
    return tl.where(in_band(key, first, end), key, -1)


@triton.jit
def write_keys(keys, ids, id0, step, entries, slots, first, end, FIRST: tl.constexpr, LAST: tl.constexpr,
               LISTED: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """Writes the keys that a token reads to elements FIRST to LAST - 1 of `keys`, and id0 + key * step, their numbers
    in the sums of gradients, to those of `ids`; -1 where there is no key. Returns the end of the elements with a key.

    For n < slots, element FIRST + n gets the n-th key of the list at address `entries` (LISTED; an entry is a block of
    BLOCK keys) unless it is outside [first, end), else key first + n. N: elements per iteration.
    """
    last = tl.zeros([], tl.int32)
    for n0 in tl.range(0, LAST - FIRST, N):
        n = n0 + tl.arange(0, N)
        if LISTED:
            j = key_ahead(entries, n, slots, first, end, BLOCK)
        else:
            j = tl.where(n < slots, first + n, -1)
        there = n < LAST - FIRST
        tl.store(keys + FIRST + n, j, mask=there)
        tl.store(ids + FIRST + n, tl.where(j >= 0, id0 + j * step, -1).to(tl.int32), mask=there)
        last = tl.maximum(last, tl.max(tl.where((j >= 0) & there, FIRST + n + 1, 0), 0))
    return last


@triton.jit(do_not_specialize=["count", "first"])
def read_lists(indices, keys, ids, used, noted, strides, lengths, tokens, count: tl.int32, first: tl.int64,
               SELECT: tl.constexpr, BLOCK: tl.constexpr, RATIO: tl.constexpr, COMPRESSED: tl.constexpr,
               BAND: tl.constexpr, SLOTS: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """Writes, for each token of a chunk and key head, the keys that it reads to `keys` [tokens, heads_kv, SLOTS], their
    numbers in the sums of gradients to `ids`, -1 for none; to `used` the end of the elements with a key; to `noted` 0.

    Grid (tokens, heads_kv). indices: lists of SELECT numbers of blocks of BLOCK keys, or None (SELECT 0). With
    compressed keys (COMPRESSED: tokens of one, else 0) the first BAND elements are for keys of the band. tokens:
    (sequence, row) of each token; first: the chunk's first token. RATIO: tokens of a key. N: elements per iteration.
    """
    token_head, hk = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    b, row = token_at(tokens, first + token_head)
    token_head = token_head * tl.num_programs(1) + hk
    _, kv_len, lo, hi, prefix, _ = lengths_at(lengths, count, b)
    first_key, end = band_of(row, kv_len, lo, hi, prefix, RATIO)
    id0, step = rows_at(strides, count, b, hk, layout_index.IDS, 1)
    keys, ids = keys + token_head * SLOTS, ids + token_head * SLOTS
    entries = indices
    if SELECT:
        entries = list_at(indices, strides, count, b, hk, row)
    if COMPRESSED:
        slots = tl.minimum(tl.maximum(end - first_key, 0), BAND)
        last = write_keys(keys, ids, id0, step, entries, slots, first_key, end, 0, BAND, False, 1, N)
        id0, step = rows_at(strides, count, b, hk, layout_index.IDS_COMPRESSED, 1)
        first_key, end = first_key * 0, compressed_end(lengths, count, b, row, COMPRESSED)
        slots = tl.minimum(end, SLOTS - BAND)
        if SELECT:
            slots = slots_read(entries, end, SELECT, BLOCK)
        last = tl.maximum(last, write_keys(keys, ids, id0, step, entries, slots, first_key, end, BAND, SLOTS,
                                           SELECT > 0, BLOCK, N))  # fmt: skip
    else:
        slots = slots_read(entries, end, SELECT, BLOCK)
        last = write_keys(keys, ids, id0, step, entries, slots, first_key, end, 0, SLOTS, True, BLOCK, N)
    tl.store(used + token_head, last)
    tl.store(noted + token_head, 0)
