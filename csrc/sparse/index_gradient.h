// The kernel of the indexer's gradients of one row over its list, from dI, which the loss computes or the caller
// passes.
//
//   S = k q^T                       [key][head], for all keys of the list
//   dw = sum_j dI * max(0, S), dS = dI * w * [S > 0]
//   dq += dS^T k                    private to a thread
//   dk += dS q                      stored, and added to sums of keys later, as in sparse/gradient.h
//
// Start reading at index_gradient() and add_index_gradient().

#pragma once

#include "simd/mask_bits.h"
#include "sparse/gradient.h"

namespace fusion {
namespace {

// The contributions of a row. They have dI and the signs of S instead of dS, which would be eight times larger.
template <class Format> struct IndexContributions {
    using Word = typename Format::Word;
    std::int64_t q_words;
    std::int32_t *keys;      // ascending
    Word *q_rows;            // the row's heads
    float *given;            // [key], dI
    std::uint8_t *positive;  // [key][pitch] bits, set if S > 0
    bool *nonfinite;         // true if elements of heads were not finite and have been replaced by zeros
    std::size_t bytes;

    IndexContributions(const SparseProblem &index, const GradientScratch<Format> &s, void *memory)
        : q_words(s.padded_heads / Format::depth * Sizes<Format>(index).columns) {
        const std::int64_t most = index.most_keys;
        Carver carver(memory);
        carver.take(keys, most);
        carver.take(q_rows, q_words);
        carver.take(given, most + lanes);
        carver.take(positive, (most + block_rows) * s.pitch / 8);  // complete blocks are read
        carver.take(nonfinite, 1);
        bytes = carver.bytes();
    }
};

template <class Format> struct IndexListScratch {  // in addition to GradientScratch
    using Word = typename Format::Word;
    float *products;  // [key][pitch of the gradient], for all keys of the list
    Word *across;     // the indexer's keys of the list, chunk by chunk
    Word *dscores;    // of a chunk, [key / depth][pitch of the gradient]
    std::size_t bytes;

    IndexListScratch(const SparseProblem &index, const GradientScratch<Format> &s, void *memory) {
        const std::int64_t most = index.most_keys;
        Carver carver(memory);
        carver.take(products, (round_up<std::int64_t>(most, block_rows) + lanes) * s.pitch);
        carver.take(across, round_up<std::int64_t>(most, s.chunk) / Format::depth * Sizes<Format>(index).columns);
        carver.take(dscores, s.deep * s.pitch);
        bytes = carver.bytes();
    }
};

template <class Format> struct IndexListWork {  // a row with its parameters and scratch
    const SparseGradientWork<Format> gradient;
    const IndexListScratch<Format> list;
    const IndexContributions<Format> left;

    IndexListWork(const SparseJob &job, const SparseItem &item, const Contributions &stored, void *scratch)
        : gradient(job, item, scratch), list(gradient.p, gradient.s, static_cast<char *>(scratch) + gradient.s.bytes),
          left(gradient.p, gradient.s, stored.memory) {}

    std::size_t bytes() const { return gradient.s.bytes + list.bytes; }
};

// Computes products of the row's heads with all keys of its list.
template <class Format, class T> void score_list(const IndexListWork<Format> &work, std::int64_t count) {
    const auto &w = work.gradient;
    const auto &s = w.s;
    std::memcpy(work.left.keys, s.keys, count * sizeof *s.keys);
    load_heads<Format, T>(w, work.left.q_rows);
    load_weights(w.p, w.o.weights, w.item.seq, w.item.row, s.pitch, s.head_factor);
    ListReader<Format, T> reader(w.job, w.item, w.sizes, s.keys, count, suits_stream<Format>(w.p), 2 * s.chunk,
                                 s.padded_heads * w.sizes.words, s.rows, nullptr, s.deep, w.p.dim_qk);
    for (std::int64_t at = 0; at < count; at += s.chunk) {
        auto *const across = work.list.across + at / Format::depth * w.sizes.columns;
        reader.stream.transpose_to(across);
        reader.score({s.keys + at, least<std::int64_t>(s.chunk, count - at), count - at}, s.q,
                     work.list.products + at * s.pitch, s.pitch, s.padded_heads, across, [](auto...) {});
        clear_across<Format>(least<std::int64_t>(s.chunk, count - at), w.p.dim_qk, across, s.deep);
    }
}

// dS = dI * weight for two vectors of heads where the bit of a positive score is set, else 0.
FUSION_INLINE void spread_weights(std::uint32_t bits, Floats dvalue, const Floats (&weights)[2], Floats (&dscore)[2]) {
    FUSION_UNROLL for (int u = 0; u < 2; ++u) dscore[u] = pick(bits >> u * lanes, dvalue * weights[u], Floats{});
}

// Computes dS of a chunk's keys as the first operand of dq, [key / depth][pitch]; sets the bits of positive scores, and
// adds to dweights.
template <class Format>
__attribute__((noinline)) void weigh_list(const float *products, const float *given, std::int64_t count,
                                          std::int64_t pitch, const float *weights, float *dweights,
                                          std::uint8_t *positive, typename Format::Word *dscores) {
    using Bits =
        std::conditional_t<lanes == 16, std::uint32_t, std::conditional_t<lanes == 8, std::uint16_t, std::uint8_t>>;
    for (std::int64_t h = 0; h < pitch; h += 2 * lanes) {
        const Floats weight[2] = {load<Floats>(weights + h), load<Floats>(weights + h + lanes)};
        Floats sum[2] = {load<Floats>(dweights + h), load<Floats>(dweights + h + lanes)};
        for (std::int64_t i = 0; i < count; i += Format::depth) {
            Floats rows[2][Format::depth] = {};
            FUSION_UNROLL for (int e = 0; e < Format::depth; ++e) {
                if (i + e >= count) break;
                const Floats dvalue = all(given[i + e]);
                Floats dscore[2];
                std::uint32_t bits = 0;
                FUSION_UNROLL for (int u = 0; u < 2; ++u) {
                    const Floats score = load<Floats>(products + (i + e) * pitch + h + u * lanes);
                    sum[u] += dvalue * larger(Floats{}, score);
                    bits |= mask_of(score > Floats{}) << u * lanes;
                }
                spread_weights(bits, dvalue, weight, dscore);
                FUSION_UNROLL for (int u = 0; u < 2; ++u) rows[u][e] = dscore[u];
                store(positive + ((i + e) * pitch + h) / 8, static_cast<Bits>(bits));
            }
            FUSION_UNROLL for (int u = 0; u < 2; ++u) {
                store(dscores + i / Format::depth * pitch + h + u * lanes, Format::join(rows[u]));
            }
        }
        store(dweights + h, sum[0]);
        store(dweights + h + lanes, sum[1]);
    }
}

// Transposes dS of a chunk to [head][deep], for tile registers, padded with zeros.
template <class Format>
void transpose_weights(const GradientScratch<Format> &s, std::int64_t count, const typename Format::Word *dscores) {
    const std::int64_t there = (count + Format::depth - 1) / Format::depth;
    for (std::int64_t h = 0; h < s.pitch; h += lanes) {
        for (std::int64_t c = 0; c < there; c += lanes) {
            Words block[lanes];
            for (int i = 0; i < lanes; ++i)
                block[i] = c + i < there ? load<Words>(dscores + (c + i) * s.pitch + h) : Words{};
            transpose(block);
            for (int i = 0; i < lanes; ++i) store(s.dscore_heads + (h + i) * s.deep + c, block[i]);
        }
    }
}

// Calls body(dS) for key `at` of a list and head i if the score is positive.
template <class Format, class Body>
void where_positive(const SparseGradientWork<Format> &w, const IndexContributions<Format> &stored, std::int64_t at,
                    std::int64_t i, Body body) {
    if (bit_of(stored.positive + at * w.s.pitch / 8, i)) body(stored.given[at] * w.s.head_factor[i]);
}

// As in sparse/gradient.h: computes heads of dq that are NaN again, and the contributions.
template <class Format, class T>
FUSION_RARE void form_row_anew(const IndexListWork<Format> &work, std::int64_t count) {
    const auto &w = work.gradient;
    for (std::int64_t i = 0; i < w.item.heads; ++i) {
        float *const dq = w.s.dq + i * w.sizes.columns;
        if (!any_nan(dq, w.sizes.columns)) continue;
        std::memset(dq, 0, w.sizes.columns * sizeof *dq);
        for (std::int64_t at = 0; at < count; ++at) {
            where_positive(w, work.left, at, i, [&](float dscore) {
                add_row<true>(row_of<T>(w.o.k, w.item.seq, 0, work.left.keys[at]), w.p.dim_qk, dscore, dq);
            });
        }
    }
    *work.left.nonfinite = clear_nonfinite<Format>(work.left.q_rows, w.item.heads, w.sizes.columns);
}

// Computes dq and dweights from the stored dI, chunk by chunk.
template <class Format> void descend_list(const IndexListWork<Format> &work, std::int64_t count) {
    const auto &w = work.gradient;
    const auto &s = w.s;
    const auto &left = work.left;
    const std::int64_t columns = w.sizes.columns, rounded = round_up<std::int64_t>(s.pitch, block_rows);
    std::memset(s.dq, 0, rounded * columns * sizeof *s.dq);
    std::memset(s.delta, 0, rounded * sizeof *s.delta);
    for (std::int64_t i = 0; i < rounded; ++i) s.ones[i] = 1.0f;
    Idle idle;
    for (std::int64_t at = 0; at < count; at += s.chunk) {
        const std::int64_t here = least<std::int64_t>(s.chunk, count - at), depth = words_of<Format>(here);
        weigh_list<Format>(work.list.products + at * s.pitch, left.given + at, here, s.pitch, s.head_factor, s.delta,
                           left.positive + at * s.pitch / 8, work.list.dscores);
        const auto *across = work.list.across + at / Format::depth * columns;
        if constexpr (Format::step > 1) {
            transpose_weights(s, here, work.list.dscores);
            add_heads<Format>(s.dscore_heads, s.deep, across, s.deep, depth, s.dq, columns, columns, w.item.heads,
                              s.ones, idle);
        } else {
            in_blocks(w.item.heads, [&](auto height, std::int64_t h) __attribute__((always_inline)) {
                by_panels<Format, height(), true, ColumnMajor<typename Format::Word>>(
                    work.list.dscores + h, s.pitch, across, s.deep, depth, s.dq + h * columns, columns, columns,
                    s.ones + h, idle);
            });
        }
    }
    *left.nonfinite = false;
    if (count && meets_nonfinite(work.list.products, s.pitch, count, s.padded_heads)) {
        with_stored<Format>(w.p.dtype, [&](auto kind) { form_row_anew<Format, decltype(kind)>(work, count); });
    }
    store_head_gradients(w, s.dq, s.delta);
}

// Computes the gradients of a row from dI of the caller, except sums of keys, whose contributions it stores.
template <class Format>
void index_gradient(const SparseJob &job, const SparseItem &item, const Contributions &stored, void *scratch) {
    [[maybe_unused]] const ProductRegion<Format> region;
    const IndexListWork<Format> work(job, item, stored, scratch);
    const auto &w = work.gradient;
    std::uint64_t *sorted;
    const std::int64_t count = sort_keys(w, sorted);
    find_strips(stored, w.s.keys, count, job.sequences[item.seq].kv_len);
    with_stored<Format>(w.p.dtype, [&](auto kind) {
        using T = decltype(kind);
        if (count) score_list<Format, T>(work, count);
        const T *given = row_of<const T>(w.o.dout, item.seq, 0, item.row);
        for (std::int64_t i = 0; i < count; ++i) {
            work.left.given[i] = load_floats(given + static_cast<std::uint32_t>(sorted[i]), 1)[0];
        }
    });
    descend_list(work, count);
}

// ------------------------------------------------------------------------------------------- from stored contributions

// Computes dS of a chunk of keys from contributions, with the same bits as before: [key][head_words].
template <class Format>
void recall_weights(const IndexContributions<Format> &stored, std::int64_t first, std::int64_t count,
                    const GradientScratch<Format> &s) {
    for (std::int64_t h = 0; h < s.pitch; h += 2 * lanes) {
        const Floats weights[2] = {load<Floats>(s.head_factor + h), load<Floats>(s.head_factor + h + lanes)};
        for (std::int64_t i = 0; i < count; ++i) {
            const std::uint8_t *const row = stored.positive + (first + i) * s.pitch / 8;
            Floats dscore[2];
            spread_weights(lane_bits(row, h) | lane_bits(row, h + lanes) << lanes, all(stored.given[first + i]),
                           weights, dscore);
            Format::store_elements(s.dscores + i * s.head_words, h, dscore[0], dscore[1]);
        }
    }
}

// Adds the contributions of non-finite elements of heads to the sums of keys.
template <class Format, class T>
FUSION_RARE void add_nonfinite_heads(const SparseGradientWork<Format> &w, const IndexContributions<Format> &terms,
                                     const KeysInRange &in_range, const KeySums &table) {
    for (std::int64_t at = in_range.first; at < in_range.stop; ++at) {
        float *const sums = table.memory + terms.keys[at] * w.sizes.columns;
        for (std::int64_t i = 0; i < w.item.heads; ++i) {
            where_positive(w, terms, at, i, [&](float dscore) {
                add_row<false>(row_of<const T>(w.o.q, w.item.seq, i, w.item.row), w.p.dim_qk, dscore, sums);
            });
        }
    }
}

// Adds a row's contributions for a range of keys to their sums. next: contributions that are added next, or null.
template <class Format>
void add_index_gradient(const SparseJob &job, const SparseItem &item, const Contributions &stored,
                        const Contributions *next, const KeyRange &range, const KeySums &table, void *scratch) {
    [[maybe_unused]] const ProductRegion<Format> region;
    const SparseGradientWork<Format> w(job, item, scratch);
    const auto &s = w.s;
    const std::int64_t columns = w.sizes.columns;
    const std::int64_t depth = words_of<Format>(item.heads);
    const IndexContributions<Format> terms(w.p, s, stored.memory);
    const KeysInRange in_range(stored, range);
    PrefetchQueue queue;  // other cores may have written the contributions that are added next
    const auto meanwhile = [&](std::int64_t) __attribute__((always_inline)) { queue.step(); };
    if (next) {
        const IndexContributions<Format> other(w.p, s, next->memory);
        const KeysInRange there(*next, range);
        queue.add(other.q_rows, other.q_words * sizeof *other.q_rows);
        queue.add(other.keys + there.first, there.count() * sizeof *other.keys);
        queue.add(other.given + there.first, there.count() * sizeof *other.given);
        queue.add(other.positive + there.first * s.pitch / 8, there.count() * s.pitch / 8);
        queue.spread(in_range.blocks() * panels_of(columns));
    }
    load_weights(w.p, w.o.weights, item.seq, item.row, s.pitch, s.head_factor);
    by_key_blocks(terms.keys, in_range, table, sum_columns<Format>(w.p), s.nowhere,
                  [&](auto height, std::int64_t at, float *const *sums, float *const *after)
                      __attribute__((always_inline)) {
                          constexpr int M = height();
                          recall_weights(terms, at, M, s);
                          add_block_to_sums<Format, M>(s.dscores, s.head_words, terms.q_rows, depth, sums, after, 0,
                                                       columns, 1.0f, meanwhile);
                      });
    if (!*terms.nonfinite) return;
    by_dtype(w.p.dtype, [&](auto kind) { add_nonfinite_heads<Format, decltype(kind)>(w, terms, in_range, table); });
}

}  // namespace
}  // namespace fusion
