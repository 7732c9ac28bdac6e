// The backward kernel of selected keys: all heads of one row, five products over chunks of its keys in ascending order.
//
//   S = k q^T, dP = v dout^T                                           [key][head]
//   P = exp(S - max) / sum, dS = P * (dP - D)                          from the saved max, sum and out
//   dq += dS^T k                                                       [head][column], private to a thread
//   dk += scale * dS q, dv += P dout                                   stored, and added to sums of keys later
//
// Sums of keys are shared by all rows of a sequence. A row stores P and dS, its contributions; when a batch of rows is
// computed, they are added to a range of keys, row after row. A key's sum thus has the order of rows for any thread,
// and the sums of a range stay in a cache. Start reading at select_gradient() and add_gradient(). The indexer's
// gradient, which has only dq and dk and other weights, is in sparse/index_gradient.h.

#pragma once

#include "dtype_dispatch.h"
#include "simd/softmax_sink_and_nan.h"
#include "sparse/not_finite.h"
#include "sparse/contributions.h"
#include "sparse/list_products.h"

namespace fusion {
namespace {

template <class Format> struct GradientScratch {
    using Word = typename Format::Word;
    static constexpr std::int64_t chunk = 48 * Format::depth, deep = chunk / Format::depth;
    std::int64_t padded_heads, pitch,
        head_words;               // pitch: floats per row of scores; head_words: words per row of weights
    std::uint64_t *list, *spare;  // (key, slot)
    std::int32_t *keys;
    std::uint32_t *histogram;
    Word *q, *dout, *q_rows;           // heads, packed as in sparse/gather.h; q_rows: of the indexer
    Word *rows, *value_rows, *across;  // keys: two blocks, one block, a chunk
    Word *dscores;                     // [key][head_words], of the indexer
    Word *dscore_heads;                // [head][deep]
    float *scores, *dprobs;            // [key][pitch]
    float *dq;                         // [head][columns]
    float *peak, *head_factor, *delta,
        *ones;       // [head]; for the indexer, head_factor has weights and delta sums dweights
    float *given;    // [key], dI of the indexer
    float *nowhere;  // a dummy row of sums that is not read
    float **sums;    // [key]
    std::size_t bytes;

    GradientScratch(const SparseProblem &p, const Sizes<Format> &sizes, std::int64_t heads, void *memory)
        : padded_heads(round_up(heads, head_unit<Format>)), pitch(round_up<std::int64_t>(heads, 2 * lanes)),
          head_words(pitch / Format::depth) {
        const std::int64_t rounded = round_up<std::int64_t>(pitch, block_rows), listed = p.most_keys;
        const bool apart = !p.shares_kv || p.dim_v % Format::depth !=
                                               0;  // an odd number of bfloat16 does not fill words of a key's row
        Carver carver(memory);
        carver.take(q, padded_heads * sizes.words);
        carver.take(dout, padded_heads * sizes.value_words);
        carver.take(q_rows, p.indexes ? padded_heads / Format::depth * sizes.columns : 0);
        carver.take(rows, 2 * block_rows * sizes.words);
        carver.take(value_rows, apart ? block_rows * sizes.value_words : 0);
        carver.take(across, deep * sizes.columns);
        carver.take(dscores, p.indexes ? (chunk + block_rows) * head_words : 0);
        carver.take(dscore_heads, rounded * deep);
        carver.take(scores, chunk * pitch);
        carver.take(dprobs, p.indexes ? 0 : chunk * pitch);
        carver.take(dq, rounded * sizes.columns);
        carver.take(peak, rounded);
        carver.take(head_factor, rounded);
        carver.take(delta, rounded);
        carver.take(ones, rounded);
        carver.take(given, chunk);
        carver.take(nowhere, sizes.columns + sizes.value_columns);
        carver.take(sums, p.indexes ? chunk + 2 * block_rows : 0);
        carver.take(list, listed);
        carver.take(spare, listed);
        carver.take(keys, listed + lanes);
        carver.take(histogram, std::int64_t{1} << digit_bits);
        bytes = carver.bytes();
    }
};

template <class Format> struct SparseGradientWork {  // an item of the backward with its parameters and scratch
    const SparseJob &job;
    const SparseProblem &p;
    const SparseOperands &o;
    const SparseItem &item;
    const Sizes<Format> sizes;
    const GradientScratch<Format> s;
    const bool values_in_keys;  // values are the first words of rows of keys and need no separate rows
    const bool streams;         // blocks are gathered while others are multiplied

    SparseGradientWork(const SparseJob &job_, const SparseItem &item_, void *scratch)
        : job(job_), p(*job.problem), o(*job.operands), item(item_), sizes(p), s(p, sizes, item.heads, scratch),
          values_in_keys(!p.indexes && p.dim_v % Format::depth == 0 && p.dim_v <= p.dim_qk &&
                         (p.shares_kv || same_rows(o.k, o.v, item.seq, item.head_kv))),
          streams(suits_stream<Format>(p) && values_in_keys) {}
};

// Floats per row of sums: dk, its rope part, and dv unless it is added to dk.
template <class Format> std::int64_t sum_columns(const SparseProblem &p) {
    const Sizes<Format> sizes(p);
    return sizes.columns + (p.shares_kv ? 0 : sizes.value_columns);
}

// --------------------------------------------------------------------------------------------------------------- heads

template <class Format, class T>
void load_heads(const SparseGradientWork<Format> &w, typename Format::Word *q_rows,
                typename Format::Word *dout_rows = nullptr) {
    const auto &item = w.item;
    const auto &s = w.s;
    const std::int64_t heads = item.heads, deep = words_of<Format>(heads);
    pack_item_heads<Format, T>(w.p, w.o, item, w.sizes, s.q);
    pack_across<Format>(row_of<const T>(w.o.q, item.seq, item.head0, item.row), w.o.q.stride_head[item.seq], heads,
                        w.p.dim_qk, q_rows);
    if (w.p.dim_rope) {
        pack_across<Format>(row_of<const T>(w.o.q_rope, item.seq, item.head0, item.row),
                            w.o.q_rope.stride_head[item.seq], heads, w.p.dim_rope,
                            q_rows + w.sizes.main_columns * deep);
    }
    if (w.p.indexes) return;
    const T *dout = row_of<const T>(w.o.dout, item.seq, item.head0, item.row);
    pack_heads<Format>(dout, w.o.dout.stride_head[item.seq], heads, w.p.dim_v, w.sizes.value_words, 0,
                       w.sizes.value_words, s.dout);
    pack_across<Format>(dout, w.o.dout.stride_head[item.seq], heads, w.p.dim_v, dout_rows);
}

// Loads the saved statistics; empty or missing heads get head_factor 0 and delta 0.
template <class Format, class T> void load_statistics(const SparseGradientWork<Format> &w, float *dsink) {
    const auto &item = w.item;
    for (std::int64_t i = 0; i < w.s.pitch; ++i) w.s.peak[i] = w.s.head_factor[i] = w.s.delta[i] = 0.0f;
    for (std::int64_t i = 0; i < item.heads; ++i) {
        const std::int64_t head = item.head0 + i;
        const float peak = *row_of<float>(w.o.max, item.seq, head, item.row);
        const float sum = *row_of<float>(w.o.sum, item.seq, head, item.row);
        if (w.p.has_sink) dsink[i] = 0.0f;
        if (peak == -infinity || sum == 0.0f) continue;
        const T *dout = row_of<const T>(w.o.dout, item.seq, head, item.row);
        w.s.peak[i] = peak;
        w.s.head_factor[i] = 1.0f / sum;
        w.s.delta[i] = sum_of(dot_rows(dout, row_of<const T>(w.o.out, item.seq, head, item.row), w.p.dim_v));
        if (w.o.dlse.base) w.s.delta[i] -= *row_of<float>(w.o.dlse, item.seq, head, item.row);
        if (w.p.has_sink) dsink[i] = -w.s.delta[i] * (__builtin_expf(w.o.sink[head] - peak) / sum);
    }
}

// ------------------------------------------------------------------------------------------------------------ weights

// P and dS of one key and a vector of heads; zeros for missing heads. With Careful, a key with a score of -inf gives
// exactly 0, and no other P is 0, because non-finite elements must not vanish if a weight underflows.
template <bool Careful> struct SoftmaxWeights {
    const float *scores, *dprobs;
    const float *peak, *inverse_sum, *delta;
    std::int64_t pitch;
    float natural;

    FUSION_INLINE void operator()(std::int64_t key, std::int64_t h, Floats &prob, Floats &dscore) const {
        const Floats shares = load<Floats>(inverse_sum + h);
        const Floats score = load<Floats>(scores + key * pitch + h) * natural;
        const Floats weight = exp2(below_peak(score, load<Floats>(peak + h)) * log2_e) * shares;
        const Floats apart = load<Floats>(dprobs + key * pitch + h) - load<Floats>(delta + h);
        if constexpr (Careful) {
            const auto hidden = (shares == Floats{}) | (score == all(-infinity));
            const Floats lasting = larger(all(least_weight), weight);
            const Floats product = (not_finite(bits_of(apart)) != 0 ? lasting : weight) * apart;
            prob = hidden ? Floats{} : lasting;
            dscore = hidden ? Floats{} : product;
        } else {
            const Floats product = weight * apart;
            prob = shares == Floats{} ? Floats{} : weight;
            dscore = shares == Floats{} ? Floats{} : product;
        }
    }
};

// Computes weights of a chunk in the formats of the products: s.dscore_heads, and probs and dscores, [key][head_words].
template <class Format, bool Probs, class Weights>
__attribute__((noinline)) void weigh_chunk(const GradientScratch<Format> &s, std::int64_t count, const Weights weights,
                                           typename Format::Word *probs, typename Format::Word *dscores) {
    constexpr int depth = Format::depth;
    const std::int64_t padded = round_up<std::int64_t>(count, lanes * depth);
    for (std::int64_t h = 0; h < s.pitch; h += 2 * lanes) {
        for (std::int64_t c = 0; c < padded; c += lanes * depth) {
            Words block[2][lanes];
            for (int i = 0; i < lanes; ++i) {
                Floats prob[2] = {}, dscore[2][depth] = {};
                FUSION_UNROLL for (int e = 0; e < depth; ++e) {
                    const std::int64_t key = c + i * depth + e;
                    if (key < count) {
                        FUSION_UNROLL for (int u = 0; u < 2; ++u) weights(key, h + u * lanes, prob[u], dscore[u][e]);
                    } else {
                        prob[0] = prob[1] = Floats{};
                    }
                    if constexpr (Probs) Format::store_elements(probs + key * s.head_words, h, prob[0], prob[1]);
                    Format::store_elements(dscores + key * s.head_words, h, dscore[0][e], dscore[1][e]);
                }
                FUSION_UNROLL for (int u = 0; u < 2; ++u) block[u][i] = Format::join(dscore[u]);
            }
            FUSION_UNROLL for (int u = 0; u < 2; ++u) {
                transpose(block[u]);
                auto *const to = s.dscore_heads + (h + u * lanes) * s.deep + c / depth;
                FUSION_UNROLL for (int i = 0; i < lanes; ++i) store(to + i * s.deep, block[u][i]);
            }
        }
    }
}

// ----------------------------------------------------------------------------------------------------- contributions

// The contributions of a row of attention to sums of keys.
template <class Format> struct GradientContributions {
    using Word = typename Format::Word;
    std::int64_t q_words, dout_words, head_words;
    std::int32_t *keys;        // ascending
    Word *q_rows, *dout_rows;  // the row's heads
    Word *probs, *dscores;     // [key][head_words]
    bool *nonfinite;           // true if elements of heads were not finite and have been replaced by zeros
    std::size_t bytes;

    GradientContributions(const SparseProblem &p, const Sizes<Format> &sizes, const GradientScratch<Format> &s,
                          void *memory)
        : q_words(s.padded_heads / Format::depth * sizes.columns),
          dout_words(s.padded_heads / Format::depth * sizes.value_columns), head_words(s.head_words) {
        Carver carver(memory);
        // Weights are computed for complete chunks, and complete blocks are read from any key on.
        const std::int64_t weighed = round_up<std::int64_t>(p.most_keys, s.chunk) + block_rows;
        carver.take(keys, p.most_keys);
        carver.take(q_rows, q_words);
        carver.take(dout_rows, dout_words);
        carver.take(probs, weighed * head_words);
        carver.take(dscores, weighed * head_words);
        carver.take(nonfinite, 1);
        bytes = carver.bytes();
    }
};

// Adds the contributions of non-finite elements of heads to the sums of keys.
template <class Format, class T>
FUSION_RARE void add_nonfinite_heads(const SparseGradientWork<Format> &w, const GradientContributions<Format> &terms,
                                     const KeysInRange &in_range, const KeySums &table) {
    const auto &item = w.item;
    const auto scale = static_cast<float>(w.p.scale);
    for (std::int64_t at = in_range.first; at < in_range.stop; ++at) {
        float *const sums = table.memory + terms.keys[at] * sum_columns<Format>(w.p);
        for (std::int64_t i = 0; i < item.heads; ++i) {
            const float prob = Format::get(terms.probs + at * terms.head_words, i);
            const float dscore = Format::get(terms.dscores + at * terms.head_words, i);
            const auto add = [&](const Rows &rows, std::int64_t n, float weight, std::int64_t column) {
                add_row<false>(row_of<const T>(rows, item.seq, item.head0 + i, item.row), n, weight, sums + column);
            };
            if (prob != 0.0f) add(w.o.dout, w.p.dim_v, prob, w.p.shares_kv ? 0 : w.sizes.columns);
            if (dscore == 0.0f) continue;
            add(w.o.q, w.p.dim_qk, dscore * scale, 0);
            if (w.p.dim_rope) add(w.o.q_rope, w.p.dim_rope, dscore * scale, w.sizes.main_columns);
        }
    }
}

// Adds a row's contributions for a range of keys to their sums. next: contributions that are added next, or null.
template <class Format>
void add_gradient(const SparseJob &job, const SparseItem &item, const Contributions &stored, const Contributions *next,
                  const KeyRange &range, const KeySums &table, void *scratch) {
    [[maybe_unused]] const ProductRegion<Format> region;
    const SparseGradientWork<Format> w(job, item, scratch);
    const auto &s = w.s;
    const std::int64_t main = w.sizes.main_columns, hw = s.head_words;
    const std::int64_t depth = words_of<Format>(item.heads);
    const auto scale = static_cast<float>(w.p.scale);
    const GradientContributions<Format> terms(w.p, w.sizes, s, stored.memory);
    const KeysInRange in_range(stored, range);
    PrefetchQueue queue;  // other cores may have written the contributions that are added next
    const auto meanwhile = [&](std::int64_t) __attribute__((always_inline)) { queue.step(); };
    if (next) {
        const GradientContributions<Format> other(w.p, w.sizes, s, next->memory);
        const KeysInRange there(*next, range);
        queue.add(other.q_rows, other.q_words * sizeof *other.q_rows);
        queue.add(other.dout_rows, other.dout_words * sizeof *other.dout_rows);
        queue.add(other.keys + there.first, there.count() * sizeof *other.keys);
        queue.add(other.dscores + there.first * hw, there.count() * hw * sizeof *other.dscores);
        queue.add(other.probs + there.first * hw, there.count() * hw * sizeof *other.probs);
        queue.spread(in_range.blocks() * (panels_of(w.sizes.columns) + panels_of(w.sizes.value_columns)));
    }
    by_key_blocks(
        terms.keys, in_range, table, sum_columns<Format>(w.p), s.nowhere,
        [&](auto height, std::int64_t at, float *const *sums, float *const *after) __attribute__((always_inline)) {
            constexpr int M = height();
            const auto *dscores = terms.dscores + at * hw;
            add_block_to_sums<Format, M>(dscores, hw, terms.q_rows, depth, sums, after, 0, main, scale, meanwhile);
            if (w.p.dim_rope) {
                add_block_to_sums<Format, M>(dscores, hw, terms.q_rows + main * depth, depth, sums, after, main,
                                             w.sizes.columns - main, scale, meanwhile);
            }
            add_block_to_sums<Format, M>(terms.probs + at * hw, hw, terms.dout_rows, depth, sums, after,
                                         w.p.shares_kv ? 0 : w.sizes.columns, w.sizes.value_columns, 1.0f, meanwhile);
        });
    if (!*terms.nonfinite) return;
    by_dtype(w.p.dtype, [&](auto kind) { add_nonfinite_heads<Format, decltype(kind)>(w, terms, in_range, table); });
}

// ----------------------------------------------------------------------------------------------------- from end to end

// Computes scores of a chunk's keys, and dP from values, which are in the rows of keys or gathered separately.
template <class Format, class T>
void multiply_chunk(const SparseGradientWork<Format> &w, const Chunk &chunk, ListReader<Format, T> &reader) {
    const auto &s = w.s;
    const std::int64_t value_words = w.sizes.value_words;
    const bool apart = !w.values_in_keys;
    reader.score(chunk, s.q, s.scores, s.pitch, s.padded_heads, s.across,
                 [&](std::int64_t at, std::int64_t here, bool streamed) {
                     float *const dprobs = s.dprobs + at * s.pitch;
                     if (streamed)
                         return reader.stream.multiply_first(value_words, s.dout, dprobs, s.pitch, s.padded_heads);
                     for (std::int64_t i = at; apart && i < at + here; i += Format::depth) {
                         gather<Format, T>(w.o.v, w.item, chunk, i, w.p.dim_v, value_words, value_words,
                                           s.value_rows + (i - at) * value_words, nullptr, 0);
                     }
                     if (apart) clear_rows(here, value_words, s.value_rows);
                     by_panels<Format, block_rows, false>(
                         apart ? s.value_rows : s.rows, apart ? value_words : w.sizes.words, s.dout, value_words,
                         value_words, dprobs, s.pitch, s.padded_heads, nullptr, reader.ahead);
                 });
    clear_across<Format>(chunk.count, w.p.dim_qk, s.across, s.deep);
    clear_across<Format>(chunk.count, w.p.dim_rope, s.across + w.sizes.main_columns * s.deep, s.deep);
}

// Adds the contributions of a chunk's keys [0, count) to dq.
template <class Format, class Meanwhile>
void add_dq(const SparseGradientWork<Format> &w, std::int64_t count, const typename Format::Word *across, float *dq,
            Meanwhile &meanwhile) {
    const auto &s = w.s;
    const std::int64_t depth = words_of<Format>(count), main = w.sizes.main_columns;
    const std::int64_t columns = w.sizes.columns;
    add_heads<Format>(s.dscore_heads, s.deep, across, s.deep, depth, dq, columns, main, w.item.heads, s.ones,
                      meanwhile);
    if (!w.p.dim_rope) return;
    add_heads<Format>(s.dscore_heads, s.deep, across + main * s.deep, s.deep, depth, dq + main, columns, columns - main,
                      w.item.heads, s.ones, meanwhile);
}

template <class Format>
void store_head_gradients(const SparseGradientWork<Format> &w, const float *dq, const float *dweights) {
    const auto &item = w.item;
    const float scale = w.p.indexes ? 1.0f : static_cast<float>(w.p.scale);
    with_stored<Format>(w.p.dtype, [&](auto kind) {
        using T = decltype(kind);
        for (std::int64_t i = 0; i < item.heads; ++i, dq += w.sizes.columns) {
            store_scaled(row_of<T>(w.o.dq, item.seq, item.head0 + i, item.row), dq, w.p.dim_qk, scale);
            if (!w.p.dim_rope) continue;
            store_scaled(row_of<T>(w.o.dq_rope, item.seq, item.head0 + i, item.row), dq + w.sizes.main_columns,
                         w.p.dim_rope, scale);
        }
    });
    if (!w.p.indexes) return;
    by_dtype(w.p.weights_dtype, [&](auto kind) {
        store_scaled(row_of<decltype(kind)>(w.o.dweights, item.seq, 0, item.row), dweights, item.heads, 1.0f);
    });
}

// Sorts the keys of a row in ascending order, for the indexer with their slots in its list; returns their number.
template <class Format> std::int64_t sort_keys(const SparseGradientWork<Format> &w, std::uint64_t *&sorted) {
    const std::int64_t count = expand(w.job, w.item, w.s.keys);
    const auto *entries = row_of<const std::int32_t>(w.job.operands->indices, w.item.seq, w.item.head_kv, w.item.row);
    for (std::int64_t i = 0, slot = 0; i < count; ++i, ++slot) {
        while (w.p.indexes && entries[slot] != w.s.keys[i]) ++slot;  // skips entries of hidden keys
        w.s.list[i] = static_cast<std::uint64_t>(w.s.keys[i]) << 32 | static_cast<std::uint64_t>(slot);
    }
    const int bits = bits_for(all_keys(w.job.sequences[w.item.seq]));
    sorted = sort_upward(w.s.list, w.s.spare, count, 32, 32 + bits, w.s.histogram);
    for (std::int64_t i = 0; i < count; ++i) w.s.keys[i] = static_cast<std::int32_t>(sorted[i] >> 32);
    return count;
}

// The same without slots. Keys that occur once, which is nearly always so, are sorted by setting and reading bits.
template <class Format> std::int64_t order_keys(const SparseGradientWork<Format> &w) {
    std::uint32_t *const marks = w.s.histogram;
    const std::int64_t words = (all_keys(w.job.sequences[w.item.seq]) + 31) / 32;
    std::uint64_t *sorted;
    if (words > std::int64_t{1} << digit_bits) return sort_keys(w, sorted);
    const std::int64_t count = expand(w.job, w.item, w.s.keys);
    std::memset(marks, 0, words * sizeof *marks);
    for (std::int64_t i = 0; i < count; ++i) marks[w.s.keys[i] / 32] |= std::uint32_t{1} << w.s.keys[i] % 32;
    std::int64_t marked = 0;
    for (std::int64_t i = 0; i < words; ++i) marked += __builtin_popcount(marks[i]);
    if (marked != count) return sort_keys(w, sorted);
    std::int32_t *to = w.s.keys;
    for (std::int64_t i = 0; i < words; ++i) to = set_bits(marks[i], static_cast<std::int32_t>(32 * i), to);
    return count;
}

// For a row with non-finite elements: computes heads of dq that are NaN again, without keys whose dS is 0, and its
// contributions.
template <class Format, class T>
FUSION_RARE void form_row_anew(const SparseGradientWork<Format> &w, std::int64_t count,
                               const GradientContributions<Format> &left) {
    const std::int64_t columns = w.sizes.columns;
    for (std::int64_t i = 0; i < w.item.heads; ++i) {
        float *const dq = w.s.dq + i * columns;
        if (!any_nan(dq, columns)) continue;
        std::memset(dq, 0, columns * sizeof *dq);
        for (std::int64_t at = 0; at < count; ++at) {
            const float dscore = Format::get(left.dscores + at * left.head_words, i);
            if (dscore == 0.0f) continue;
            const auto add = [&](const Keys &keys, std::int64_t n, float *to) {
                add_row<true>(row_of<T>(keys, w.item.seq, w.item.head_kv, left.keys[at]), n, dscore, to);
            };
            add(w.o.k, w.p.dim_qk, dq);
            if (w.p.dim_rope) add(w.o.k_rope, w.p.dim_rope, dq + w.sizes.main_columns);
        }
    }
    *left.nonfinite = clear_nonfinite<Format>(left.q_rows, w.item.heads, columns);
    *left.nonfinite |= clear_nonfinite<Format>(left.dout_rows, w.item.heads, w.sizes.value_columns);
}

// Computes the weights of a chunk of keys from number `at` of the list on, which are its contributions to sums of keys,
// and adds its contributions to dq; returns true if an element is not finite.
template <class Format>
__attribute__((noinline)) bool weigh_and_add_dq(const SparseGradientWork<Format> &w, std::int64_t at,
                                                std::int64_t count, bool wild_delta,
                                                const GradientContributions<Format> &left, KeyPrefetch &ahead) {
    const auto &s = w.s;
    const bool wild = wild_delta || meets_nonfinite(s.scores, s.pitch, count, s.padded_heads) ||
                      meets_nonfinite(s.dprobs, s.pitch, count, s.padded_heads);
    const auto weigh = [&](auto careful) {
        const SoftmaxWeights<careful()> weights = {
            s.scores, s.dprobs, s.peak, s.head_factor, s.delta, s.pitch, static_cast<float>(w.p.scale)};
        weigh_chunk<Format, true>(s, count, weights, left.probs + at * s.head_words, left.dscores + at * s.head_words);
    };
    if (wild) weigh(std::true_type{});
    else weigh(std::false_type{});
    add_dq(w, count, s.across, s.dq, ahead);
    return wild;
}

// Computes the gradients of a row except sums of keys, whose contributions it stores.
template <class Format>
void select_gradient(const SparseJob &job, const SparseItem &item, const Contributions &stored, float *dsink,
                     void *scratch) {
    [[maybe_unused]] const ProductRegion<Format> region;
    const SparseGradientWork<Format> w(job, item, scratch);
    const auto &s = w.s;
    const GradientContributions<Format> left(w.p, w.sizes, s, stored.memory);
    const std::int64_t count = order_keys(w), rounded = round_up<std::int64_t>(s.pitch, block_rows);
    find_strips(stored, s.keys, count, all_keys(job.sequences[item.seq]));
    std::memcpy(left.keys, s.keys, count * sizeof *s.keys);
    std::memset(s.dq, 0, rounded * w.sizes.columns * sizeof *s.dq);
    for (std::int64_t i = 0; i < rounded; ++i) s.ones[i] = 1.0f;
    const std::int64_t cost =
        s.padded_heads * (w.sizes.words + w.sizes.value_words) + item.heads * w.sizes.columns / Format::depth;
    *left.nonfinite = false;
    with_stored<Format>(w.p.dtype, [&](auto kind) {
        using T = decltype(kind);
        load_statistics<Format, T>(w, dsink);
        if (count) load_heads<Format, T>(w, left.q_rows, left.dout_rows);
        ListReader<Format, T> reader(job, item, w.sizes, s.keys, count, w.streams, s.chunk, cost, s.rows, s.across,
                                     s.deep, w.p.dim_qk + w.p.dim_rope);
        const bool wild_delta = meets_nonfinite(s.delta, 0, 0, s.pitch);
        bool wild = false;
        for (std::int64_t at = 0; at < count; at += s.chunk) {
            const Chunk chunk = {s.keys + at, least<std::int64_t>(s.chunk, count - at), count - at};
            multiply_chunk(w, chunk, reader);
            wild |= weigh_and_add_dq(w, at, chunk.count, wild_delta, left, reader.ahead);
        }
        if (wild) form_row_anew<Format, T>(w, count, left);
    });
    store_head_gradients(w, s.dq, s.delta);
}

template <class Format, class Out>
void store_sums_as(const SparseJob &job, std::int64_t b, std::int64_t head, const KeySums &table, std::int64_t first,
                   std::int64_t end) {
    const SparseProblem &p = *job.problem;
    const SparseOperands &o = *job.operands;
    const Sizes<Format> sizes(p);
    const std::int64_t pitch = sum_columns<Format>(p), kv_len = job.sequences[b].kv_len;
    for (std::int64_t j = first; j < end; ++j) {
        const float *from = table.memory + j * pitch;
        if (j >= kv_len) {
            store_scaled(row_of<Out>(o.dk_compressed, b, head, j - kv_len), from, p.dim_qk, 1.0f);
            if (!p.shares_kv)
                store_scaled(row_of<Out>(o.dv_compressed, b, head, j - kv_len), from + sizes.columns, p.dim_v, 1.0f);
            continue;
        }
        store_scaled(row_of<Out>(o.dk, b, head, j), from, p.dim_qk, 1.0f);
        if (p.dim_rope) store_scaled(row_of<Out>(o.dk_rope, b, head, j), from + sizes.main_columns, p.dim_rope, 1.0f);
        if (p.indexes || p.shares_kv) continue;
        store_scaled(row_of<Out>(o.dv, b, head, j), from + sizes.columns, p.dim_v, 1.0f);
    }
}

// Stores sums of keys [first, end) as rows of gradients.
template <class Format>
void store_sums(const SparseJob &job, std::int64_t b, std::int64_t head, const KeySums &table, std::int64_t first,
                std::int64_t end) {
    const auto store = [&](auto kind) { store_sums_as<Format, decltype(kind)>(job, b, head, table, first, end); };
    if (job.operands->wide_keys) store(float{});
    else with_stored<Format>(job.problem->dtype, store);
}

}  // namespace
}  // namespace fusion
