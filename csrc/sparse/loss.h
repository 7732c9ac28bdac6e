// The indexer's loss and its three gradients: the KL divergence of softmax(I) from the attention's mean over heads, row
// by row.
//
//   p = sum_h exp(s_h - max_h) / sum_h / N        from the attention's saved statistics, s = scale * q k^T
//   S = k q^T, I = sum_h w_h * max(0, S_h)        of the indexer, [key][head]
//   dI = y - p, and gradients from it             by sparse/index_gradient.h
//
// The caller may pass p instead (the attention then has no heads): dI = y * sum p - p.
//
// This file has the functions for both forms and the kernel with lists. An item is a row; all query heads of a key head
// of the attention are multiplied at once. Start reading at list_loss(). The kernel without lists: sparse/loss_tiles.h.

#pragma once

#include "sparse/index_gradient.h"

namespace fusion {
namespace {

constexpr float least_share = 1e-8f, log_least = -18.4206807f;  // least probability in logarithms

// ln x of normal numbers, to a relative error of 1e-7.
FUSION_INLINE Floats natural_log(Floats x) {
    const Ints bits = (Ints)x, n = (bits - 0x3f3504f3) >> 23;  // x = 2^n * (1 + f), sqrt(1/2) <= 1 + f < sqrt(2)
    const Floats f = floats_of((Words)(bits - (n << 23))) - 1.0f, f2 = f * f;
    const Floats exponent = __builtin_convertvector(n, Floats);
    constexpr float c[] = {7.0376836292e-2f,  -1.1514610310e-1f, 1.1676998740e-1f,  -1.2420140846e-1f, 1.4249322787e-1f,
                           -1.6668057665e-1f, 2.0000714765e-1f,  -2.4999993993e-1f, 3.3333331174e-1f};
    Floats p = all(c[0]);
    FUSION_UNROLL for (int i = 1; i < 9; ++i) p = p * f + all(c[i]);
    return exponent * 0.693359375f +
           (f + (f2 * -0.5f + (p * f * f2 + exponent * -2.12194440e-4f)));  // ln 2 in two parts
}

// ---------------------------------------------------------------------------------------------------- the attention

// Factors that convert a product of a head and row to a probability.
struct Saved {
    float shift, inverse_sum;
};

template <class Format>
Saved saved_of(const SparseOperands &o, std::int64_t seq, std::int64_t head, std::int64_t row) {
    const float peak = *row_of<float>(o.max, seq, head, row), sum = *row_of<float>(o.sum, seq, head, row);
    if (!Format::fused) return {peak, 1.0f / sum};
    return {static_cast<float>(peak * 1.4426950408889634 + __builtin_log2(sum)), 1.0f};
}

template <class Format> struct Probability {
    float natural, factor;

    explicit Probability(const SparseProblem &attention)
        : natural(static_cast<float>(attention.scale)), factor(natural * log2_e) {}

    FUSION_INLINE Floats operator()(Floats product, Floats shift, Floats inverse_sum) const {
        if constexpr (Format::fused) {
            (void)inverse_sum;
            return exp2(product * factor - shift);
        } else {
            return exp2<6>((rounded(product * natural) - shift) * log2_e) * inverse_sum;
        }
    }
};

// 1 / N, where N is the sum over heads of the probabilities of keys, without those of sinks.
inline float head_share(const SparseProblem &p, const SparseOperands &o, std::int64_t seq, std::int64_t row) {
    auto left = static_cast<double>(p.heads_q);
    for (std::int64_t h = 0; p.has_sink && h < p.heads_q; ++h) {
        const double peak = *row_of<float>(o.max, seq, h, row), sum = *row_of<float>(o.sum, seq, h, row);
        left -= __builtin_exp(o.sink[h] - peak) / sum;
    }
    return static_cast<float>(1.0 / left);
}

// Computes sums of probabilities over all heads again where they are NaN, for keys from `first` on or those of a list:
// a score of +inf with a finite maximum, which exp2() does not support, gives infinity; NaN in any head gives NaN.
template <class T>
void form_target_anew(const SparseProblem &p, const SparseOperands &o, std::int64_t seq, std::int64_t row,
                      float *target, std::int64_t count, std::int64_t first, const std::int32_t *listed) {
    if (!any_nan(target, count)) return;
    for (std::int64_t i = 0; i < count; ++i) {
        if (target[i] == target[i]) continue;
        const std::int64_t key = listed ? listed[i] : first + i, group = p.heads_q / p.heads_kv;
        target[i] = 0.0f;
        for (std::int64_t h = 0; h < p.heads_q && target[i] == target[i]; ++h) {
            const float score = static_cast<float>(p.scale) * score_of<T>(p, o, seq, h, row, h / group, key);
            target[i] +=
                __builtin_expf(score - *row_of<float>(o.max, seq, h, row)) / *row_of<float>(o.sum, seq, h, row);
        }
    }
}

// ------------------------------------------------------------------------------------------------------ the indexer

// to[i] = sum_of(terms(i)) for i < count; terms() is also called for up to a vector of larger i.
template <class Terms> FUSION_INLINE void sum_up(std::int64_t count, float *to, Terms terms) {
    for (std::int64_t i = 0; i < count; i += lanes) {
        Floats vectors[lanes];
        for (int k = 0; k < lanes; ++k) vectors[k] = terms(i + k);
        store_floats(to + i, sums_of(vectors), count - i);
    }
}

// Computes I of keys from their products [key][pitch]; the array of scores has room for one more vector.
inline void weigh_scores(const float *products, std::int64_t pitch, std::int64_t heads, const float *weights,
                         std::int64_t count, float *scores) {
    sum_up(count, scores, [&](std::int64_t i) __attribute__((always_inline)) {
        Floats sum = {};
        for (std::int64_t h = 0; h < heads; h += lanes) {
            const Floats term = larger(Floats{}, load<Floats>(products + i * pitch + h)) * load<Floats>(weights + h);
            // Missing heads are masked, because 0 * inf is NaN.
            const Words there = (Words)(lane_numbers() < static_cast<std::int32_t>(heads - h));
            sum += floats_of(bits_of(term) & there);
        }
        return sum;
    });
}

struct Likelihood {  // y = exp(I - top) * inverse_sum, ln y = I - top - log_sum
    float top, inverse_sum, log_sum;
    float head_share;   // 1 / N
    bool clamped;       // p as a factor is clamped too
    float mass = 1.0f;  // sum of p

    Likelihood(float top_, float sum, float head_share_, bool clamped_)
        : top(top_), inverse_sum(1.0f / sum), log_sum(__builtin_logf(sum)), head_share(head_share_), clamped(clamped_) {
    }
};

// The softmax of a row; the array of its scores has room for one more vector.
inline Likelihood likelihood_of(float *scores, std::int64_t count, float head_share, bool clamped) {
    store(scores + count, all(-infinity));
    Floats maxima = all(-infinity), sum = {};
    for (std::int64_t i = 0; i < count; i += lanes) maxima = larger(maxima, load<Floats>(scores + i));
    const float top = largest_of(maxima);
    for (std::int64_t i = 0; i < count; i += lanes) sum += exp2<6>((load<Floats>(scores + i) - top) * log2_e);
    return {top, sum_of(sum), head_share, clamped};
}

// Calls take(index of the first score, y) for `count` scores, a vector at a time.
template <class Take> FUSION_INLINE void each_likelihood(const float *scores, std::int64_t count, const Likelihood y,
                                                         Take take) {
    for (std::int64_t i = 0; i < count; i += lanes) {
        take(i, exp2<6>((load_floats(scores + i, count - i) - y.top) * log2_e) * y.inverse_sum);
    }
}

// Overwrites scores of keys by dI, given their probabilities summed over heads in `target`; returns their loss.
__attribute__((noinline)) inline double kl_divergence(float *scores, const float *target, std::int64_t count,
                                                      const Likelihood y) {
    double loss = 0.0;
    for (std::int64_t i = 0; i < count; i += lanes) {
        const Floats score = load_floats(scores + i, count - i) - y.top;
        const Floats p = load_floats(target + i, count - i) * y.head_share;
        const Floats clamped = larger(all(least_share), p), log_y = larger(all(log_least), score - y.log_sum);
        float terms[lanes];
        store(terms, (y.clamped ? clamped : p) * (natural_log(clamped) - log_y));
        for (std::int64_t k = 0; k < least<std::int64_t>(lanes, count - i); ++k) loss += terms[k];
        store_floats(scores + i, exp2<6>(score * log2_e) * y.inverse_sum * y.mass - p, count - i);
    }
    return loss;
}

// ---------------------------------------------------------------------------------------------------------- with lists

template <class Format> struct ListScratch {  // scratch for the attention, in addition to that for the indexer
    using Word = typename Format::Word;
    static constexpr std::int64_t chunk = 2 * GradientScratch<Format>::chunk;
    std::int64_t pitch;                   // of scores
    Word *q, *rows;                       // of one key head's query heads; of two blocks of keys
    float *scores, *shift, *inverse_sum;  // [key][pitch], [head]
    float *target;                        // [key], of the whole list
    std::size_t bytes;

    ListScratch(const SparseProblem &attention, const SparseProblem &index, void *memory)
        : pitch(round_up(attention.heads_q / attention.heads_kv, head_unit<Format>)) {
        const Sizes<Format> sizes(attention);
        Carver carver(memory);
        carver.take(q, pitch * sizes.words);
        carver.take(rows, 2 * block_rows * sizes.words);
        carver.take(scores, round_up<std::int64_t>(chunk, lanes) * pitch);
        carver.take(shift, pitch);
        carver.take(inverse_sum, pitch);
        carver.take(target, index.most_keys + lanes);
        bytes = carver.bytes();
    }
};

// Adds the probabilities of a chunk's keys in the query heads of one key head.
template <class Format>
__attribute__((noinline)) void add_probabilities(const ListScratch<Format> &s, const Probability<Format> probability,
                                                 std::int64_t count, float *target) {
    for (std::int64_t i = 0; i < count; i += lanes) {
        Floats sums[lanes];
        for (int k = 0; k < lanes; ++k) {
            Floats sum = {};
            for (std::int64_t h = 0; h < s.pitch; h += lanes) {
                const Floats inverse_sum = load<Floats>(s.inverse_sum + h);
                const float *const at = s.scores + (i + k) * s.pitch + h;
                const Floats one = probability(load<Floats>(at), load<Floats>(s.shift + h), inverse_sum);
                sum += inverse_sum == Floats{} ? Floats{} : one;
            }
            sums[k] = sum;
        }
        store_floats(target + i, load_floats(target + i, count - i) + sums_of(sums), count - i);
    }
}

// Computes the sums of probabilities over all heads of the attention, for all keys of a list.
template <class Format, class T>
void list_target(const SparseJob &job, const SparseItem &item, const ListScratch<Format> &s, const std::int32_t *keys,
                 std::int64_t count) {
    const SparseProblem &p = *job.problem;
    const SparseOperands &o = *job.operands;
    const Sizes<Format> sizes(p);
    const std::int64_t group = p.heads_q / p.heads_kv;
    const Probability<Format> probability(p);
    std::memset(s.target, 0, count * sizeof *s.target);
    for (std::int64_t g = 0; g < p.heads_kv; ++g) {
        const SparseItem head_item = {item.seq, g, g * group, group, item.row};
        pack_item_heads<Format, T>(p, o, head_item, sizes, s.q);
        for (std::int64_t h = 0; h < s.pitch; ++h) {
            const Saved saved =
                h < group ? saved_of<Format>(o, head_item.seq, head_item.head0 + h, head_item.row) : Saved{0.0f, 0.0f};
            s.shift[h] = saved.shift;
            s.inverse_sum[h] = saved.inverse_sum;
        }
        ListReader<Format, T> reader(job, head_item, sizes, keys, count, suits_stream<Format>(p), s.chunk,
                                     s.pitch * sizes.words, s.rows, nullptr, 0, 0);
        for (std::int64_t at = 0; at < count; at += s.chunk) {
            const Chunk chunk = {keys + at, least<std::int64_t>(s.chunk, count - at), count - at};
            reader.score(chunk, s.q, s.scores, s.pitch, s.pitch, nullptr, [](auto...) {});
            add_probabilities(s, probability, chunk.count, s.target + at);
        }
    }
    form_target_anew<T>(p, o, item.seq, item.row, s.target, count, 0, keys);
}

// Copies a list's target in the order of sorted keys; returns its sum. sorted: (key, slot) pairs of the list.
inline float take_target(const SparseOperands &o, const SparseItem &item, const std::uint64_t *sorted,
                         std::int64_t count, float *target) {
    const float *const given = row_of<const float>(o.target, item.seq, 0, item.row);
    double sum = 0.0;
    for (std::int64_t i = 0; i < count; ++i) sum += target[i] = given[static_cast<std::uint32_t>(sorted[i])];
    return static_cast<float>(sum);
}

// Stores y of a list's entries.
inline void store_likelihood(const SparseOperands &o, const SparseItem &item, const std::uint64_t *sorted,
                             const float *scores, std::int64_t count, const Likelihood y) {
    float *const to = row_of<float>(o.values, item.seq, 0, item.row);
    each_likelihood(scores, count, y, [&](std::int64_t at, Floats likelihood) {
        float each[lanes];
        store(each, likelihood);
        for (std::int64_t i = 0; i < least<std::int64_t>(lanes, count - at); ++i) {
            to[static_cast<std::uint32_t>(sorted[at + i])] = each[i];
        }
    });
}

// Computes loss and gradients of a row except sums of keys, whose contributions it stores.
template <class Format>
void list_loss(const SparseJob &job, const SparseItem &item, const Contributions &stored, double *loss, void *scratch) {
    [[maybe_unused]] const ProductRegion<Format> region;
    const IndexListWork<Format> work(job, item, stored, scratch);
    const auto &w = work.gradient;
    const ListScratch<Format> s(*job.attention, w.p, static_cast<char *>(scratch) + work.bytes());
    float *const given = work.left.given;
    const bool attends = job.attention->heads_q;
    std::uint64_t *sorted;
    const std::int64_t count = attends ? order_keys(w) : sort_keys(w, sorted);
    find_strips(stored, w.s.keys, count, job.sequences[item.seq].kv_len);
    *loss = 0.0;
    if (count) {
        const SparseJob attention = {job.attention, job.attended, job.sequences};
        with_stored<Format>(w.p.dtype, [&](auto kind) {
            if (attends) list_target<Format, decltype(kind)>(attention, item, s, w.s.keys, count);
            score_list<Format, decltype(kind)>(work, count);
        });
        weigh_scores(work.list.products, w.s.pitch, item.heads, w.s.head_factor, count, given);
        const float fraction = attends ? head_share(*job.attention, *job.attended, item.seq, item.row) : 1.0f;
        Likelihood y = likelihood_of(given, count, fraction, attends);
        if (!attends) {
            y.mass = take_target(w.o, item, sorted, count, s.target);
            if (w.o.values.base) store_likelihood(w.o, item, sorted, given, count, y);
        }
        *loss = kl_divergence(given, s.target, count, y);
    }
    descend_list(work, count);
}

}  // namespace
}  // namespace fusion
