// The backward of one row, all its heads together: five products over chunks of its selected keys, in ascending order.
//
//   S = k q^T, dP = v dout^T                                           [key][head]
//   P = exp(S - max) / sum, dS = P * (dP - D)                          from the saved max, sum and out
//   dq += dS^T k                                                       [head][column], this thread's own
//   dk += scale * dS q, dv += P dout                                   straight into the keys' rows of sums
//
// Rows of sums are shared by all rows of a sequence: whose turn it is to add to which keys is settled before each
// chunk, so that a key's sum is formed in the order of rows. The indexer's gradient has dq and dk alone and other
// weights in between. Start reading at select_gradient().

#pragma once

#include "sparse/stream.h"

namespace fusion {
namespace {

template <class Format> struct GradientScratch {
    using Word = typename Format::Word;
    static constexpr std::int64_t chunk = 48 * Format::depth, deep = chunk / Format::depth;
    std::int64_t padded_heads, pitch, head_words;  // pitch: floats of a row of scores; head_words: words of its weights
    std::uint64_t *list, *spare;                   // (key, slot)
    std::int32_t *keys;
    std::uint32_t *histogram;
    Word *q, *dout, *q_rows, *dout_rows;  // heads, as sparse/gather.h says
    Word *rows, *value_rows, *across;     // keys: two blocks of them, one block, all of a chunk
    Word *probs, *dscores;                // [key][head_words]
    Word *dscore_heads;                   // [head][deep]
    float *scores, *dprobs;               // [key][pitch]
    float *dq;                            // [head][columns]
    float *peak, *share, *delta, *ones;   // [head]; the indexer's share holds weights, its delta adds up dweights
    float *given;                         // [key], the indexer's
    float *nowhere;                       // a row of sums that nobody reads
    float **sums;                         // [key]
    std::size_t bytes;

    GradientScratch(const SparseProblem &p, const Sizes<Format> &sizes, std::int64_t heads, std::int64_t longest,
                    void *memory)
        : padded_heads(round_up<std::int64_t>(heads, lanes)), pitch(round_up<std::int64_t>(heads, 2 * lanes)),
          head_words(pitch / Format::depth) {
        const std::int64_t rounded = round_up<std::int64_t>(pitch, block_rows), listed = most_keys(p, longest);
        const bool apart = !p.shares_kv || p.dim_v % Format::depth != 0;  // half a word is no part of a key's row
        Carver carver(memory);
        carver.take(q, padded_heads * sizes.words);
        carver.take(dout, padded_heads * sizes.value_words);
        carver.take(q_rows, padded_heads / Format::depth * sizes.columns);
        carver.take(dout_rows, padded_heads / Format::depth * sizes.value_columns);
        carver.take(rows, 2 * block_rows * sizes.words);
        carver.take(value_rows, apart ? block_rows * sizes.value_words : 0);
        carver.take(across, deep * sizes.columns);
        carver.take(probs, chunk * head_words);
        carver.take(dscores, chunk * head_words);
        carver.take(dscore_heads, rounded * deep);
        carver.take(scores, chunk * pitch);
        carver.take(dprobs, p.indexes ? 0 : chunk * pitch);
        carver.take(dq, rounded * sizes.columns);
        carver.take(peak, rounded);
        carver.take(share, rounded);
        carver.take(delta, rounded);
        carver.take(ones, rounded);
        carver.take(given, chunk);
        carver.take(nowhere, sizes.columns + sizes.value_columns);
        carver.take(sums, chunk + 2 * block_rows);
        carver.take(list, listed);
        carver.take(spare, listed);
        carver.take(keys, listed + lanes);
        carver.take(histogram, std::int64_t{1} << digit_bits);
        bytes = carver.bytes();
    }
};

template <class Format> struct SparseGradientWork {  // an item of the backward and all that it needs
    const SparseJob &job;
    const SparseProblem &p;
    const SparseOperands &o;
    const SparseItem &item;
    const Sizes<Format> sizes;
    const GradientScratch<Format> s;
    const bool values_in_keys;  // values are the first words of keys' rows: they need no rows of their own
    const bool streams;         // blocks are gathered while others are multiplied

    SparseGradientWork(const SparseJob &job_, const SparseItem &item_, void *scratch)
        : job(job_), p(*job.problem), o(*job.operands), item(item_), sizes(p),
          s(p, sizes, item.heads, job.sequences[item.seq].kv_len, scratch),
          values_in_keys(!p.indexes && p.dim_v % Format::depth == 0 && p.dim_v <= p.dim_qk &&
                         (p.shares_kv || same_rows(o.k, o.v, item.seq, item.head_kv))),
          streams(suits_stream<Format>(p) && (values_in_keys || p.indexes)) {}
};

// Floats of a row of sums: dk, its rope tail, and dv unless dk receives it.
template <class Format> std::int64_t sum_columns(const SparseProblem &p) {
    const Sizes<Format> sizes(p);
    return sizes.columns + (p.shares_kv ? 0 : sizes.value_columns);
}

// --------------------------------------------------------------------------------------------------------------- heads

template <class Format, class T> void load_heads(const SparseGradientWork<Format> &w) {
    const auto &item = w.item;
    const auto &s = w.s;
    const std::int64_t heads = item.heads, deep = (heads + Format::depth - 1) / Format::depth;
    pack_item_heads<Format, T>(w.p, w.o, item, w.sizes, s.q);
    pack_across<Format>(row_of<const T>(w.o.q, item.seq, item.head0, item.row), w.o.q.stride_head[item.seq], heads,
                        w.p.dim_qk, s.q_rows);
    if (w.p.dim_rope) {
        pack_across<Format>(row_of<const T>(w.o.q_rope, item.seq, item.head0, item.row),
                            w.o.q_rope.stride_head[item.seq], heads, w.p.dim_rope,
                            s.q_rows + w.sizes.main_columns * deep);
    }
    if (w.p.indexes) return;
    const T *dout = row_of<const T>(w.o.dout, item.seq, item.head0, item.row);
    pack_heads<Format>(dout, w.o.dout.stride_head[item.seq], heads, w.p.dim_v, w.sizes.value_words, 0,
                       w.sizes.value_words, s.dout);
    pack_across<Format>(dout, w.o.dout.stride_head[item.seq], heads, w.p.dim_v, s.dout_rows);
}

// The saved statistics; heads that are empty or not there have a share of 0, and delta 0.
template <class Format, class T> void load_statistics(const SparseGradientWork<Format> &w, float *dsink) {
    const auto &item = w.item;
    for (std::int64_t i = 0; i < w.s.pitch; ++i) w.s.peak[i] = w.s.share[i] = w.s.delta[i] = 0.0f;
    for (std::int64_t i = 0; i < item.heads; ++i) {
        const std::int64_t head = item.head0 + i;
        const float peak = *row_of<float>(w.o.max, item.seq, head, item.row);
        const float sum = *row_of<float>(w.o.sum, item.seq, head, item.row);
        if (w.p.has_sink) dsink[i] = 0.0f;
        if (peak == -infinity || sum == 0.0f) continue;
        const T *dout = row_of<const T>(w.o.dout, item.seq, head, item.row);
        w.s.peak[i] = peak;
        w.s.share[i] = 1.0f / sum;
        w.s.delta[i] = sum_of(dot_rows(dout, row_of<const T>(w.o.out, item.seq, head, item.row), w.p.dim_v));
        if (w.p.has_sink) dsink[i] = -w.s.delta[i] * (__builtin_expf(w.o.sink[head] - peak) / sum);
    }
}

// ------------------------------------------------------------------------------------------------------------ weights

// Of one key and one vector of heads: P and dS; what is not there gives zeros.
struct SoftmaxWeights {
    const float *scores, *dprobs;
    const float *peak, *share, *delta;
    std::int64_t pitch;
    float natural;

    FUSION_INLINE void operator()(std::int64_t key, std::int64_t h, Floats &prob, Floats &dscore) const {
        const Floats shares = load<Floats>(share + h);
        // The product is rounded as the saved maximum was, so that their difference is exact.
        const Floats score = rounded(load<Floats>(scores + key * pitch + h) * natural);
        const Floats weight = exp2((score - load<Floats>(peak + h)) * log2_e) * shares;
        prob = shares == Floats{} ? Floats{} : weight;
        const Floats found = weight * (load<Floats>(dprobs + key * pitch + h) - load<Floats>(delta + h));
        dscore = shares == Floats{} ? Floats{} : found;
    }
};

// dS = dvalue * weight where the score is positive, and dweight += dvalue * score there.
struct IndexerWeights {
    const float *scores, *given, *weights;
    float *dweights;
    std::int64_t pitch;

    FUSION_INLINE void operator()(std::int64_t key, std::int64_t h, Floats &, Floats &dscore) const {
        const Floats score = load<Floats>(scores + key * pitch + h), dvalue = all(given[key]);
        store(dweights + h, load<Floats>(dweights + h) + dvalue * larger(Floats{}, score));
        dscore = score > Floats{} ? dvalue * load<Floats>(weights + h) : Floats{};
    }
};

// Weights of a chunk in the forms that the products want; `padded` keys, of which `count` are there.
template <class Format, bool Probs, class Weights>
__attribute__((noinline)) void weigh_chunk(const GradientScratch<Format> &s, std::int64_t count, std::int64_t padded,
                                           const Weights weights) {
    constexpr int depth = Format::depth;
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
                    if constexpr (Probs) Format::store_elements(s.probs + key * s.head_words, h, prob[0], prob[1]);
                    Format::store_elements(s.dscores + key * s.head_words, h, dscore[0][e], dscore[1][e]);
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

// ------------------------------------------------------------------------------------------------------------- sums

// Adds factor * A[M][depth] * B to rows of sums, wherever they lie; rows of the block after it are asked for.
template <class Format, int M>
__attribute__((noinline)) void add_block_to_sums(const typename Format::Word *a, std::int64_t a_stride,
                                                 const typename Format::Word *b, std::int64_t depth, float *const *sums,
                                                 std::int64_t first, std::int64_t columns, float factor) {
    for_panels(columns, [&](auto vectors, std::int64_t d) __attribute__((always_inline)) {
        constexpr int N = vectors();
        RegisterTile<Format, M, N> tile;
        const auto *rows = b + d * depth;
        for (int third = 0; third < 3; ++third) {  // more requests at a time than a core can follow up would stop it
            for (int i = third * M / 3; i < (third + 1) * M / 3; ++i) {
                for (int j = 0; j < N * lanes; j += 16) __builtin_prefetch(sums[M + i] + first + d + j, 1);
            }
            rows = tile.add(depth * third / 3, depth * (third + 1) / 3, RowMajor<typename Format::Word>{a, a_stride},
                            rows, N * lanes);
        }
        tile.each([&](int i, int j, Floats sum) __attribute__((always_inline)) {
            float *const to = sums[i] + first + d + j * lanes;
            store(to, load<Floats>(to) + sum * factor);
        });
    });
}

// Adds what keys [first, end) of a chunk give to the rows that s.sums names; first is a multiple of block_rows.
template <class Format> void add_to_keys(const SparseGradientWork<Format> &w, std::int64_t first, std::int64_t end) {
    const auto &s = w.s;
    const std::int64_t depth = (w.item.heads + Format::depth - 1) / Format::depth, main = w.sizes.main_columns;
    const float scale = w.p.indexes ? 1.0f : static_cast<float>(w.p.scale);
    for (std::int64_t at = first; at < end; at += block_rows) {
        const auto *dscores = s.dscores + at * s.head_words;
        float *const *sums = s.sums + at;
        add_block_to_sums<Format, block_rows>(dscores, s.head_words, s.q_rows, depth, sums, 0, main, scale);
        if (w.p.dim_rope) {
            add_block_to_sums<Format, block_rows>(dscores, s.head_words, s.q_rows + main * depth, depth, sums, main,
                                                  w.sizes.columns - main, scale);
        }
        if (w.p.indexes) continue;
        add_block_to_sums<Format, block_rows>(s.probs + at * s.head_words, s.head_words, s.dout_rows, depth, sums,
                                              w.p.shares_kv ? 0 : w.sizes.columns, w.sizes.value_columns, 1.0f);
    }
}

template <class Format> void add_keys(const SparseGradientWork<Format> &w, const Chunk &chunk, const KeySums &table) {
    const std::int64_t pitch = sum_columns<Format>(w.p), padded = round_up<std::int64_t>(chunk.count, block_rows);
    for (std::int64_t i = 0; i < padded + block_rows; ++i) {
        w.s.sums[i] = i < chunk.count ? table.memory + chunk.keys[i] * pitch : w.s.nowhere;
    }
    add_to_keys(w, 0, chunk.count);
}

// ----------------------------------------------------------------------------------------------------- from end to end

// Scores of a chunk's keys, and dP, whose operand are values: keys' own rows, or gathered beside them.
template <class Format, class T>
void multiply_chunk(const SparseGradientWork<Format> &w, const Chunk &chunk, ListReader<Format, T> &reader) {
    const auto &s = w.s;
    const std::int64_t value_words = w.sizes.value_words;
    const bool apart = !w.values_in_keys;
    reader.score(chunk, s.q, s.scores, s.pitch, s.padded_heads, s.across,
                 [&](std::int64_t at, std::int64_t here, bool streamed) {
                     if (w.p.indexes) return;
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
}

template <class Format> void weigh_keys(const SparseGradientWork<Format> &w, const Chunk &chunk) {
    const auto &s = w.s;
    const std::int64_t padded = round_up<std::int64_t>(chunk.count, lanes * Format::depth);
    if (w.p.indexes) {
        weigh_chunk<Format, false>(s, chunk.count, padded,
                                   IndexerWeights{s.scores, s.given, s.share, s.delta, s.pitch});
        return;
    }
    const SoftmaxWeights weights = {
        s.scores, s.dprobs, s.peak, s.share, s.delta, s.pitch, static_cast<float>(w.p.scale)};
    weigh_chunk<Format, true>(s, chunk.count, padded, weights);
}

// Adds what a chunk's keys [0, count) give to dq.
template <class Format, class Meanwhile>
void add_dq(const SparseGradientWork<Format> &w, std::int64_t count, const typename Format::Word *across, float *dq,
            Meanwhile &meanwhile) {
    const auto &s = w.s;
    const std::int64_t depth = (count + Format::depth - 1) / Format::depth, main = w.sizes.main_columns;
    const std::int64_t columns = w.sizes.columns;
    add_heads<Format>(s.dscore_heads, s.deep, across, s.deep, depth, dq, columns, main, w.item.heads, s.ones,
                      meanwhile);
    if (!w.p.dim_rope) return;
    add_heads<Format>(s.dscore_heads, s.deep, across + main * s.deep, s.deep, depth, dq + main, columns, columns - main,
                      w.item.heads, s.ones, meanwhile);
}

template <class Format, class T>
void store_head_gradients(const SparseGradientWork<Format> &w, const float *dq, const float *dweights) {
    const auto &item = w.item;
    const float scale = w.p.indexes ? 1.0f : static_cast<float>(w.p.scale);
    for (std::int64_t i = 0; i < item.heads; ++i, dq += w.sizes.columns) {
        store_scaled(row_of<T>(w.o.dq, item.seq, item.head0 + i, item.row), dq, w.p.dim_qk, scale);
        if (!w.p.dim_rope) continue;
        store_scaled(row_of<T>(w.o.dq_rope, item.seq, item.head0 + i, item.row), dq + w.sizes.main_columns,
                     w.p.dim_rope, scale);
    }
    if (!w.p.indexes) return;
    by_dtype(w.p.weights_dtype, [&](auto kind) {
        store_scaled(row_of<decltype(kind)>(w.o.dweights, item.seq, 0, item.row), dweights, item.heads, 1.0f);
    });
}

// The keys of the row in ascending order, and (an indexer's) their slots in its list; returns their number.
template <class Format> std::int64_t sort_keys(const SparseGradientWork<Format> &w, std::uint64_t *&sorted) {
    const std::int64_t count = expand(w.job, w.item, w.s.keys);
    const auto *entries = row_of<const std::int32_t>(w.job.operands->indices, w.item.seq, w.item.head_kv, w.item.row);
    for (std::int64_t i = 0, slot = 0; i < count; ++i, ++slot) {
        while (w.p.indexes && entries[slot] != w.s.keys[i]) ++slot;  // passes over entries that the row does not see
        w.s.list[i] = static_cast<std::uint64_t>(w.s.keys[i]) << 32 | static_cast<std::uint64_t>(slot);
    }
    const int bits = bits_for(w.job.sequences[w.item.seq].kv_len);
    sorted = sort_upward(w.s.list, w.s.spare, count, 32, 32 + bits, w.s.histogram);
    for (std::int64_t i = 0; i < count; ++i) w.s.keys[i] = static_cast<std::int32_t>(sorted[i] >> 32);
    return count;
}

// The same where places do not matter: keys listed once, as nearly always, are marked and read off.
template <class Format> std::int64_t order_keys(const SparseGradientWork<Format> &w) {
    std::uint32_t *const marks = w.s.histogram;
    const std::int64_t words = (w.job.sequences[w.item.seq].kv_len + 31) / 32;
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

template <class Format, class T>
void select_gradient(const SparseJob &job, const SparseItem &item, const Turn &turn, const KeySums &table, float *dsink,
                     void *scratch) {
    const SparseGradientWork<Format> w(job, item, scratch);
    const auto &s = w.s;
    std::uint64_t *sorted;
    const std::int64_t count = sort_keys(w, sorted);
    const std::int64_t rounded = round_up<std::int64_t>(s.pitch, block_rows);
    std::memset(s.dq, 0, rounded * w.sizes.columns * sizeof *s.dq);
    if (!w.p.indexes) {
        load_statistics<Format, T>(w, dsink);
    } else {
        load_weights(w.p, w.o.weights, item.seq, item.row, s.pitch, s.share);
        std::memset(s.delta, 0, rounded * sizeof *s.delta);
    }
    if (count) load_heads<Format, T>(w);
    for (std::int64_t i = 0; i < rounded; ++i) s.ones[i] = 1.0f;
    const std::int64_t last = count ? s.keys[count - 1] : -1;
    const std::int64_t cost =
        s.padded_heads * (w.sizes.words + w.sizes.value_words) + item.heads * w.sizes.columns / Format::depth;
    ListReader<Format, T> reader(job, item, w.sizes, s.keys, count, w.streams, s.chunk, cost, s.rows, s.across, s.deep,
                                 w.p.dim_qk + w.p.dim_rope);
    for (std::int64_t at = 0; at < count; at += s.chunk) {
        const Chunk chunk = {s.keys + at, least<std::int64_t>(s.chunk, count - at), count - at};
        multiply_chunk(w, chunk, reader);
        if (w.p.indexes) {
            const T *given = row_of<const T>(w.o.dout, item.seq, 0, item.row);
            for (std::int64_t i = 0; i < chunk.count; ++i) {
                s.given[i] = load_floats(given + static_cast<std::uint32_t>(sorted[at + i]), 1)[0];
            }
        }
        weigh_keys(w, chunk);
        const std::int64_t pitch = sum_columns<Format>(w.p);
        for (std::int64_t i = 0; i < least<std::int64_t>(block_rows, chunk.count); ++i) {
            prefetch(table.memory + chunk.keys[i] * pitch, pitch);
        }
        add_dq(w, chunk.count, s.across, s.dq, reader.ahead);
        if (!turn.wait(turn.state, turn.item, chunk.keys[0], chunk.keys[chunk.count - 1])) return;
        add_keys(w, chunk, table);
        if (chunk.left > chunk.count) turn.done(turn.state, turn.item, chunk.keys[chunk.count], last);
    }
    turn.done(turn.state, turn.item, last + 1, last);
    store_head_gradients<Format, T>(w, s.dq, s.delta);
}

// Sums of keys [first, end) as the gradients' rows.
template <class Format, class T>
void store_sums(const SparseJob &job, std::int64_t b, std::int64_t head, const KeySums &table, std::int64_t first,
                std::int64_t end) {
    const SparseProblem &p = *job.problem;
    const SparseOperands &o = *job.operands;
    const Sizes<Format> sizes(p);
    const std::int64_t pitch = sum_columns<Format>(p);
    for (std::int64_t j = first; j < end; ++j) {
        const float *from = table.memory + j * pitch;
        store_scaled(row_of<T>(o.dk, b, head, j), from, p.dim_qk, 1.0f);
        if (p.dim_rope) store_scaled(row_of<T>(o.dk_rope, b, head, j), from + sizes.main_columns, p.dim_rope, 1.0f);
        if (!p.indexes && !p.shares_kv) store_scaled(row_of<T>(o.dv, b, head, j), from + sizes.columns, p.dim_v, 1.0f);
    }
}

}  // namespace
}  // namespace fusion
