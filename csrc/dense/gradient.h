// The backward kernel of a tile of query rows and a tile of keys: five products and the softmax gradient.
//
//   S = q k^T, dP = dout v^T      by blocks of `block_rows` rows, as in the forward, so that scores have the same bits
//   P = exp(S - max) / sum, dS = P * (dP * M - D)                                M = keep / keep_prob
//   if keep_prob is tiny, all gradients are divided by keep_rest() until they are stored
//   with a cap, dq and dk use dS * (1 - tanh^2) in place of dS
//   dq += dS k                    block by block
//   dv^T += dout^T (P * M), dk^T += q^T dS            for all rows of the tile at once, one panel of keys at a time
//
// Start reading at accumulate().

#pragma once

#include "dense/gradient_bias.h"
#include "dtype_dispatch.h"
#include "simd/dropout_scale.h"
#include "simd/mask_bits.h"
#include "simd/softmax_sink_and_nan.h"

namespace fusion {
namespace {

// ------------------------------------------------------------------------------------------------ between the products

// The factors and shifts that convert scores to weights in `depth` rows of a block, from row i on.
template <class Format, bool SmallPeaks> struct RowFactors {
    static constexpr int depth = Format::depth;
    float peak[depth] = {}, inverse_sum[depth] = {}, delta[depth] = {}, shift[depth] = {};
    bool small_peak[depth] = {};
    int there;

    FUSION_INLINE RowFactors(const GradientWork<Format> &w, const GradientBlock &b, std::int64_t i)
        : there(static_cast<int>(least<std::int64_t>(depth, b.rows - i))) {
        for (int e = 0; e < there; ++e) {
            peak[e] = w.r.peak[b.row + i + e];
            inverse_sum[e] = w.r.inverse_sum[b.row + i + e];
            delta[e] = w.r.delta[b.row + i + e];
            if constexpr (Format::fused) {
                shift[e] = w.r.shift[b.row + i + e];
                small_peak[e] = SmallPeaks || (!w.wide_dbias && !w.r.large_peak[b.row + i + e]);
            }
        }
    }
};

// Computes P * M (without its divisor) and dS of a block, in the formats of the products. Hidden keys and missing rows
// are zeros (so are keys with a score of -inf if some operand is not finite). SmallPeaks: scale, maximum and sum of all
// rows enter the exponent at once; else each row decides separately, so that its bits do not depend on other rows.
template <class Format, bool Capped, bool Drops, bool Hidden, bool SmallPeaks>
void softmax_gradient(const GradientWork<Format> &w, const GradientBlock &b) {
    constexpr std::int64_t keys = tile_keys<Format>;
    constexpr int depth = Format::depth;
    // Copies, because the compiler must assume that stores may change the referenced objects.
    const KeyPart<Format> k = w.k;
    const float natural = w.natural, factor = natural * log2_e, kept_factor = keep_factor(w.p);
    const bool wants_dbias = w.g.dbias.base != nullptr;
    const std::int64_t count = b.count;
    for (std::int64_t i = 0; i < round_up<std::int64_t>(b.rows, depth * Format::step); i += depth) {
        const RowFactors<Format, SmallPeaks> r(w, b, i);
        float *const scores = k.scores + i * keys;
        const float *const dprobs = k.dprobs + i * keys;
        for (std::int64_t c = 0; c < count; c += 2 * lanes) {
            Floats p[2][depth] = {}, ds[2][depth] = {};
            FUSION_UNROLL for (int e = 0; e < depth; ++e) {
                if (e >= r.there) break;
                FUSION_UNROLL for (int u = 0; u < 2; ++u) {
                    const std::int64_t at = e * keys + c + u * lanes;
                    Floats weight = load<Floats>(scores + at);
                    const auto exact = [&] {
                        return exp2(below_peak(weight * natural, all(r.peak[e])) * log2_e) * r.inverse_sum[e];
                    };
                    if constexpr (Format::fused) {
                        weight = SmallPeaks || r.small_peak[e] ? Format::power(weight * factor - r.shift[e]) : exact();
                    } else {
                        weight = exact();
                    }
                    Floats dprob = load<Floats>(dprobs + at), retained = weight;
                    if constexpr (Drops) {
                        const std::uint32_t bits = lane_bits(k.keep + (i + e) * (keys / 8), c + u * lanes);
                        retained = pick(bits, weight, Floats{});
                        dprob = pick(bits, dprob * kept_factor, Floats{});
                    }
                    Floats dscore = weight * (dprob - r.delta[e]);
                    Floats dproduct = dscore;
                    if constexpr (Capped) dproduct *= load<Floats>(k.slopes + (i + e) * keys + c + u * lanes);
                    if constexpr (Hidden) {
                        const std::uint32_t bits = lane_bits(k.visible + (i + e) * (keys / 8), c + u * lanes);
                        retained = pick(bits, retained, Floats{});
                        dscore = pick(bits, dscore, Floats{});
                        dproduct = Capped ? pick(bits, dproduct, Floats{}) : dscore;
                    }
                    p[u][e] = retained;
                    ds[u][e] = dproduct;
                    if (wants_dbias) store(scores + at, dscore);
                }
                Format::store_elements(k.dscores + (i + e) * (keys / depth), c, ds[0][e], ds[1][e]);
            }
            const std::int64_t to = weight_at<Format>(b.row + i, b.at + c);
            Words retained[2], dscores[2];
            Format::join(p[0], p[1], retained);
            Format::join(ds[0], ds[1], dscores);
            FUSION_UNROLL for (int u = 0; u < 2; ++u) {
                store(k.prob_rows + to + u * lanes, retained[u]);
                store(k.dscore_rows + to + u * lanes, dscores[u]);
            }
        }
    }
}

template <class Format> void choose_softmax_gradient(const GradientWork<Format> &w, const GradientBlock &b) {
    const bool drops = w.p.dropout != Dropout::none;
    const auto choose = [&](auto capped, auto small_peaks) {
        if (drops && b.hidden) return softmax_gradient<Format, capped(), true, true, small_peaks()>(w, b);
        if (drops) return softmax_gradient<Format, capped(), true, false, small_peaks()>(w, b);
        if (b.hidden) return softmax_gradient<Format, capped(), false, true, small_peaks()>(w, b);
        softmax_gradient<Format, capped(), false, false, small_peaks()>(w, b);
    };
    const auto choose_capped = [&](auto small_peaks) {
        w.p.softcap > 0.0 ? choose(std::true_type{}, small_peaks) : choose(std::false_type{}, small_peaks);
    };
    if constexpr (Format::fused) {
        if (b.small_peaks) return choose_capped(std::true_type{});
    }
    choose_capped(std::false_type{});
}

// -------------------------------------------------------------------------------------------------- what is not finite

template <class Format>
float weight_of(const typename Format::Word *weights, std::int64_t row, std::int64_t at) {
    const auto *word = weights + weight_at<Format>(row, at);
    return Format::get(word, row % Format::depth);
}

// Adds the non-finite elements of a row, which packing replaced by zeros, times a weight, to every `stride`-th float
// from `to` on.
template <class T> void add_nonfinite_row(const T *row, std::int64_t n, float weight, float *to, std::int64_t stride) {
    for (std::int64_t d = 0; d < n; ++d) {
        const Floats value = load_floats(row + d, 1);
        if (any(not_finite(bits_of(value)))) to[d * stride] += value[0] * weight;
    }
}

template <class Format, class T> FUSION_RARE void add_nonfinite_keys(const GradientWork<Format> &w,
                                                                     const GradientBlock &b) {
    const std::int64_t seq = w.key_tile.seq, head = w.key_tile.head, end = w.key_tile.key1 - w.key_tile.key0;
    for (std::int64_t c = 0; c < b.count && b.at + c < end; ++c) {
        if (!w.k.nonfinite[(b.at + c) / panel]) continue;
        const std::int64_t key = w.key_tile.key0 + b.at + c;
        for (std::int64_t i = 0; i < b.rows; ++i) {
            if (!bit_of(w.k.visible + i * (w.k.keys / 8), c)) continue;
            const float weight = Format::get(w.k.dscores + i * (w.k.keys / Format::depth), c);
            float *dq = w.r.dq + (b.row + i) * w.sizes.columns;
            add_nonfinite_row(row_of<const T>(w.o.k, seq, head, key), w.p.dim_qk, weight, dq, 1);
            if (!w.p.dim_rope) continue;
            add_nonfinite_row(row_of<const T>(w.o.k_rope, seq, head, key), w.p.dim_rope, weight,
                              dq + w.sizes.main_columns, 1);
        }
    }
}

template <class Format, class T>
FUSION_RARE void add_nonfinite_rows(const GradientWork<Format> &w, const GradientBlock &b, std::int64_t i) {
    const std::int64_t seq = w.row_tile.seq, head = w.row_tile.head, row = w.row_tile.row0 + b.row + i;
    const std::int64_t end = least(b.at + b.count, w.key_tile.key1 - w.key_tile.key0);
    for (std::int64_t at = b.at; at < end; ++at) {
        if (!bit_of(w.k.visible + i * (w.k.keys / 8), at - b.at)) continue;
        const std::int64_t first = at / panel * panel, lane = at % panel;
        if (w.r.nonfinite[b.row + i] & nonfinite_q) {
            const float weight = weight_of<Format>(w.k.dscore_rows, b.row + i, at);
            float *dk = w.k.dk + first * w.sizes.columns + lane;
            add_nonfinite_row(row_of<const T>(w.o.q, seq, head, row), w.p.dim_qk, weight, dk, panel);
            if (w.p.dim_rope) {
                add_nonfinite_row(row_of<const T>(w.o.q_rope, seq, head, row), w.p.dim_rope, weight,
                                  dk + w.sizes.main_columns * panel, panel);
            }
        }
        if (w.p.dropout != Dropout::none && !bit_of(w.k.keep + i * (w.k.keys / 8), at - b.at)) continue;
        if (w.r.nonfinite[b.row + i] & nonfinite_dout) {
            const float weight = weight_of<Format>(w.k.prob_rows, b.row + i, at);
            float *dv = w.k.dv + first * w.sizes.value_columns + lane;
            add_nonfinite_row(row_of<const T>(w.g.dout, seq, head, row), w.p.dim_v, weight, dv, panel);
        }
    }
}

template <class Format, class T> FUSION_RARE void add_nonfinite(const GradientWork<Format> &w, const GradientBlock &b) {
    bool some = false;
    for (std::int64_t c = 0; c < b.count; c += panel) some |= w.k.nonfinite[(b.at + c) / panel] != 0;
    if (some) add_nonfinite_keys<Format, T>(w, b);
    for (std::int64_t i = 0; i < b.rows; ++i) {
        if (!(w.r.nonfinite[b.row + i] & (nonfinite_q | nonfinite_dout))) continue;
        begin_panels(w.sizes, w.k, b.at, static_cast<int>(b.count / panel));
        add_nonfinite_rows<Format, T>(w, b, i);
    }
}

// ----------------------------------------------------------------------------------------------------- from end to end

// The block with the visible keys of its rows in the key tile, in complete panels; count 0 if there are none.
template <class Format> GradientBlock block_of(const GradientWork<Format> &w, std::int64_t row, std::int64_t rows) {
    const std::int64_t top = w.row_tile.row0 + row, bottom = top + rows - 1, begin = w.key_tile.key0;
    std::int64_t some_begin = first_key(w.seq, top), some_end = end_key(w.seq, bottom);
    bool hidden = w.p.has_blocked;
    if (w.p.has_blocked_tiles) {
        const KeyRun run = next_run<true>(w.o, {w.row_tile.seq, w.row_tile.head, top, rows}, most(some_begin, begin),
                                          least(some_end, w.key_tile.key1));
        some_begin = run.begin, some_end = run.end, hidden |= run.partial;
    }
    const std::int64_t full_begin = first_key(w.seq, bottom), full_end = end_key(w.seq, top);
    const std::int64_t first = most(begin, some_begin / panel * panel);
    const std::int64_t last = least(begin + round_up<std::int64_t>(w.key_tile.key1 - begin, panel),
                                    round_up<std::int64_t>(most<std::int64_t>(some_end, 0), panel));
    hidden |= first < full_begin || last > full_end;
    bool small_peaks = Format::fused && !w.wide_dbias;
    std::uint8_t nonfinite = 0;
    for (std::int64_t i = 0; i < rows; ++i) {
        hidden |= w.r.empty[row + i] != 0;
        nonfinite |= w.r.nonfinite[row + i];
        if constexpr (Format::fused) small_peaks &= !w.r.large_peak[row + i];
    }
    for (std::int64_t at = first - begin; at < last - begin; at += panel) nonfinite |= w.k.nonfinite[at / panel];
    constexpr std::int64_t unit = Format::step > 1 ? panel : lanes;
    const std::int64_t from = most(first, some_begin / unit * unit);
    const std::int64_t to = least(last, round_up(most<std::int64_t>(some_end, 0), unit));
    const std::int64_t count = some_end > some_begin && last > first ? last - first : 0;
    return {row,         rows,          first - begin, count, from - begin, to - begin, hidden || nonfinite,
            small_peaks, nonfinite != 0};
}

// Extends, for each panel, the range of rows of the tile with visible keys; other rows in the range have zero weights.
template <class Format> void extend_ranges(const GradientWork<Format> &w, const GradientBlock &b) {
    constexpr std::int64_t depth = Format::depth;
    for (std::int64_t at = b.at; at < b.at + b.count; at += panel) {
        const std::int64_t key = w.key_tile.key0 + at, row0 = w.row_tile.row0;
        const std::int64_t top = w.seq.prefix > key ? 0 : key - w.seq.hi + 1 - row0,
                           bottom = key + panel - w.seq.lo - row0;
        const std::int64_t first = most(b.row, top / depth * depth), last = least(b.row + b.rows, bottom);
        if (last <= first) continue;
        std::int64_t &begin = w.k.row_begin[at / panel], &end = w.k.row_end[at / panel];
        if (begin == end) begin = end = first;
        if (const std::int64_t words = (first - end) / depth * panel) {
            const std::int64_t gap = weight_at<Format>(end, at);
            std::memset(w.k.prob_rows + gap, 0, words * sizeof *w.k.prob_rows);
            std::memset(w.k.dscore_rows + gap, 0, words * sizeof *w.k.dscore_rows);
        }
        end = round_up<std::int64_t>(last, depth);
    }
}

template <class Format> void clear_dq(const GradientWork<Format> &w, const GradientBlock &b) {
    std::memset(w.r.dq + b.row * w.sizes.columns, 0, b.rows * w.sizes.columns * sizeof *w.r.dq);
}

// True if an element of V is not finite; then dP of every row is not finite, so that one row is checked.
template <class Format> bool has_nonfinite_values(const GradientWork<Format> &w, const GradientBlock &b) {
    Words nonfinite = {};
    for (std::int64_t at = b.from; at < b.to; at += lanes)
        nonfinite |= not_finite(bits_of(load<Floats>(w.k.dprobs + at - b.at)));
    return any(nonfinite);
}

// Waits for the turn of this tile; memory that other threads add to is accessed only afterwards, and not at all if this
// returns false.
template <class Format> bool wait_for_turn(const GradientWork<Format> &w, const GradientBlock &b) {
    return !w.turn.wait || w.turn.wait(w.turn.state, b.row + b.rows);
}

template <class Format> bool accumulate_block(const GradientWork<Format> &w, GradientBlock b) {
    multiply_rows(w, b);
    if (has_nonfinite_values(w, b)) b.nonfinite = b.hidden = true;
    if (w.bias_pass) {
        for (std::int64_t i = 0; i < b.rows; ++i) {
            add_bias({w.row_tile.seq, w.row_tile.head, w.row_tile.row0 + b.row + i, w.key_tile.key0 + b.at, b.count,
                      w.k.scores + i * w.k.keys},
                     w.p, w.o, w.seq, w.p.softcap > 0.0 ? w.k.slopes + i * w.k.keys : nullptr);
        }
    }
    const BitBlock block = {w.row_tile.seq, w.row_tile.head, w.row_tile.row0 + b.row, b.rows, w.key_tile.key0 + b.at,
                            b.count,        w.k.keys / 8};
    if (b.hidden) {
        mark_seen(w.k.visible, block, w.p, w.o, w.seq);
        for (std::int64_t i = 0; i < b.rows; ++i) {
            if (w.r.empty[b.row + i]) std::memset(w.k.visible + i * block.stride, 0, block.stride);
            if (b.nonfinite) clear_unseen(w.k.visible + i * block.stride, w.k.scores + i * w.k.keys, b.count);
        }
    }
    if (w.p.dropout != Dropout::none) mark_kept(w.k.keep, block, w.p, w.o, w.seq);
    choose_softmax_gradient(w, b);
    if (const double rest = keep_rest(w.p); rest > 1.0 && w.g.dbias.base) {
        for (std::int64_t i = 0; i < b.rows; ++i) enlarge(w.k.scores + i * w.k.keys, b.count, rest);
    }
    if (!wait_for_turn(w, b)) return false;
    if (w.g.dbias.base && !w.g.owns_dbias) add_dbias(w, b);
    add_dq(w, b);
    extend_ranges(w, b);
    if (b.nonfinite) with_stored<Format>(w.p.dtype, [&](auto x) { add_nonfinite<Format, decltype(x)>(w, b); });
    return true;
}

template <class Format>
void accumulate(const Job &job, const RowTile &row_tile, const KeyTile &key_tile, const RowTurn &turn,
                const Prefetches &ahead) {
    [[maybe_unused]] const ProductRegion<Format> region;
    const std::int64_t rows = row_tile.row1 - row_tile.row0;
    const std::int64_t keys = round_up<std::int64_t>(key_tile.key1 - key_tile.key0, panel);
    PrefetchQueue queue;
    for (int i = 0; i < ahead.count; ++i) queue.add(ahead.parts[i]);
    queue.spread((rows + block_rows - 1) / block_rows * 2 * ((keys / panel + abreast - 1) / abreast));
    const GradientWork<Format> w(job, row_tile, key_tile, turn, queue);
    for (std::int64_t i = 0; i < keys / panel; ++i) w.k.row_begin[i] = w.k.row_end[i] = 0;
    for (std::int64_t row = 0; row < rows; row += block_rows) {
        const GradientBlock b = block_of(w, row, least<std::int64_t>(block_rows, rows - row));
        if (b.count) {
            if (!accumulate_block(w, b)) return;
        } else {
            if (!wait_for_turn(w, b)) return;
            if (row_tile.fresh) clear_dq(w, b);
        }
        if (turn.done) turn.done(turn.state, b.row + b.rows);
        if (w.g.owns_dbias) write_dbias(w, b);
    }
    std::int64_t at = 0;
    for (; at + abreast * panel <= keys; at += abreast * panel) add_dk_dv<Format, abreast>(w, at);
    for (; at < keys; at += panel) add_dk_dv<Format, 1>(w, at);
}

// ------------------------------------------------------------------------------------------------------------- results

// Stores two vectors of a row, of which n elements are valid.
template <class T> FUSION_INLINE void store_two(T *to, Floats low, Floats high, std::int64_t n, bool streamed) {
    if (streamed && n >= 2 * lanes && write_lines(to, low, high)) return;
    store_floats(to, low, n);
    if (n > lanes) store_floats(to + lanes, high, n - lanes);
}

template <class T> void store_row(T *to, const float *from, std::int64_t n, float factor, bool streamed) {
    std::int64_t d = 0;
    for (; d + lanes < n; d += 2 * lanes) {
        store_two(to + d, load<Floats>(from + d) * factor, load<Floats>(from + d + lanes) * factor, n - d, streamed);
    }
    if (d < n) store_floats(to + d, load<Floats>(from + d) * factor, n - d);
}

template <class Format, class Out> void store_dq_as(const Job &job, const RowTile &tile) {
    const Problem &p = *job.problem;
    const Sizes<Format> sizes(p);
    const RowPart<Format> layout(sizes, tile.row1 - tile.row0, tile.memory);
    const float scale = static_cast<float>(p.scale);
    if (tile.fresh) std::memset(layout.dq, 0, layout.padded * sizes.columns * sizeof *layout.dq);
    enlarge(layout.dq, (tile.row1 - tile.row0) * sizes.columns, keep_rest(p));
    for (std::int64_t row = tile.row0; row < tile.row1; ++row) {
        const float *dq = layout.dq + (row - tile.row0) * sizes.columns;
        store_row(row_of<Out>(job.gradients->dq, tile.seq, tile.head, row), dq, p.dim_qk, scale, job.streamed);
        if (!p.dim_rope) continue;
        store_row(row_of<Out>(job.gradients->dq_rope, tile.seq, tile.head, row), dq + sizes.main_columns, p.dim_rope,
                  scale, job.streamed);
    }
}

template <class Format, class T> void store_dq(const Job &job, const RowTile &tile) {
    job.problem->wide_results ? store_dq_as<Format, float>(job, tile) : store_dq_as<Format, T>(job, tile);
}

// With two elements per word, combines two columns into words before these are transposed; else returns false.
template <class Format, class T>
FUSION_INLINE bool columns_to_words(const float *from, float factor, Words (&words)[lanes]) {
    if constexpr (sizeof(T) == 4) {
        FUSION_UNROLL for (int i = 0; i < lanes; ++i) words[i] = bits_of(load<Floats>(from + i * panel) * factor);
        return true;
    } else if constexpr (Format::depth == 2) {
        FUSION_UNROLL for (int i = 0; i < lanes; ++i) {
            const float *const two = from + 2 * i * panel;
            words[i] = Format::join({load<Floats>(two) * factor, load<Floats>(two + panel) * factor});
        }
        return true;
    }
    (void)from, (void)factor, (void)words;
    return false;
}

// Stores a square: a vector of keys and a vector of their columns. Returns false without storing if there is no fast
// way.
template <class Format, class T>
__attribute__((noinline)) bool store_square(const float *from, T *to, std::int64_t stride, float factor,
                                            bool streamed) {
    Words words[lanes];
    if (!columns_to_words<Format, T>(from, factor, words)) return false;
    transpose(words);
    FUSION_UNROLL for (int i = 0; i < lanes; i += 4, to += 4 * stride) {
        FUSION_UNROLL for (int j = 0; j < 4; ++j) write_line(to + j * stride, words[i + j], streamed);
        __asm__("" : "+r"(to));  // else the compiler computes the addresses of all rows in advance and spills them
    }
    return true;
}

// Stores sums [panel][column][key] as rows of n elements, multiplied by a factor.
template <class Format, class T>
void store_keys(const Rows &rows, const KeyTile &tile, const float *from, std::int64_t columns, std::int64_t n,
                float factor, bool streamed) {
    constexpr std::int64_t width = lanes * 4 / sizeof(T);
    const std::int64_t count = tile.key1 - tile.key0;
    for (std::int64_t at = 0; at < count; at += lanes) {
        T *const first = row_of<T>(rows, tile.seq, tile.head, tile.key0 + at);
        const float *const block = from + at / panel * columns * panel + at % panel;
        const std::int64_t there = least<std::int64_t>(lanes, count - at);
        std::int64_t d = 0;
        for (; there == lanes && d + width <= n; d += width) {
            if (!store_square<Format>(block + d * panel, first + d, rows.stride_token, factor, streamed)) break;
        }
        for (; d < n; d += 2 * lanes) {
            Words two[2][lanes] = {};
            for (int half = 0; half < (d + lanes < n ? 2 : 1); ++half) {
                for (int i = 0; i < lanes; ++i) two[half][i] = load<Words>(block + (d + half * lanes + i) * panel);
                transpose(two[half]);
            }
            for (std::int64_t i = 0; i < there; ++i) {
                store_two(first + i * rows.stride_token + d, floats_of(two[0][i]) * factor,
                          floats_of(two[1][i]) * factor, n - d, streamed);
            }
        }
    }
}

template <class Format, class Out> void store_dk_dv_as(const Job &job, const KeyTile &tile) {
    const Problem &p = *job.problem;
    const Sizes<Format> sizes(p);
    const KeyPart<Format> layout(p, sizes, tile.memory);
    const float scale = static_cast<float>(p.scale);
    const std::int64_t panels = (tile.key1 - tile.key0 + panel - 1) / panel;
    begin_panels(sizes, layout, 0, static_cast<int>(panels));
    enlarge(layout.dk, panels * panel * sizes.columns, keep_rest(p));
    enlarge(layout.dv, panels * panel * sizes.value_columns, keep_rest(p));
    store_keys<Format, Out>(job.gradients->dk, tile, layout.dk, sizes.columns, p.dim_qk, scale, job.streamed);
    if (p.dim_rope) {
        const float *rope = layout.dk + sizes.main_columns * panel;
        store_keys<Format, Out>(job.gradients->dk_rope, tile, rope, sizes.columns, p.dim_rope, scale, job.streamed);
    }
    store_keys<Format, Out>(job.gradients->dv, tile, layout.dv, sizes.value_columns, p.dim_v, keep_factor(p),
                            job.streamed);
}

template <class Format, class T> void store_dk_dv(const Job &job, const KeyTile &tile) {
    job.problem->wide_results ? store_dk_dv_as<Format, float>(job, tile) : store_dk_dv_as<Format, T>(job, tile);
}

}  // namespace
}  // namespace fusion
