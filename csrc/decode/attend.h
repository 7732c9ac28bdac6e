// The decode kernel of a unit: partial results (maximum, sum, values) of some rows of a sequence and a few key/value
// heads for the keys of one leaf.
//
// All rows of a head share one pass over the keys, which are multiplied in the format of the cache. Scores of a tile of
// keys are computed for up to `lanes` rows at a time, then weights, then the sum of values. Values, mostly those of the
// next tile, are prefetched while scores are computed, and the next tile's keys during the rest. Non-finite results are
// detected at the end of a unit, and the rows concerned are computed again by add_row_carefully(). Start reading at
// attend(); finish_rows() merges partial results.

#pragma once

#include "dense/bias.h"
#include "simd/mask_bits.h"
#include "decode/scores.h"
#if defined(__AVX__) && !defined(__AVX512F__)
#include "decode/values_lanes8.h"
#else
#include "decode/values.h"
#endif
#include "decode/tiles.h"

namespace fusion {
namespace {
namespace decode {

// ------------------------------------------------------------------------------------------- between the two products

// Applies scales and offsets of tokens to products with quantised integers.
template <class F> void scale_scores(const DecodeWork<F> &w, std::int64_t row, const DecodeTile &t, float *scores) {
    const Floats sum = all(w.s.row_sum[w.slot(row)]);
    for (std::int64_t c = 0; c < t.count; c += lanes) {
        Floats x = load<Floats>(scores + c);
        if (t.keys.offset) x += load<Floats>(t.keys.offset + c) * sum;
        store(scores + c, x * load<Floats>(t.keys.scale + c));
    }
}

// Sets the bits of the tile's keys that are visible to a row; sets scores of all others to -inf.
template <class F> void hide_row(const DecodeWork<F> &w, std::int64_t row, const DecodeTile &t, float *scores) {
    const std::int64_t token = w.token(row);
    const Sequence &seq = w.sequences[w.seq(row)];
    const std::int64_t begin = most(first_key(seq, token), w.unit.begin), end = least(end_key(seq, token), w.unit.end);
    if (!w.p.has_blocked && begin <= t.first && t.first + t.count <= end && !w.careful) return;
    set_interval(w.s.visible, t.first, t.count, begin, end);
    if (w.p.has_blocked) clear_blocked(w.s.visible, w.o.blocked, seq, w.seq(row), w.head(row), token, t.first, t.count);
    for (std::int64_t c = 0; c < t.count; c += lanes) {
        store(scores + c, pick(lane_bits(w.s.visible, c), load<Floats>(scores + c), all(-infinity)));
    }
}

FUSION_INLINE float power(float x) { return exp2(all(x))[0]; }

FUSION_INLINE Floats weights_of(Floats scores, float peak, float factor) {
    return exp2((scores - all(peak)) * all(factor));
}

// Converts scores to weights in place; returns the largest product of a weight and the scale of its value.
template <class F>
float largest_product(const DecodeWork<F> &w, const DecodeTile &t, float *scores, float from) {
    Floats top = {};
    for (std::int64_t c = 0; c < t.count; c += lanes) {
        const Floats weights = weights_of(load<Floats>(scores + c), from, w.factor);
        store(scores + c, weights);
        const Floats x = weights * load<Floats>(t.values.scale + c);
        top = larger(top, larger(x, -x));
    }
    return largest_of(top);
}

// The largest of `count` scores, a multiple of `lanes`, from four maxima, of which none waits for another.
FUSION_INLINE float largest_score(const float *scores, std::int64_t count) {
    Floats largest[4] = {all(-infinity), all(-infinity), all(-infinity), all(-infinity)};
    std::int64_t c = 0;
    for (; c + 4 * lanes <= count; c += 4 * lanes) {
        FUSION_UNROLL for (int i = 0; i < 4; ++i) largest[i] = larger(largest[i], load<Floats>(scores + c + i * lanes));
    }
    for (; c < count; c += lanes) largest[0] = larger(largest[0], load<Floats>(scores + c));
    return largest_of(larger(larger(largest[0], largest[1]), larger(largest[2], largest[3])));
}

// Converts the scores of a row to weights relative to the score `from`, unless largest_product() has. Weights of
// quantised values are multiplied by scales of tokens and `inverse_factor`, and rounded to integers. Memory would be
// idle meanwhile, so a quarter of the next keys is prefetched, `lines` lines at each step.
template <class F>
FUSION_INLINE void weigh_row(const DecodeWork<F> &w, std::int64_t row, std::int64_t i, const DecodeTile &t,
                             float *scores, float from, float inverse_factor, LinePrefetch &keys, std::int64_t lines) {
    auto *weights = reinterpret_cast<typename F::Weight *>(w.s.weights) + i * (decode_tile / F::depth);
    const std::int64_t count = round_up<std::int64_t>(t.count, 2 * lanes);
    const bool scaled = F::integer && t.values.kind == Dequant::token;
    if (count > t.count) store(scores + t.count, all(scaled ? 0.0f : -infinity));
    Floats sum = {}, other = {}, extra = {};
    for (std::int64_t c = 0; c < count; c += 2 * lanes) {
        keys.fetch(lines);
        Floats low = load<Floats>(scores + c), high = load<Floats>(scores + c + lanes);
        if (!scaled) low = weights_of(low, from, w.factor), high = weights_of(high, from, w.factor);
        sum += low;
        other += high;
        if (scaled) {
            low *= load<Floats>(t.values.scale + c);
            high = c + lanes < t.count ? high * load<Floats>(t.values.scale + c + lanes) : Floats{};
            if (t.values.offset) {
                extra += low * load<Floats>(t.values.offset + c);
                if (c + lanes < t.count) extra += high * load<Floats>(t.values.offset + c + lanes);
            }
        }
        if constexpr (F::integer) low *= all(inverse_factor), high *= all(inverse_factor);
        F::store_elements(weights, c, low, high);
    }
    float *const state = w.state(row), fade = w.s.fade[i];
    state[1] = state[1] * fade + sum_of(sum + other);
    if (scaled && t.values.offset) state[2] = state[2] * fade + sum_of(extra);
}

// Converts scores to weights relative to each row's largest score so far; `fade` is the factor of a row's earlier sums.
// Weights of quantised values are rounded to integers in units of `factor`. The powers that precede a row's weights are
// computed in one vector for all rows, because each is a chain of dependent operations.
template <class F>
__attribute__((noinline)) void weigh_rows(const DecodeWork<F> &w, std::int64_t row, std::int64_t rows,
                                          const DecodeTile &t, float *scores, LinePrefetch &keys, std::int64_t lines) {
    const bool scaled = F::integer && t.values.kind == Dequant::token;
    float from[2 * lanes], inverse_factor[2 * lanes] = {}, *const fade = w.s.fade, *const factor = w.s.factor;
    for (std::int64_t i = 0; i < rows; ++i) {
        float &largest = w.state(row + i)[0];
        const float before = largest, score = largest_score(scores + i * decode_tile, t.count);
        largest = most(before, score);
        from[i] = largest == -infinity ? 0.0f : largest;
        fade[i] = largest == before ? 0.0f : before - largest;
        if constexpr (F::integer) factor[i] = largest == score ? 0.0f : score - from[i];
    }
    for (std::int64_t i = 0; i < rows; i += lanes) {  // lanes after the last row have no meaning
        store(fade + i, exp2(load<Floats>(fade + i) * all(w.factor)));
        if constexpr (F::integer) {
            Floats top = exp2(load<Floats>(factor + i) * all(w.factor));
            for (std::int64_t r = i; scaled && r < least<std::int64_t>(rows, i + lanes); ++r)
                top[r - i] = largest_product(w, t, scores + r * decode_tile, from[r]);
            const Floats most_weight = all(F::most_weight);
            store(factor + i, top / most_weight);
            store(inverse_factor + i, top > most_weight * 3e-39f ? most_weight / top : Floats{});
        }
    }
    for (std::int64_t i = 0; i < rows; ++i) {
        weigh_row(w, row + i, i, t, scores + i * decode_tile, from[i], inverse_factor[i], keys, lines);
    }
}

// ------------------------------------------------------------------------------------------------------------- values

// Adds weighted values to rows [i, i + M) of a block, N vectors of columns from column `d` on.
template <class F, int M, int N>
__attribute__((noinline)) void add_values(const DecodeWork<F> &w, std::int64_t row, std::int64_t i, const DecodeTile &t,
                                          std::int64_t d, LinePrefetch &ahead) {
    typename F::Sum sum[M][N] = {};
    const auto *weights = reinterpret_cast<const typename F::Weight *>(w.s.weights) + i * (decode_tile / F::depth);
    add_columns<F>(w, row, t, weights, F::bytes(d), ahead, sum);
    const std::int64_t rows = w.rows() - row, stride = w.stride;
    float *out = w.out(row) + d;
    FUSION_UNROLL for (int m = 0; m < M; ++m, out += stride) {
        if (m >= rows) break;
        const Floats fade = all(w.s.fade[i + m]), factor = all(w.s.factor[i + m]);
        FUSION_UNROLL for (int n = 0; n < N; ++n) {
            Floats added;
            if constexpr (F::integer) {
                added = F::total(sum[m][n]) * factor;
            } else {
                added = sum[m][n];
            }
            store(out + n * lanes, load<Floats>(out + n * lanes) * fade + added);
        }
    }
}

template <class F, int M>
void value_columns(const DecodeWork<F> &w, std::int64_t row, std::int64_t i, const DecodeTile &t, LinePrefetch &ahead) {
    std::int64_t d = 0;
    if constexpr (M * sizeof(typename F::Sum) <= (lanes == 16 ? 6 : 2) * sizeof(Floats) && lanes >= 8) {
        for (; d + 4 * lanes <= w.sizes.columns; d += 4 * lanes) add_values<F, M, 4>(w, row, i, t, d, ahead);
    }
    for (; d < w.sizes.columns; d += column_unit) add_values<F, M, 2>(w, row, i, t, d, ahead);
}

template <class F>
void value_block(const DecodeWork<F> &w, const RowBlock &b, const DecodeTile &t, LinePrefetch ahead) {
    constexpr int together = sizeof(typename F::Sum) == sizeof(Floats) ? value_rows : 4;
    for (std::int64_t i = 0; i < b.rows; i += together) {
        const std::int64_t left = b.rows - i, row = b.row + i;
        if (left > 4) {
            value_columns<F, together>(w, row, i, t, ahead);
        } else if (left > 2) {
            value_columns<F, 4>(w, row, i, t, ahead);
        } else if (left > 1) {
            value_columns<F, 2>(w, row, i, t, ahead);
        } else {
            value_columns<F, 1>(w, row, i, t, ahead);
        }
        ahead = {};
    }
}

// ---------------------------------------------------------------------------------------------------------- with care

// Adds the keys of a tile to one row with non-finite elements: hidden keys are skipped, not multiplied by 0, and
// weights of visible keys are never 0.
inline void add_row_carefully(const DecodeWork<Floating> &w, std::int64_t row, const DecodeTile &t,
                              const float *scores) {
    float *state = w.state(row), *out = w.out(row), peak = state[0];
    const float before = peak, nan = __builtin_nanf("");
    for (std::int64_t c = 0; c < t.real; ++c) {
        if (scores[c] != scores[c]) peak = nan;
        if (scores[c] > peak) peak = scores[c];
    }
    state[0] = peak;
    if (peak != peak || peak == infinity) {
        state[1] = nan;
        return;
    }
    float fade = peak == before ? 1.0f : power((before - peak) * w.factor);
    if (before > -infinity) fade = most(fade, least_weight);
    for (std::int64_t d = 0; d < w.p.dim_v; ++d) out[d] *= fade;
    state[1] *= fade;
    for (std::int64_t c = 0; c < t.real; ++c) {
        if (scores[c] == -infinity) continue;  // hidden
        const float weight = power((scores[c] - peak) * w.factor);
        const float *value = reinterpret_cast<const float *>(w.s.value_rows[c]);
        for (std::int64_t d = 0; d < w.p.dim_v; ++d) {
            const bool nonfinite = value[d] - value[d] != 0.0f;
            out[d] += (nonfinite ? most(weight, least_weight) : weight) * value[d];
        }
        state[1] += weight;
    }
}

// ----------------------------------------------------------------------------------------------------- from end to end

template <class F>
__attribute__((noinline)) void finish_scores(const DecodeWork<F> &w, std::int64_t row, const DecodeTile &t,
                                             float *scores) {
    if (F::integer && t.keys.kind == Dequant::token) scale_scores(w, row, t, scores);
    const bool scaled = F::integer && scales_queries(w.p);
    if (!F::integer && w.p.has_row_scale) {
        const Floats times = all(w.row_scale(row));
        for (std::int64_t c = 0; c < t.count; c += lanes) store(scores + c, load<Floats>(scores + c) * times);
    }
    if (w.score_pass && !scaled) {
        const std::int64_t seq = w.seq(row);
        add_bias(Row{seq, w.head(row), w.token(row), t.first, t.count, scores}, w.p, w.o, w.sequences[seq]);
    }
    hide_row(w, row, t, scores);
}

inline Meaning find_meaning(const Quantised &q, const KeySpan &span, const char **rows, float *scale, float *offset) {
    if (q.kind != Dequant::token) return channel_meaning(q, span.seq, span.head);
    find_values(q.scale, span, rows, scale);
    if (q.offset.base) find_values(q.offset, span, rows, offset);
    return {q.kind, scale, q.offset.base ? offset : nullptr};
}

// Reads the tile's scales and offsets, finds its rows of ropes, and converts keys and ropes that cannot be multiplied
// in place; false if the scales are not supported.
template <class F> __attribute__((noinline)) bool load_tile(DecodeWork<F> &w, DecodeTile &t) {
    const DecodeUnit &u = w.unit;
    const std::int64_t offset = u.cache_first;
    const KeySpan span = {u.seq, w.kv_head, t.first - offset, t.count, u.begin - offset, u.end - offset};
    const auto &s = w.s;
    auto *const line = reinterpret_cast<char *>(s.line);
    t.keys = find_meaning(w.o.quantised_keys, span, s.spare_rows, s.token[0], s.token[1]);
    t.values = find_meaning(w.o.quantised_values, span, s.spare_rows, s.token[2], s.token[3]);
    if constexpr (F::integer) {
        for (const Meaning &m : {t.keys, t.values}) {
            if (m.kind != Dequant::token) continue;
            if (!all_finite(m.scale, t.count) || (m.offset && !all_finite(m.offset, t.count))) return false;
        }
        // Weights include the scales of values.
        if (!F::signed_weights && t.values.kind == Dequant::token && any_negative(t.values.scale, t.count))
            return false;
    }
    if (w.p.dim_rope) find_rows(w.o.key_ropes, span, s.rope_rows);
    if (!w.sizes.direct_keys) {
        stage_rows<F::elements>(w.keys, s.key_rows, t.count, w.p.storage, t.keys, w.p.dim_qk, w.sizes.key_words, s.keys,
                                line);
    }
    const bool direct_rope = w.sizes.direct_keys && static_cast<Storage>(w.p.dtype) == F::stored;
    if (w.p.dim_rope && !direct_rope) {
        const Meaning as_it_is = {Dequant::none, nullptr, nullptr};
        stage_rows<F::elements>(w.o.key_ropes, s.rope_rows, t.count, static_cast<Storage>(w.p.dtype), as_it_is,
                                w.p.dim_rope, w.sizes.rope_words, s.ropes, line);
    }
    return true;
}

// The order of a unit's (head, tile) pairs. If heads are adjacent in memory, all heads of a tile come first, else all
// tiles of a head, so that consecutive reads are contiguous.
struct TileOrder {
    std::int64_t first, end, tiles, heads;  // first and end: rounded to vectors of keys
    bool by_tile;

    explicit TileOrder(const DecodeUnit &u, const Cache &keys)
        : first(first_of(u)), end(u.cache_first + round_up<std::int64_t>(u.end - u.cache_first, lanes)),
          tiles((u.end - first + decode_tile - 1) / decode_tile), heads(u.heads),
          by_tile(keys.table || keys.stride_head[u.seq] < decode_tile * keys.stride_token) {}

    static std::int64_t first_of(const DecodeUnit &u) {
        return u.cache_first + (u.begin - u.cache_first) / lanes * lanes;
    }
    std::int64_t head(std::int64_t step) const { return by_tile ? step % heads : step / tiles; }
    std::int64_t key(std::int64_t step) const { return first + (by_tile ? step / heads : step % tiles) * decode_tile; }
    // True if values are prefetched during the scores of the tile before, not of their own: unless a shorter tile,
    // whose scores take too little time, often comes before a full one.
    bool early() const { return by_tile || tiles >= 8 || (end - first) % decode_tile == 0; }
};

// Finds the rows of a step, or of the first step of the next unit.
template <class F>
void find_next(DecodeWork<F> &w, const TileOrder &order, std::int64_t step, const DecodeUnit *next) {
    const DecodeUnit *u = &w.unit;
    std::int64_t head = u->head, first = u->end - 1;  // without a next step: rows that are in the cache
    if (step < order.tiles * order.heads) {
        head += order.head(step), first = order.key(step);
    } else if (next && next->begin < next->end) {
        u = next, head = u->head, first = TileOrder::first_of(*u);
    }
    const std::int64_t offset = u->cache_first;
    const KeySpan span = {u->seq, head, first - offset, decode_tile, u->begin - offset, u->end - offset};
    w.s.next_key_stride = find_rows(keys_of(*u, w.o), span, w.s.next_keys);
    w.s.next_value_stride = find_rows(values_of(*u, w.o), span, w.s.next_values);
}

template <class F> void stage_values(const DecodeWork<F> &w, const DecodeTile &t) {
    if (w.sizes.direct_values) return;
    stage_rows<8 / F::bytes(2)>(w.values, w.s.value_rows, t.count, w.p.storage, t.values, w.p.dim_v,
                                w.sizes.value_words(), w.s.values, reinterpret_cast<char *>(w.s.line));
}

#if defined(FUSION_TILES)
// Attends R rows from `row` on to a tile of keys in tile registers; prefetches so many lines at each step.
template <int R>
void attend_tiled_rows(const DecodeWork<Paired> &w, std::int64_t row, const DecodeTile &t, LinePrefetch &values,
                       std::int64_t value_lines, LinePrefetch &keys, std::int64_t key_lines) {
    score_tiles<R>(w, row, t, values, value_lines);
    for (int i = 0; i < R; ++i) finish_scores(w, row + i, t, w.s.scores + i * decode_tile);
    weigh_rows(w, row, R, t, w.s.scores, keys, 0);
    value_tiles<R>(w, row, t, keys, key_lines);
}

// attend_tile() in tile registers. Prefetches of so many bytes of each key are divided between the steps of the first
// rows.
inline void attend_tiled(const DecodeWork<Paired> &w, const DecodeTile &t, LinePrefetch values,
                         std::int64_t value_bytes, LinePrefetch keys, std::int64_t key_bytes) {
    const std::int64_t value_lines = value_bytes * tiled_rows / 64,
                       key_lines = key_bytes * decode_tile / 64 / (w.sizes.columns / (2 * lanes));
    stage_values(w, t);
    if (!one_block(w)) interleave_values(w, t);
    for (std::int64_t row = 0; row < w.rows(); row += tiled_rows) {
        if (row + tiled_rows <= w.rows()) {
            attend_tiled_rows<tiled_rows>(w, row, t, values, value_lines, keys, key_lines);
        } else {
            attend_tiled_rows<tiled_rows / 2>(w, row, t, values, value_lines, keys, key_lines);
        }
        values = keys = {};
    }
}
#endif

// early: values are prefetched a tile ahead.
template <class F> void attend_tile(const DecodeWork<F> &w, const DecodeTile &t, bool early) {
    const std::int64_t key_bytes = row_bytes(w.p.storage, w.p.dim_qk), value_bytes = row_bytes(w.p.storage, w.p.dim_v);
    const std::int64_t shared = w.keys.fragment ? 0 : w.p.shares_kv ? value_bytes / 64 * 64 : key_bytes;
    const std::int64_t met_keys = w.sizes.key_words * 4, met_values = F::bytes(w.sizes.columns);
    LinePrefetch keys(w.s.next_keys, decode_tile, w.s.next_key_stride, 0, shared, met_values);
    LinePrefetch values(early ? w.s.next_values : w.s.value_rows, early ? decode_tile : t.count,
                        early ? w.s.next_value_stride : w.s.value_stride, 0, w.values.fragment ? 0 : value_bytes,
                        met_keys);
    if (w.p.shares_kv && !w.keys.fragment) values = {w.s.next_keys, decode_tile, 0, shared, key_bytes, met_keys};
#if defined(FUSION_TILES)
    if constexpr (uses_tiles<F>) {
        const std::int64_t rest = w.p.shares_kv ? key_bytes - shared : value_bytes;
        if (w.tiled) return attend_tiled(w, t, values, rest, keys, shared);
    }
#endif
    bool scored = false;  // computed together with the previous block
    for (std::int64_t row = 0; row < w.rows(); row += lanes) {
        const RowBlock b = w.block(row);
        float *const block_scores = w.s.scores + (scored ? lanes * decode_tile : 0);
        scored = !scored && score_blocks(w, b, t, values);
        if (row == 0) stage_values(w, t);
        for (std::int64_t i = 0; i < b.rows; ++i) {
            float *const scores = block_scores + i * decode_tile;
            finish_scores(w, row + i, t, scores);
            if constexpr (std::is_same_v<F, Floating>) {
                if (w.careful) add_row_carefully(w, row + i, t, scores);
            }
        }
        if (!w.careful) {
            const std::int64_t steps = b.rows * (decode_tile / (2 * lanes));
            weigh_rows(w, row, b.rows, t, block_scores, keys, shared * decode_tile / 4 / 64 / steps);
            value_block(w, b, t, keys);
        }
        values = keys = {};
    }
}

// Reorders columns and applies scales and offsets of channels to sums of quantised integers; returns the rows, as bits,
// with non-finite results.
template <class F> std::uint64_t settle(const DecodeWork<F> &w) {
    // Floats were dequantised when they were converted.
    const Meaning v = F::integer ? channel_meaning(w.o.quantised_values, w.unit.seq, w.kv_head)
                                 : Meaning{Dequant::none, nullptr, nullptr};
    std::uint64_t nonfinite = 0;
    for (std::int64_t row = 0; row < w.rows(); ++row) {
        const float *state = w.state(row);
        const std::uint64_t bit = std::uint64_t{1} << row;
        if (state[1] - state[1] != 0.0f || state[0] == infinity) {
            nonfinite |= bit;
            continue;
        }
        Ints largest = {};
        float *out = w.out(row);
        const std::int64_t n = w.p.dim_v;
        for (std::int64_t d = 0; d < w.sizes.columns; d += column_unit) {
            Floats x[2] = {load<Floats>(out + d), load<Floats>(out + d + lanes)};
            F::order(x[0], x[1]);
            FUSION_UNROLL for (int i = 0; i < 2; ++i) {
                const std::int64_t at = d + i * lanes;
                if (v.kind == Dequant::token) x[i] += all(state[2]);
                if (v.offset) x[i] += load_floats(v.offset + at, n - at) * all(state[1]);
                if (v.scale) x[i] *= load_floats(v.scale + at, n - at);
                const Ints size = (Ints)(bits_of(x[i]) & 0x7fffffff);
                largest = size > largest ? size : largest;
                store(out + at, x[i]);
            }
        }
        if (any((Words)(largest >= 0x7f800000))) nonfinite |= bit;
    }
    return nonfinite;
}

// Computes a unit (DecodeKernels, data/variant.h).
template <class F>
DecodeNonfinite attend(const DecodeJob &job, const DecodeUnit &unit, const DecodeUnit *next, void *scratch,
                       float *partial, bool careful) {
    [[maybe_unused]] const UnitRegion<F> region{};
    DecodeWork<F> w(job, unit, scratch, partial, std::is_same_v<F, Floating> && careful);
    const bool sees = unit.begin < unit.end;
    const std::uint64_t all_rows = ~std::uint64_t{0} >> (64 - w.rows());
    DecodeNonfinite nonfinite;
    const auto lost = [&](std::int64_t head) {
        return unit.tokens ? nonfinite.rows[head] == all_rows : nonfinite.rows[head] != 0;
    };
    for (std::int64_t head = 0; head < unit.heads; ++head) {
        w.select_head(head);
        for (std::int64_t row = 0; row < w.rows(); ++row) {
            std::memset(w.state(row), 0, w.stride * 4);
            w.state(row)[0] = -infinity;
        }
        if (sees && !unit.placed) nonfinite.rows[head] = place_queries(w);
    }
    if (!sees) return nonfinite;
    const TileOrder order(unit, w.keys);
    find_next(w, order, 0, nullptr);
    for (std::int64_t step = 0; step < order.tiles * order.heads; ++step) {
        const std::int64_t head = order.head(step), first = order.key(step);
        const std::int64_t count = least<std::int64_t>(decode_tile, order.end - first);
        DecodeTile t = {first, count, least(count, unit.end - first), {}, {}};
        w.select_head(head);
        std::swap(w.s.key_rows, w.s.next_keys);
        std::swap(w.s.value_rows, w.s.next_values);
        w.s.value_stride = w.s.next_value_stride;
        if (!lost(head) && !load_tile(w, t)) nonfinite.rows[head] = all_rows;
        find_next(w, order, step + 1, next);
        if (!lost(head)) attend_tile(w, t, order.early());
    }
    for (std::int64_t head = 0; head < unit.heads; ++head) {
        w.select_head(head);
        if (!w.careful && !lost(head)) nonfinite.rows[head] |= settle(w);
    }
    return nonfinite;
}

}  // namespace decode
}  // namespace
}  // namespace fusion
