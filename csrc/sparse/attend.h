// The forward kernel of attention to selected keys: all heads of one row. Start reading at select_attend().
//
// Keys are processed in chunks: scores [key][head], so that the softmax of a head runs along a lane, then weights
// transposed to [head][key], then values. All gathered keys are visible; only the padding of a chunk is hidden.

#pragma once

#include "simd/softmax_sink_and_nan.h"
#include "sparse/not_finite.h"
#include "sparse/list_products.h"

namespace fusion {
namespace {

constexpr std::int64_t sparse_bytes = std::int64_t{850} << 10;  // most bytes of a chunk and its row in a cache

// The number of keys of a chunk, a multiple of blocks of rows and of transposed weights. It depends on the problem
// only.
template <class Format> std::int64_t sparse_chunk(const Sizes<Format> &sizes, std::int64_t heads) {
    const std::int64_t unit = 48 * Format::depth;
    const std::int64_t row = 4 * heads * (sizes.words + sizes.value_columns);
    const std::int64_t key = 4 * (sizes.words + sizes.value_columns / Format::depth + 2 * heads);
    return unit * most<std::int64_t>(1, least<std::int64_t>(4, (sparse_bytes - row) / (key * unit)));
}

template <class Format> struct SparseScratch {
    using Word = typename Format::Word;
    std::int64_t chunk, padded_heads, deep;
    std::int32_t *keys;
    Word *q, *rows, *values, *weights;  // rows of two blocks of keys; weights [head][deep]
    float *scores, *out;                // [key][padded_heads], [head][value_columns]
    float *sum, *peak, *shift, *fade;   // [head]
    std::size_t bytes;

    SparseScratch(const SparseProblem &p, const Sizes<Format> &sizes, std::int64_t heads, void *memory)
        : chunk(sparse_chunk(sizes, p.heads_q / p.heads_kv)), padded_heads(round_up(heads, head_unit<Format>)),
          deep(chunk / Format::depth) {
        const std::int64_t rounded = round_up<std::int64_t>(padded_heads, block_rows);
        Carver carver(memory);
        carver.take(q, padded_heads * sizes.words);
        carver.take(rows, 2 * block_rows * sizes.words);
        carver.take(values, deep * sizes.value_columns);
        carver.take(weights, rounded * deep);
        carver.take(scores, chunk * padded_heads);
        carver.take(out, rounded * sizes.value_columns);
        carver.take(sum, rounded);
        carver.take(peak, rounded);
        carver.take(shift, rounded);
        carver.take(fade, rounded);
        carver.take(keys, p.most_keys);
        bytes = carver.bytes();
    }
};

template <class Format> struct SparseWork {  // an item with its parameters and scratch
    const SparseJob &job;
    const SparseProblem &p;
    const SparseOperands &o;
    const SparseItem &item;
    const Sizes<Format> sizes;
    const SparseScratch<Format> s;
    const bool scale_pass;  // scores are scaled in a separate pass, because the scale is not positive
    const float natural;    // factor from stored scores to scores of the problem
    const float factor;     // factor from stored scores to exponents of 2
    const bool streams;     // blocks are gathered while others are multiplied

    SparseWork(const SparseJob &job_, const SparseItem &item_, void *scratch)
        : job(job_), p(*job.problem), o(*job.operands), item(item_), sizes(p), s(p, sizes, item.heads, scratch),
          scale_pass(!(p.scale > 1e-30)), natural(scale_pass ? 1.0f : static_cast<float>(p.scale)),
          factor(natural * log2_e),
          streams(suits_stream<Format>(p) && p.dim_v <= p.dim_qk && p.dim_v % (lanes * Format::depth) == 0 &&
                  same_rows(o.k, o.v, item.seq, item.head_kv)) {}
};

// Updates the heads' peaks and computes the factors of earlier sums.
template <class Format> void raise_head_peaks(const SparseWork<Format> &w, std::int64_t padded) {
    const std::int64_t pitch = w.s.padded_heads;
    for (std::int64_t h = 0; h < pitch; h += lanes) {
        const float *at = w.s.scores + h;
        Floats maxima[4];
        for (Floats &f : maxima) f = all(-infinity);
        for (std::int64_t c = 0; c < padded; c += 4, at += 4 * pitch) {
            FUSION_UNROLL for (int i = 0; i < 4; ++i) maxima[i] = larger(maxima[i], load<Floats>(at + i * pitch));
        }
        const Floats top = larger(larger(maxima[0], maxima[1]), larger(maxima[2], maxima[3]));
        const Floats peak = load<Floats>(w.s.peak + h), from = load<Floats>(w.s.shift + h);
        const Floats now = top > peak ? top : peak, to = shift_of<Format>(now, w.factor);
        const Floats apart = Format::fused ? from - to : (from - to) * w.factor;
        Floats decay = now == peak ? all(1.0f) : exp2(apart);
        if constexpr (Format::fused) decay = decay == decay ? decay : Floats{};  // two infinite shifts
        store(w.s.peak + h, now);
        store(w.s.shift + h, to);
        store(w.s.fade + h, decay);
    }
}

// Rewrites scores of heads whose peaks are finite but whose shifts are not: scores equal to the peak become 0 and all
// others -inf. Returns the shifts.
template <class Format>
FUSION_INLINE Floats bring_heads_to_zero(const SparseWork<Format> &w, std::int64_t h, std::int64_t padded) {
    const Floats shift = load<Floats>(w.s.shift + h), peak = load<Floats>(w.s.peak + h);
    const auto large = (peak - peak == Floats{}) & (shift - shift != Floats{});
    if (!any((Words)large)) return shift;
    for (std::int64_t c = 0; c < padded; ++c) {
        float *const at = w.s.scores + c * w.s.padded_heads + h;
        const Floats x = load<Floats>(at);
        store(at, large & (x == x) ? (x == peak ? Floats{} : all(-infinity)) : x);
    }
    return large ? Floats{} : shift;
}

// Computes the weights of a chunk, adds them to sums per head, and transposes them.
template <class Format> __attribute__((noinline)) void weigh_heads(const SparseWork<Format> &w, std::int64_t padded) {
    constexpr int depth = Format::depth;
    const std::int64_t pitch = w.s.padded_heads;
    const float factor = w.factor;
    for (std::int64_t h = 0; h < pitch; h += lanes) {
        Floats shift = bring_heads_to_zero(w, h, padded), sums[depth] = {};
        shift = shift == all(-infinity) ? Floats{} : shift;
        sums[0] = load<Floats>(w.s.sum + h) * load<Floats>(w.s.fade + h);
        auto *const to = w.s.weights + h * w.s.deep;
        for (std::int64_t c = 0; c < padded; c += lanes * depth) {
            const float *at = w.s.scores + c * pitch + h;
            Words block[lanes];
            FUSION_UNROLL for (int i = 0; i < lanes; ++i) {
                Floats weight[depth];
                FUSION_UNROLL for (int e = 0; e < depth; ++e) {
                    const Floats score = load<Floats>(at + (i * depth + e) * pitch);
                    if constexpr (Format::fused) weight[e] = exp2(Format::rest(score, all(factor), shift));
                    else weight[e] = exp2((score - shift) * factor);
                    sums[e] += weight[e];
                }
                block[i] = Format::join(weight);
            }
            transpose(block);
            FUSION_UNROLL for (int i = 0; i < lanes; ++i) store(to + i * w.s.deep + c / depth, block[i]);
        }
        for (int e = 1; e < depth; ++e) sums[0] += sums[e];
        store(w.s.sum + h, sums[0]);
    }
}

// Adds the values of a chunk's keys, whose scores are computed, to out.
template <class Format>
__attribute__((noinline)) void add_chunk(const SparseWork<Format> &w, std::int64_t count, KeyPrefetch &ahead) {
    const auto &s = w.s;
    const std::int64_t padded = round_up<std::int64_t>(count, lanes * Format::depth);
    if (w.scale_pass) {
        const float scale = static_cast<float>(w.p.scale);
        for (std::int64_t i = 0; i < count * s.padded_heads; i += lanes)
            store(s.scores + i, load<Floats>(s.scores + i) * scale);
    }
    for (std::int64_t i = count * s.padded_heads; i < padded * s.padded_heads; i += lanes)
        store(s.scores + i, all(-infinity));
    raise_head_peaks(w, padded);
    weigh_heads(w, padded);
    clear_across<Format>(count, w.p.dim_v, s.values, s.deep);
    add_heads<Format>(s.weights, s.deep, s.values, s.deep, words_of<Format>(count), s.out, w.sizes.value_columns,
                      w.sizes.value_columns, w.item.heads, s.fade, ahead);
}

template <class Format, class T>
void attend_chunk(const SparseWork<Format> &w, const Chunk &chunk, ListReader<Format, T> &reader) {
    const auto &s = w.s;
    reader.score(chunk, s.q, s.scores, s.padded_heads, s.padded_heads, nullptr,
                 [&](std::int64_t at, std::int64_t here, bool streamed) {
                     for (std::int64_t i = at; !streamed && i < at + here; i += Format::depth) {
                         gather<Format, T>(w.o.v, w.item, chunk, i, w.p.dim_v, 0, 0, nullptr, s.values, s.deep);
                     }
                 });
    add_chunk(w, chunk.count, reader.ahead);
}

// Computes row i of out again, key by key, if it is not finite. Products give NaN if a weight that underflows to 0 is
// multiplied by an infinity, although it is not 0, and if a weight of exactly 0 is multiplied by a non-finite element,
// although a key with a score of -inf is hidden.
template <class Format, class T>
FUSION_RARE void recompute(const SparseWork<Format> &w, std::int64_t i, std::int64_t count) {
    const auto &item = w.item;
    const std::int64_t head = item.head0 + i;
    const auto score = [&](std::int64_t key) {
        const float product = score_of<T>(w.p, w.o, item.seq, head, item.row, item.head_kv, key);
        return w.scale_pass ? product * static_cast<float>(w.p.scale) : product;
    };
    const float peak = w.s.peak[i], shift = peak == -infinity ? 0.0f : w.s.shift[i];  // as in weigh_heads()
    const bool large = peak - peak == 0.0f && shift - shift != 0.0f;
    float top = -infinity;  // the peak with products as summed here
    for (std::int64_t at = 0; large && at < count; ++at) top = most(top, score(w.s.keys[at]));
    float *const out = w.s.out + i * w.sizes.value_columns;
    std::memset(out, 0, w.sizes.value_columns * sizeof *out);
    for (std::int64_t at = 0; at < count; ++at) {
        const float product = score(w.s.keys[at]);
        if (product == -infinity) continue;
        const float power = Format::fused ? __builtin_fmaf(product, w.factor, -shift) : (product - shift) * w.factor;
        const Floats weight = large ? all(product == top ? 1.0f : 0.0f) : exp2(all(power));
        const Floats lasting = larger(all(least_weight), weight);
        const T *v = row_of<const T>(w.o.v, item.seq, item.head_kv, w.s.keys[at]);
        for (std::int64_t d = 0; d < w.p.dim_v; d += lanes) {
            const Floats value = load_floats(v + d, w.p.dim_v - d);
            store(out + d, load<Floats>(out + d) + (not_finite(bits_of(value)) != 0 ? lasting : weight) * value);
        }
    }
}

// Divides by sums and writes out and, if they have memory, statistics.
template <class Format, class T> void store_heads(const SparseWork<Format> &w, std::int64_t count) {
    for (std::int64_t i = 0; i < w.item.heads; ++i) {
        const std::int64_t head = w.item.head0 + i;
        float sum = w.s.sum[i], peak = w.s.peak[i] * w.natural, correction = 1.0f;
        if constexpr (Format::fused) {  // the rounding error of the shift is a common factor of all weights
            const float rounding = __builtin_fmaf(w.s.peak[i], w.factor, -w.s.shift[i]);
            if (rounding - rounding == 0.0f) correction = __builtin_exp2f(-rounding);
            sum *= correction;
        }
        if (w.p.has_sink) correction *= join_sink(w.o.sink[head], peak, sum);
        mark_nan(peak, sum);
        const bool none = peak == -infinity;
        T *out = row_of<T>(w.o.out, w.item.seq, head, w.item.row);
        const float *from = w.s.out + i * w.sizes.value_columns;
        if (sum == sum && !none && any_nan(from, w.p.dim_v)) recompute<Format, T>(w, i, count);
        const float factor = correction / sum;
        for (std::int64_t d = 0; d < w.p.dim_v; d += lanes) {
            const Floats x = load<Floats>(from + d);  // an infinity stays one, even if the factor underflows
            const Floats result = not_finite(bits_of(x)) != 0 ? x + factor : x * factor;
            store_floats(out + d, none ? Floats{} : result, w.p.dim_v - d);
        }
        if (!w.o.max.base) continue;
        *row_of<float>(w.o.max, w.item.seq, head, w.item.row) = peak;
        *row_of<float>(w.o.sum, w.item.seq, head, w.item.row) = none ? 0.0f : sum;
    }
}

template <class Format, class T>
std::int64_t select_attend(const SparseJob &job, const SparseItem &item, void *scratch) {
    [[maybe_unused]] const ProductRegion<Format> region;
    const SparseWork<Format> w(job, item, scratch);
    const auto &s = w.s;
    const std::int64_t count = expand(job, item, s.keys), rounded = round_up<std::int64_t>(s.padded_heads, block_rows);
    std::memset(s.out, 0, rounded * w.sizes.value_columns * sizeof *s.out);
    std::memset(s.sum, 0, rounded * sizeof *s.sum);
    for (std::int64_t i = 0; i < rounded; ++i) s.peak[i] = s.shift[i] = -infinity;
    if (count) pack_item_heads<Format, T>(w.p, w.o, item, w.sizes, s.q);
    const std::int64_t cost = s.padded_heads * w.sizes.words + item.heads * w.sizes.value_columns / Format::depth;
    ListReader<Format, T> reader(job, item, w.sizes, s.keys, count, w.streams, s.chunk, cost, s.rows, s.values, s.deep,
                                 w.p.dim_v);
    for (std::int64_t at = 0; at < count; at += s.chunk) {
        attend_chunk<Format, T>(w, {s.keys + at, least(s.chunk, count - at), count - at}, reader);
    }
    store_heads<Format, T>(w, count);
    return count == 0;
}

}  // namespace
}  // namespace fusion
