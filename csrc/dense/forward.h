// The forward kernel of one tile of query rows of one head: scores, bias, mask, online softmax, dropout, values.
//
// A tile processes its keys in steps of step_keys(). Within a step, each block of `block_rows` rows computes its scores
// [block_rows][most_step] in a cache, turns them into weights, and multiplies these by V. The stages between the two
// products are selected once per block, outside all inner loops. Start reading at attend().

#pragma once

#include "dense/short.h"
#include "dtype_dispatch.h"
#include "simd/dropout_scale.h"
#include "simd/mask_bits.h"
#include "simd/softmax_sink_and_nan.h"

namespace fusion {
namespace {

// ---------------------------------------------------------------------------------------------------------- products

// Computes scores of M rows. Vectors of keys that are hidden from all rows are not computed; hide() replaces them.
template <class Format, int M>
__attribute__((noinline)) void score_rows(const Work<Format> &w, const Block &b, PrefetchQueue &queue) {
    const std::int64_t words = w.sizes.words;
    const auto *q = w.s.q + b.row * words;
    const auto *k = w.packed.k + (b.first - w.packed.first_key) * words;
    float *scores = w.s.scores;
    for (std::int64_t c = 0; c < b.count; c += panel, k += panel * words, scores += panel) {
        queue.step();
        if (panel_vectors == 2 && b.some_begin >= c + lanes) {
            multiply<Format, M, 1, panel_vectors, false>(q, words, k + lanes, words, scores + lanes, most_step,
                                                         nullptr);
        } else if (panel_vectors == 2 && b.some_end <= c + lanes) {
            multiply<Format, M, 1, panel_vectors, false>(q, words, k, words, scores, most_step, nullptr);
        } else {
            multiply<Format, M, panel_vectors, panel_vectors, false>(q, words, k, words, scores, most_step, nullptr);
        }
    }
}

template <class Format, int M, int N>
FUSION_INLINE void value_columns(const Work<Format> &w, const Block &b, const float *fade, std::int64_t d) {
    const std::int64_t begin = b.some_begin / Format::depth / Format::step * Format::step;
    const std::int64_t end = words_of<Format>(b.some_end);
    const auto *v = w.packed.values(d, b.first - w.packed.first_key, N * lanes) + begin * N * lanes;
    multiply<Format, M, N, N, true>(w.s.weights + begin, most_step / Format::depth, v, end - begin,
                                    w.s.out + b.row * w.sizes.value_columns + d, w.sizes.value_columns, fade);
}

template <class Format, int M>
__attribute__((noinline)) void value_rows(const Work<Format> &w, const Block &b, const float *fade) {
    for_panels(w.sizes.value_columns, [&](auto vectors, std::int64_t d) __attribute__((always_inline)) {
        value_columns<Format, M, vectors()>(w, b, fade, d);
    });
}

// ------------------------------------------------------------------------------------------- between the two products

template <class Format> FUSION_INLINE BitBlock bits_of(const Work<Format> &w, const Block &b) {
    return {w.tile.seq, w.head, w.tile.row0 + b.row, b.rows, b.first, b.count, most_step / 8};
}

// Like hide(), with visible keys given by bits.
template <class Format> void hide_by_bits(const Work<Format> &w, const Block &b) {
    mark_seen(w.s.visible, bits_of(w, b), w.p, w.o, w.seq);
    for (std::int64_t i = 0; i < b.rows; ++i) {
        const std::uint8_t *visible = w.s.visible + i * (most_step / 8);
        float *scores = w.s.scores + i * most_step;
        for (std::int64_t at = 0; at < b.count; at += 64) {
            if (load<std::uint64_t>(visible + at / 8) == ~std::uint64_t{0}) continue;
            for (std::int64_t c = at, end = least(at + 64, b.count); c < end; c += lanes) {
                store(scores + c, pick(lane_bits(visible, c), load<Floats>(scores + c), all(-infinity)));
            }
        }
    }
}

// Sets scores of hidden keys to -inf.
template <class Format> void hide(const Work<Format> &w, const Block &b) {
    if (b.by_bits) return hide_by_bits(w, b);
    // Vectors from `head` to `tail` are visible to all rows.
    std::int64_t head = least(round_up<std::int64_t>(most<std::int64_t>(b.full_begin, 0), lanes), b.count);
    std::int64_t tail = most<std::int64_t>(b.full_end, 0) / lanes * lanes;
    if (tail < head) head = tail = 0;
    for (std::int64_t i = 0; i < b.rows; ++i) {
        const std::int64_t row = w.tile.row0 + b.row + i;
        const std::int64_t begin = first_key(w.seq, row) - b.first, end = end_key(w.seq, row) - b.first;
        float *scores = w.s.scores + i * most_step;
        for (std::int64_t c = head ? 0 : tail; c < b.count; c = c + lanes == head ? tail : c + lanes) {
            const auto inside = static_cast<std::uint32_t>(low_bits(end - c) & ~low_bits(begin - c));
            store(scores + c, pick(inside, load<Floats>(scores + c), all(-infinity)));
        }
    }
}

// Updates the rows' peaks and computes the factors of earlier sums. If these may contain an infinity, no factor is 0,
// because 0 * inf is NaN and weights of visible keys are not 0.
template <class Format> void raise_peaks(const Work<Format> &w, const Block &b, bool nonfinite, float *fade) {
    constexpr int padded = round_up(block_rows, lanes);
    alignas(64) float maxima[padded];
    for (int i = 0; i < padded; i += lanes) store(maxima + i, all(-infinity));
    for (std::int64_t i = 0; i < b.rows; ++i) {
        const float *scores = w.s.scores + i * most_step;
        Floats one = all(-infinity), other = one;
        for (std::int64_t c = 0; c < b.count; c += 2 * lanes) {
            one = larger(one, load<Floats>(scores + c));
            other = larger(other, load<Floats>(scores + c + lanes));
        }
        maxima[i] = largest_of(larger(one, other));
    }
    for (int i = 0; i < padded; i += lanes) {  // lanes behind block_rows belong to the next block and do not change
        float *const peaks = w.s.peak + b.row + i, *const shifts = w.s.shift + b.row + i;
        const Floats highest = load<Floats>(maxima + i), from = load<Floats>(shifts);
        const Floats before = load<Floats>(peaks), peak = highest > before ? highest : before;
        const Floats to = shift_of<Format>(peak, w.factor);
        store(peaks, peak);
        store(shifts, to);
        const Floats apart = Format::fused ? from - to : (from - to) * w.factor;
        Floats decay = before == peak ? all(1.0f) : exp2(apart);                 // equal infinities: no difference
        if constexpr (Format::fused) decay = decay == decay ? decay : Floats{};  // two infinite shifts
        if (nonfinite) decay = before > all(-infinity) ? larger(all(least_weight), decay) : decay;
        store(fade + i, decay);
    }
}

// Computes the weights of one row and adds them to `sum`; dropped ones are stored as zeros.
template <class Format, bool Drops>
FUSION_INLINE Floats weigh(const float *scores, std::int64_t count, float factor, float shift, Floats sum,
                           const std::uint8_t *keep, typename Format::Word *weights) {
    Floats other = {};
    for (std::int64_t c = 0; c < count; c += 2 * lanes) {
        Floats low = weight_of<Format>(load<Floats>(scores + c), factor, shift);
        Floats high = weight_of<Format>(load<Floats>(scores + c + lanes), factor, shift);
        sum += low;
        other += high;
        if constexpr (Drops) {
            low = pick(lane_bits(keep, c), low, Floats{});
            high = pick(lane_bits(keep, c + lanes), high, Floats{});
        }
        Format::store_elements(weights, c, low, high);
    }
    return sum + other;
}

// Rewrites the scores of a row whose shift is not finite: those equal to the peak become 0 and all others -inf, so that
// only they have weights.
inline void bring_to_zero(float *scores, std::int64_t count, float peak) {
    for (std::int64_t c = 0; c < count; ++c) {
        if (scores[c] == scores[c]) scores[c] = scores[c] == peak ? 0.0f : -infinity;
    }
}

// True if a score is NaN; checked for rows with a peak of +inf, which have no finite softmax.
inline bool has_nan(const float *scores, std::int64_t count) {
    for (std::int64_t c = 0; c < count; ++c) {
        if (scores[c] != scores[c]) return true;
    }
    return false;
}

template <class Format> void weigh_block(const Work<Format> &w, const Block &b, float *fade) {
    const bool drops = w.p.dropout != Dropout::none;
    for (std::int64_t i = 0; i < b.rows; ++i) {
        float *scores = w.s.scores + i * most_step;
        const float peak = w.s.peak[b.row + i], shift = w.s.shift[b.row + i];
        auto *weights = w.s.weights + i * (most_step / Format::depth);
        float *sums = w.s.sum + (b.row + i) * lanes;
        Floats sum = load<Floats>(sums) * fade[i];
        if (peak == infinity) {
            if (has_nan(scores, b.count)) sum = all(__builtin_nanf(""));
            std::memset(weights, 0, b.count / Format::depth * sizeof *weights);
        } else {
            const bool finite = -infinity < shift && shift < infinity;
            if (!finite && peak > -infinity) bring_to_zero(scores, b.count, peak);
            const float from = finite ? shift : 0.0f;  // 2^(-inf - 0) = 0
            const std::uint8_t *keep = w.s.keep + i * (most_step / 8);
            sum = drops ? weigh<Format, true>(scores, b.count, w.factor, from, sum, keep, weights)
                        : weigh<Format, false>(scores, b.count, w.factor, from, sum, keep, weights);
        }
        store(sums, sum);
    }
}

template <class Format> FUSION_INLINE bool is_nonfinite(const Work<Format> &w, std::int64_t key) {
    return w.packed.nonfinite[(key - w.packed.first_key) / panel];
}

template <class Format> bool sees_nonfinite(const Work<Format> &w, const Block &b) {
    for (std::int64_t c = 0; c < b.count; c += panel) {
        if (is_nonfinite(w, b.first + c)) return true;
    }
    return false;
}

// Sets the bits of visible keys before weights overwrite scores: those whose score is not -inf, which hide() has set
// for all hidden keys.
template <class Format> void record_seen(const Work<Format> &w, const Block &b) {
    for (std::int64_t i = 0; i < b.rows; ++i) {
        std::uint8_t *bits = w.s.visible + i * (most_step / 8);
        std::memset(bits, 0xff, most_step / 8);
        clear_unseen(bits, w.s.scores + i * most_step, b.count);
    }
}

// A vector of elements of a value, from element d on.
template <class Format, class T>
const T *value_of(const Work<Format> &w, std::int64_t key, std::int64_t d, T *staged) {
    if (!w.job.cache) return row_of<const T>(w.o.v, w.tile.seq, w.unit.head, key) + d;
    stored_values(w.job, w.tile.seq, w.unit.head).copy(key, d, least<std::int64_t>(lanes, w.p.dim_v - d), staged);
    return staged;
}

// Adds the non-finite elements of V, which packing replaced by zeros, to the rows that see the key and keep it in
// dropout. Their weights are never 0, even if they underflow.
template <class Format, class T> FUSION_RARE void add_nonfinite_values(const Work<Format> &w, const Block &b) {
    for (std::int64_t c = b.some_begin; c < b.some_end; ++c) {
        if (!is_nonfinite(w, b.first + c)) continue;
        alignas(64) T staged[lanes];
        for (std::int64_t i = 0; i < b.rows; ++i) {
            if (!bit_of(w.s.visible + i * (most_step / 8), c)) continue;
            if (w.p.dropout != Dropout::none && !bit_of(w.s.keep + i * (most_step / 8), c)) continue;
            float weight = Format::get(w.s.weights + i * (most_step / Format::depth), c);
            if (weight == 0.0f) weight = least_weight;
            float *out = w.s.out + (b.row + i) * w.sizes.value_columns;
            for (std::int64_t d = 0; d < w.p.dim_v; d += lanes) {
                const Floats value = load_floats(value_of(w, b.first + c, d, staged), w.p.dim_v - d);
                store(out + d, load<Floats>(out + d) + floats_of(bits_of(value * weight) & not_finite(bits_of(value))));
            }
        }
    }
}

// ----------------------------------------------------------------------------------------------------- from end to end

template <class Format>
void attend_block(const Work<Format> &w, const Block &b, bool first, bool &met_nonfinite, PrefetchQueue &queue) {
    alignas(64) float fade[round_up(block_rows, lanes)];
    // The last block of a tile may be short.
    with_height(b.rows, [&](auto height) { score_rows<Format, height()>(w, b, queue); });
    if (w.bias_pass) {
        for (std::int64_t i = 0; i < b.rows; ++i) {
            const Row row = {w.tile.seq, w.head, w.tile.row0 + b.row + i, b.first, b.count, w.s.scores + i * most_step};
            if (w.p.has_row_scale) {
                const Floats times = all(*row_of<const float>(w.o.row_scale, row.seq, row.head, row.row));
                for (std::int64_t c = 0; c < b.count; c += lanes) {
                    store(row.scores + c, load<Floats>(row.scores + c) * times);
                }
            }
            add_bias(row, w.p, w.o, w.seq);
        }
    }
    if (b.hidden) hide(w, b);
    raise_peaks(w, b, met_nonfinite, fade);
    if (w.p.dropout != Dropout::none) mark_kept(w.s.keep, bits_of(w, b), w.p, w.o, w.seq);
    const bool nonfinite = sees_nonfinite(w, b);
    if (nonfinite) record_seen(w, b);
    weigh_block(w, b, fade);
    with_height(b.rows, [&](auto height) { value_rows<Format, height()>(w, b, first ? nullptr : fade); });
    if (nonfinite) {
        with_stored<Format>(w.p.dtype, [&](auto x) { add_nonfinite_values<Format, decltype(x)>(w, b); });
    }
    met_nonfinite |= nonfinite;
}

template <class Format, class T> void load_rows(const Work<Format> &w) {
    const std::int64_t rows = w.tile.row1 - w.tile.row0, words = w.sizes.words, main_words = w.sizes.main_words;
    const auto pack = [&](const Rows &view, std::int64_t dim, std::int64_t count, auto *to) {
        const T *from = row_of<const T>(view, w.tile.seq, w.head, w.tile.row0);
        const std::int64_t stride = view.stride_token;
        for (std::int64_t i = 0; i < rows; ++i, from += stride, to += words) pack_query<Format>(from, dim, count, to);
    };
    pack(w.o.q, w.p.dim_qk, main_words, w.s.q);
    if (w.p.dim_rope) pack(w.o.q_rope, w.p.dim_rope, words - main_words, w.s.q + main_words);
    const std::int64_t padded = round_up<std::int64_t>(rows, block_rows);
    std::memset(w.s.q + rows * words, 0, (padded - rows) * words * sizeof *w.s.q);
    std::memset(w.s.sum, 0, padded * lanes * sizeof *w.s.sum);
    for (std::int64_t i = 0; i < padded + lanes; ++i) w.s.peak[i] = w.s.shift[i] = -infinity;
}

// Divides by sums and writes out and statistics; returns the number of empty rows.
template <class Format, class Out> std::int64_t store_rows(const Work<Format> &w) {
    const std::int64_t rows = w.tile.row1 - w.tile.row0, dim = w.p.dim_v;
    Out *out = row_of<Out>(w.o.out, w.tile.seq, w.head, w.tile.row0);
    float *max = w.o.max.base ? row_of<float>(w.o.max, w.tile.seq, w.head, w.tile.row0) : nullptr;
    float *total = max ? row_of<float>(w.o.sum, w.tile.seq, w.head, w.tile.row0) : nullptr;
    const std::int64_t out_stride = w.o.out.stride_token, max_stride = w.o.max.stride_token,
                       sum_stride = w.o.sum.stride_token;
    const double rest = keep_rest(w.p);
    std::int64_t empty = 0;
    for (std::int64_t first = 0; first < rows; first += lanes) {
        const std::int64_t here = least<std::int64_t>(lanes, rows - first);
        Floats sums_by_lane[lanes] = {};
        for (std::int64_t i = 0; i < here; ++i) sums_by_lane[i] = load<Floats>(w.s.sum + (first + i) * lanes);
        Floats sum = sums_of(sums_by_lane), correction = all(1.0f);
        const Floats highest = load<Floats>(w.s.peak + first), visible_sum = sum;
        if constexpr (Format::fused) {  // the rounding error of the shift is a common factor of all weights
            const Floats rest = Format::rest(highest, all(w.factor), load<Floats>(w.s.shift + first));
            correction = rest > all(-infinity) && rest < all(infinity) ? exp2(-rest) : correction;
            sum *= correction;
        }
        Floats peak = highest * w.natural;
        for (int i = 0; w.p.has_sink && i < lanes; ++i) {
            float top = peak[i], joined = sum[i];
            correction[i] *= join_sink(w.o.sink[w.head], top, joined);
            peak[i] = top, sum[i] = joined;
        }
        mark_nan(peak, sum);
        const Floats factor = correction / (sum * keep_of(w.p));
        alignas(64) float peaks[lanes], sums[lanes], factors[lanes];
        store(peaks, peak), store(sums, sum), store(factors, factor);
        for (std::int64_t i = 0; i < here; ++i, out += out_stride) {
            const bool none = peaks[i] == -infinity;                               // an empty row without a sink
            const bool zeros = highest[i] == -infinity && visible_sum[i] == 0.0f;  // the row may have had no step
            float *from = w.s.out + (first + i) * w.sizes.value_columns;
            if (rest > 1.0) {
                for (std::int64_t d = 0; d < dim; ++d) from[d] *= factors[i];
                enlarge(from, dim, rest);
                factors[i] = 1.0f;
            }
            if (zeros) std::memset(out, 0, dim * sizeof *out);
            else store_scaled(out, from, dim, factors[i]);
            empty += none;
            if (!max) continue;
            *max = peaks[i];
            *total = none ? 0.0f : sums[i];
            max += max_stride;
            total += sum_stride;
        }
    }
    return empty;
}

// The prefetches during a tile: memory of its results, and operands that the thread reads next.
template <class Format> PrefetchQueue queue_of(const Work<Format> &w, const Prefetches &ahead) {
    const std::int64_t rows = w.tile.row1 - w.tile.row0, seq = w.tile.seq, row0 = w.tile.row0;
    PrefetchQueue out;
    with_stored<Format>(
        w.p.dtype, [&](auto x) { out.add(prefetch_rows<decltype(x)>(w.o.out, seq, w.head, row0, rows, w.p.dim_v)); });
    if (w.o.max.base) {
        out.add(prefetch_rows<float>(w.o.max, seq, w.head, row0, rows, 1));
        out.add(prefetch_rows<float>(w.o.sum, seq, w.head, row0, rows, 1));
    }
    for (int i = 0; i < ahead.count; ++i) out.add(ahead.parts[i]);
    std::int64_t steps = 0;
    const std::int64_t height = height_of(rows);
    for (std::int64_t row = 0; row < rows; row += height) {
        steps += steps_of(w, cut_block(w, row, least(height, rows - row), w.tile.begin, w.tile.end));
    }
    out.spread(most<std::int64_t>(steps, 1));
    return out;
}

template <class Format>
std::int64_t attend(const Job &job, const Unit &unit, std::int64_t head, const Tile &tile, const Prefetches &ahead,
                    void *scratch) {
    [[maybe_unused]] const ProductRegion<Format> region;
    const Work<Format> w(job, unit, head, tile, scratch);
    PrefetchQueue queue = queue_of(w, ahead);
    with_stored<Format>(w.p.dtype, [&](auto x) { load_rows<Format, decltype(x)>(w); });
    const std::int64_t rows = tile.row1 - tile.row0;
    const std::int64_t end = tile.begin < tile.end ? tile.end : 0;  // a tile without keys may begin within a panel
    const std::int64_t step = step_keys(w.sizes);
    bool met_nonfinite = false, met[tile_rows / block_rows] = {};  // per block of rows
    const std::int64_t height = height_of(rows);
    for (std::int64_t begin = tile.begin / panel * panel; begin < end; begin += step) {
        for (std::int64_t row = 0; row < rows; row += height) {
            const Block b = cut_block(w, row, least(height, rows - row), begin, begin + step);
            if (!b.count) continue;
            for_seen_parts(w, b, [&](const Block &section) {
                if (!sees_nonfinite(w, section) && attend_short(w, section, queue)) return;
                attend_block(w, section, !met[row / height], met_nonfinite, queue);
                met[row / height] = true;
            });
        }
    }
    if (w.p.wide_results) return store_rows<Format, float>(w);
    return with_stored<Format>(w.p.dtype, [&](auto x) { return store_rows<Format, decltype(x)>(w); });
}

}  // namespace
}  // namespace fusion
