// A unit of a decode: its sizes and scratch memory, and the packing of its query rows.

#pragma once

#include "decode/operand_formats.h"
#include "decode/rows.h"
#include "simd/carve.h"

namespace fusion {
namespace {
namespace decode {

constexpr std::int64_t column_unit = 2 * lanes;  // least number of columns of values per block
constexpr int value_rows = lanes == 16 ? 8 : 4;  // most rows per block of values
constexpr std::int64_t partial_head = 16;        // floats before the values of a partial row: maximum, sum
constexpr int tiled_rows = 2 * lanes;            // most rows of a block in tile registers; the least is half of them

// True if three or four rows have loops with vectors of sixteen lanes.
#if defined(__AVX512F__)
constexpr bool has_four_row_loops = true;
#else
constexpr bool has_four_row_loops = false;
#endif

FUSION_INLINE std::int64_t partial_stride(const Problem &p) {
    return partial_head + round_up<std::int64_t>(p.dim_v, 32);
}

// True if scores are scaled, capped and biased in a separate pass: unless the scale is positive, the largest product
// does not belong to the largest score.
FUSION_INLINE bool needs_score_pass(const DecodeProblem &p) {
    return p.storage >= Storage::int8 || p.bias != Bias::none || p.has_row_scale || p.softcap > 0.0 ||
           !(p.scale > 1e-30);
}
// True if quantised rows of q include the scale, because no bias or cap is applied to scores.
FUSION_INLINE bool scales_queries(const Problem &p) { return p.bias == Bias::none && !(p.softcap > 0.0); }
FUSION_INLINE float natural_scale(const DecodeProblem &p) {
    return needs_score_pass(p) ? 1.0f : static_cast<float>(p.scale);
}

template <class F> struct DecodeSizes {  // sizes of rows in words
    bool direct_keys, direct_values;     // multiplied in place, without conversion
    std::int64_t key_words, rope_words, columns;

    explicit DecodeSizes(const DecodeProblem &p, const DecodeOperands &o, bool careful)
        : columns(round_up<std::int64_t>(p.dim_v, column_unit)) {
        constexpr int load_words = F::separate ? lanes : 4;  // least number of words per load
        const auto fits = [](std::int64_t n) { return n % (load_words * F::elements) == 0; };
        const bool same = p.storage == F::stored && !careful;
        const bool exact_words = same && fits(p.dim_qk) && fits(p.dim_rope);
        direct_keys = exact_words && !o.keys.fragment && !o.key_ropes.fragment;
        direct_values = same && p.dim_v == columns && !o.values.fragment;
        const auto words = [&](std::int64_t n) {
            const std::int64_t exact = (n + F::elements - 1) / F::elements;
            return exact_words ? exact : round_up<std::int64_t>(exact, lanes);
        };
        key_words = words(p.dim_qk);
        rope_words = words(p.dim_rope);
    }
    std::int64_t value_words() const { return F::bytes(columns) / 4; }
};

// Elements of a row of n, rounded up to vectors of words with up to eight elements.
FUSION_INLINE std::int64_t staged_elements(std::int64_t n) { return round_up<std::int64_t>(n, 8 * lanes); }

struct DecodeScratch {                        // scratch memory of a thread
    float *q;                                 // [blocks][words * lanes]; with digits, up to six times as much
    std::int32_t *start;                      // [blocks][vectors][digits][lanes]
    float *row_scale, *row_offset, *row_sum;  // [decode_slots]
    float *fade, *factor;                     // [2 * lanes]
    float *scores;                            // [2 * lanes][decode_tile]
    float *weights;                           // [lanes][decode_tile]
    std::uint8_t *visible;                    // [decode_tile / 8]
    float *line;                              // one query row, and its digits
    char *keys, *ropes, *values;              // [decode_tile] converted rows
#if defined(FUSION_TILES)
    std::uint32_t *copies, *interleaved;  // [2 * lanes] rows of keys; values of a tile (tiles.h)
#endif
    float *token[4];  // [decode_tile] scales and offsets of keys, of values
    const char **key_rows, **value_rows, **rope_rows, **spare_rows;             // [decode_tile]
    const char **next_keys, **next_values;                                      // rows of the next step
    std::int64_t next_key_stride = 0, next_value_stride = 0, value_stride = 0;  // from find_rows()
    std::size_t bytes;

    DecodeScratch(const Problem &p, void *memory) {
        Carver carver(memory);
        const std::int64_t k = staged_elements(p.dim_qk), r = staged_elements(p.dim_rope);
        const std::int64_t v = round_up<std::int64_t>(p.dim_v, 32), rows = decode_slots;
        carver.take(q, rows * (k + r));
        carver.take(start, rows * 6);
        carver.take(row_scale, rows);
        carver.take(row_offset, rows);
        carver.take(row_sum, rows);
        carver.take(fade, 2 * lanes);
        carver.take(factor, 2 * lanes);
        carver.take(scores, 2 * lanes * decode_tile);
        carver.take(weights, lanes * decode_tile);
        carver.take(visible, decode_tile / 8);
        carver.take(line, most(3 * (k + r), v));
        carver.take(keys, decode_tile * k * 4);
        carver.take(ropes, decode_tile * r * 4);
        carver.take(values, decode_tile * v * 4);
#if defined(FUSION_TILES)
        carver.take(copies, tiled_rows * most(k, r));
        carver.take(interleaved, decode_tile / 2 * v);
#endif
        for (float *&buffer : token) carver.take(buffer, decode_tile);
        for (const char ***rows : {&key_rows, &value_rows, &rope_rows, &spare_rows, &next_keys, &next_values})
            carver.take(*rows, decode_tile);
        bytes = carver.bytes();
    }
};

// The loops that multiply rows and keys.
enum class Loop {
    repeated,   // words of a key are repeated for all rows
    narrow,     // three or four rows, as pairs in vectors of half the size
    pairs,      // three or four rows of integers, as pairs in vectors with twice the words
    long_rows,  // three or four long rows of floats, each in separate vectors
    rows        // formats with `separate`: any number of rows, each in separate vectors
};

// Rows [row, row + rows) of a unit in `vectors` vectors, each with `lanes / phases` rows.
struct RowBlock {
    std::int64_t row, rows;
    Loop loop;
    int phases, vectors;
};

FUSION_INLINE const Cache &keys_of(const DecodeUnit &unit, const DecodeOperands &o) {
    return unit.tokens ? o.common_keys : o.keys;
}
FUSION_INLINE const Cache &values_of(const DecodeUnit &unit, const DecodeOperands &o) {
    return unit.tokens ? o.common_values : o.values;
}

// True if a unit's rows are multiplied in tile registers. Rows of common keys are not, because their bits do not depend
// on the number of rows.
template <class F> bool fits_tiles(const DecodeJob &job, const DecodeUnit &unit) {
    const DecodeSizes<F> sizes(*job.problem, *job.operands, false);
    return uses_tiles<F> && !unit.tokens && (unit.row1 - unit.row0) % (tiled_rows / 2) == 0 &&
           (sizes.key_words | sizes.rope_words) % lanes == 0;
}

template <class F> struct DecodeWork {  // a unit with its parameters and scratch, and its current head
    const DecodeProblem &p;
    const DecodeOperands &o;
    const Sequence *const sequences;
    const DecodeUnit &unit;
    const Cache &keys, &values;
    DecodeScratch s;
    float *const partial;  // [heads][rows][partial_stride]
    const std::int64_t group, stride;
    std::int64_t selected = 0, kv_head;
    const bool careful;
    const DecodeSizes<F> sizes;
    const bool score_pass;
    const float natural, factor;  // from stored scores to scores of the problem, and to exponents of 2
    const bool tiled;             // multiplied in tile registers

    DecodeWork(const DecodeJob &job, const DecodeUnit &unit_, void *scratch, float *partial_, bool careful_)
        : p(*job.problem), o(*job.operands), sequences(job.sequences), unit(unit_), keys(keys_of(unit_, o)),
          values(values_of(unit_, o)), s(p, scratch), partial(partial_), group(p.heads_q / p.heads_kv),
          stride(partial_stride(p)), kv_head(unit_.head), careful(careful_), sizes(p, o, careful_),
          score_pass(needs_score_pass(p)), natural(natural_scale(p)), factor(natural * log2_e),
          tiled(!careful && fits_tiles<F>(job, unit_)) {}

    std::int64_t rows() const { return unit.row1 - unit.row0; }
    std::int64_t token(std::int64_t row) const {
        const std::int64_t token = (unit.row0 + row) / group;
        return unit.tokens ? unit.tokens[token].token : token;
    }
    std::int64_t seq(std::int64_t row) const {
        return unit.tokens ? unit.tokens[(unit.row0 + row) / group].seq : unit.seq;
    }
    float row_scale(std::int64_t row) const {
        return p.has_row_scale ? *row_of<const float>(o.row_scale, seq(row), head(row), token(row)) : 1.0f;
    }
    std::int64_t head(std::int64_t row) const { return kv_head * group + (unit.row0 + row) % group; }
    float *state(std::int64_t row) const { return partial + (selected * rows() + row) * stride; }  // maximum, sum
    float *out(std::int64_t row) const { return state(row) + partial_head; }
    std::int64_t slot(std::int64_t row) const { return selected * slots_of(rows()) + row; }
    void select_head(std::int64_t head) { selected = head, kv_head = unit.head + head; }

    RowBlock block(std::int64_t row) const {
        const std::int64_t count = least<std::int64_t>(lanes, rows() - row);
        if (F::separate) {
            const std::int64_t multiple = count > 8 ? 4 : count > 4 ? 2 : 1;
            const auto vectors = static_cast<int>(round_up(count, multiple));
            return {row, count, Loop::rows, lanes, vectors};
        }
        // lanes / rows phases, but one with common keys, where rows of other sequences would change the number.
        int phases = unit.tokens || tiled ? 1 : lanes;
        while (phases > 1 && lanes / phases < count) phases /= 2;
        while (phases > 1 && (sizes.key_words % phases || sizes.rope_words % phases)) phases /= 2;
        const bool four = has_four_row_loops && phases == 4;
        if (four && F::integer && sizes.key_words % 8 == 0) return {row, count, Loop::pairs, 8, 2};
        // For long rows of floats, separate vectors save more than the sum over their lanes costs.
        const bool long_rows = F::depth == 1 && sizes.key_words >= 4 * lanes;
        const bool full_vectors = (sizes.key_words | sizes.rope_words) % lanes == 0;
        if (four && long_rows && full_vectors) return {row, count, Loop::long_rows, 16, 4};
        return {row, count, four && !F::integer ? Loop::narrow : Loop::repeated, phases, 1};
    }
    Words *query(std::int64_t row) const {
        const std::int64_t size = staged_elements(p.dim_qk) + staged_elements(p.dim_rope);
        return reinterpret_cast<Words *>(s.q + slot(row) * size);
    }
    Ints *start(std::int64_t row) const { return reinterpret_cast<Ints *>(s.start + slot(row) * 6); }
};

struct DecodeTile {  // keys [first, first + count) of a unit, rounded up to vectors; `real` of them before its end
    std::int64_t first, count, real;
    Meaning keys, values;
};

// ------------------------------------------------------------------------------------------------------------ queries

inline void load_query(Dtype dtype, const Rows &rows, std::int64_t b, std::int64_t head, std::int64_t token,
                       std::int64_t n, float *to) {
    const std::int64_t at = rows.address[b] + head * rows.stride_head[b] + token * rows.stride_token;
    const char *row = static_cast<const char *>(rows.base) + at * (dtype == Dtype::float32 ? 4 : 2);
    widen_row(static_cast<Storage>(dtype), row, n, to);
}

// The position of word c of row i of a block in packed queries.
FUSION_INLINE std::int64_t place_of(std::int64_t c, std::int64_t i, const RowBlock &b) {
    const int shift = __builtin_ctz(b.phases);  // a power of two
    return (c >> shift) * b.vectors * lanes + (i << shift) + (c & (b.phases - 1));
}

template <class F> void place_floats(const DecodeWork<F> &w, const RowBlock &b, std::int64_t i) {
    constexpr int word = F::elements;
    const std::int64_t words = w.sizes.key_words + w.sizes.rope_words, ropes = w.sizes.key_words * word;
    float *line = w.s.line;
    std::memset(line, 0, words * word * 4);
    const std::int64_t seq = w.seq(b.row + i);
    load_query(w.p.dtype, w.o.q, seq, w.head(b.row + i), w.token(b.row + i), w.p.dim_qk, line);
    if (w.p.dim_rope) {
        load_query(w.p.dtype, w.o.q_rope, seq, w.head(b.row + i), w.token(b.row + i), w.p.dim_rope, line + ropes);
    }
    auto *to = reinterpret_cast<std::uint32_t *>(w.query(b.row));
    if constexpr (F::separate) {
        constexpr std::int64_t step = word * lanes;
        for (std::int64_t d = 0; d < words * word; ++d) {
            std::memcpy(to + (d / step * b.vectors + i) * step + F::place(d % step), line + d, 4);
        }
        return;
    }
    for (std::int64_t c = 0; c < words; ++c) {
        std::uint32_t bits[word];
        std::memcpy(bits, line + c * word, sizeof bits);
        to[place_of(c, i, b)] = word == 1 ? bits[0] : bits[0] >> 16 | (bits[word - 1] & 0xffff0000u);
    }
}

// Rounds a row to numbers of 16 or 24 bits and packs their one, two or three digits; false if the row is not finite.
template <class F> bool place_digits(const DecodeWork<F> &w, const RowBlock &b, std::int64_t i) {
    using Digit = typename F::Digit;
    constexpr int word = F::elements, parts = F::parts, digits = F::digits;
    constexpr int bits = 8 * sizeof(Digit), together = 4 / sizeof(Digit);
    const std::int64_t row = b.row + i, n = w.p.dim_qk, size = round_up<std::int64_t>(w.sizes.key_words * word, lanes);
    const Meaning k = channel_meaning(w.o.quantised_keys, w.unit.seq, w.kv_head);
    float *line = w.s.line;
    std::memset(line, 0, size * 4);
    load_query(w.p.dtype, w.o.q, w.seq(row), w.head(row), w.token(row), n, line);
    Floats plus = {}, sum = {}, top = {}, nonfinite = {};
    for (std::int64_t d = 0; d < n; d += lanes) {
        Floats x = load<Floats>(line + d);
        if (k.scale) x *= load_floats(k.scale + d, n - d);
        if (k.offset) plus += x * load_floats(k.offset + d, n - d);
        sum += x;
        nonfinite += x - x;
        top = larger(top, larger(x, -x));
        store(line + d, x);
    }
    const float total = sum_of(sum), added = sum_of(plus);
    if (!(sum_of(nonfinite) == 0.0f) || total - total != 0.0f || added - added != 0.0f) {
        w.s.row_scale[w.slot(row)] = w.s.row_offset[w.slot(row)] = w.s.row_sum[w.slot(row)] = 0.0f;
        return false;
    }
    // Limits so that digits fit into signed bytes (for 24 bits with a margin for rounding) and sums into 32 bits.
    const float limit = digits == 3 ? 8355584.0f : least(32639.0f, 2147000000.0f / static_cast<float>(F::largest * n));
    const float step = largest_of(top) / limit, inverse = step > 0.0f ? 1.0f / step : 0.0f;
    const float multiplier = inverse - inverse == 0.0f ? inverse : 0.0f;  // rows below 1e-31 count as zeros
    const float times = (scales_queries(w.p) ? static_cast<float>(w.p.scale) : 1.0f) * w.row_scale(row);
    w.s.row_scale[w.slot(row)] = multiplier > 0.0f ? step * times * F::unit : 0.0f;
    w.s.row_offset[w.slot(row)] = added * times;
    w.s.row_sum[w.slot(row)] = total * times;
    auto *numbers = reinterpret_cast<Digit *>(line + size);  // [digits, the highest first][size]
    for (std::int64_t d = 0; d < size; d += lanes) {
        Ints number = F::rounded(load<Floats>(line + d) * multiplier);
        for (int digit = digits - 1; digit >= 0; --digit) {
            typedef Digit Digits __attribute__((vector_size(lanes * sizeof(Digit))));
            const Ints low = number << (32 - bits) >> (32 - bits);
            store(numbers + digit * size + d, __builtin_convertvector(low, Digits));
            number = (number - low) >> bits;
        }
    }
    auto *to = reinterpret_cast<std::uint32_t *>(w.query(b.row));
    for (std::int64_t c = 0; c < w.sizes.key_words; ++c) {
        const std::int64_t at = place_of(c, i, b), lane = at % lanes;
        for (int slice = 0; slice < parts; ++slice) {
            std::uint32_t *const vector = to + (at / lanes * parts + slice) * digits * lanes + lane;
            for (int digit = 0; digit < digits; ++digit) {
                Digit one[together];
                const Digit *const from = numbers + digit * size + c * word;
                if constexpr (parts == 1) std::memcpy(one, from, 4);
                for (int j = 0; j < together && parts > 1; ++j) one[j] = from[j * parts + slice];
                std::memcpy(vector + digit * lanes, one, 4);
            }
        }
    }
    return true;
}

// Initial values of sums of digits, which compensate the offset `raised` of integers.
template <class F> void place_starts(const DecodeWork<F> &w, const RowBlock &b) {
    const Words raised = all(static_cast<std::uint32_t>(F::raised) * 0x01010101u);
    for (int vector = 0; vector < b.vectors; ++vector) {
        const Words *q = w.query(b.row) + vector * F::parts * F::digits;
        Ints sum[F::digits] = {};
        for (std::int64_t c = 0; c < w.sizes.key_words; c += b.phases, q += b.vectors * F::parts * F::digits) {
            for (int at = 0; at < F::parts * F::digits; ++at) {
                sum[at % F::digits] = F::dot(sum[at % F::digits], raised, load<Words>(q + at));
            }
        }
        for (int digit = 0; digit < F::digits; ++digit) {
            const std::int32_t rounding = digit + 1 == F::digits ? F::rounding : 0;
            store(w.start(b.row) + vector * F::digits + digit, all(rounding) - sum[digit]);
        }
    }
}

// Packs all query rows; returns those that are not finite and cannot be packed, as bits.
template <class F> __attribute__((noinline)) std::uint64_t place_queries(const DecodeWork<F> &w) {
    std::uint64_t nonfinite = 0;
    for (std::int64_t row = 0; row < w.rows(); row += lanes) {
        const RowBlock b = w.block(row);
        const std::int64_t words = (w.sizes.key_words + w.sizes.rope_words) * (lanes / b.phases) * b.vectors;
        std::memset(static_cast<void *>(w.query(row)), 0, words * F::parts * F::digits * 4);
        for (std::int64_t i = 0; i < b.rows; ++i) {
            if constexpr (F::integer) {
                if (!place_digits(w, b, i)) nonfinite |= std::uint64_t{1} << (row + i);
            } else {
                place_floats(w, b, i);
            }
        }
        if constexpr (F::integer && !F::separate) place_starts(w, b);
    }
    return nonfinite;
}

}  // namespace decode
}  // namespace
}  // namespace fusion
