// The indexer's loss and its three gradients: how far softmax(I) is from the attention's mean over heads, row by row.
//
//   p = sum_h exp(s_h - max_h) / sum_h / N        from the attention's saved statistics, s = scale * q k^T
//   S = k q^T, I = sum_h w_h * max(0, S_h)        of the indexer, [key][head]
//   dI = y - p, dw = sum_j dI * max(0, S), dS = dI * w * [S > 0]
//   dq += dS^T k, dk += dS q                      by sparse_gradient.h, in the order of items
//
// With lists an item is a row: keys are gathered twice, for the scores and for dq, and one key head of the attention is
// met by all its query heads at once (select_loss). Without, an item is a tile of rows, since each head of the attention may
// have keys of its own: p of all rows and a chunk of keys, head by head, then the indexer row by row (tile_loss).

#pragma once

#include "sparse_gradient.h"

namespace fusion {
namespace {

constexpr float least_share = 1e-8f, log_least = -18.4206807f;  // what probabilities are at least, in logarithms

// ln x of normal numbers, to a relative error of 1e-7.
FUSION_INLINE Floats natural_log(Floats x) {
    const Ints bits = (Ints)x, n = (bits - 0x3f3504f3) >> 23;  // x = 2^n * (1 + f), sqrt(1/2) <= 1 + f < sqrt(2)
    const Floats f = floats_of((Words)(bits - (n << 23))) - 1.0f, f2 = f * f;
    const Floats whole = __builtin_convertvector(n, Floats);
    constexpr float c[] = {7.0376836292e-2f, -1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f,
                           -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f};
    Floats p = all(c[0]);
    FUSION_UNROLL for (int i = 1; i < 9; ++i) p = p * f + all(c[i]);
    return whole * 0.693359375f + (f + (f2 * -0.5f + (p * f * f2 + whole * -2.12194440e-4f)));  // ln 2 in two parts
}

// ------------------------------------------------------------------------------------------------- the attention's part

// What makes a product of a head and row a probability; an empty head gives no share.
struct Saved {
    float shift, share;
};

template <class Format>
Saved saved_of(const SparseOperands &o, std::int64_t seq, std::int64_t head, std::int64_t row) {
    const float peak = *row_of<float>(o.max, seq, head, row), sum = *row_of<float>(o.sum, seq, head, row);
    if (peak == -infinity || sum == 0.0f) return {0.0f, 0.0f};
    if (!Format::fused) return {peak, 1.0f / sum};
    return {static_cast<float>(peak * 1.4426950408889634 + __builtin_log2(sum)), 1.0f};
}

template <class Format> struct Probability {
    float natural, factor;

    explicit Probability(const SparseProblem &attention)
        : natural(static_cast<float>(attention.scale)), factor(natural * log2_e) {}

    FUSION_INLINE Floats operator()(Floats product, Floats shift, Floats share) const {
        if constexpr (Format::fused) {
            (void)share;
            return exp2(product * factor - shift);
        } else {
            return exp2<6>((rounded(product * natural) - shift) * log2_e) * share;
        }
    }
};

// 1 / N: the heads without what they give to sinks.
inline float head_share(const SparseProblem &p, const SparseOperands &o, std::int64_t seq, std::int64_t row) {
    auto left = static_cast<double>(p.heads_q);
    for (std::int64_t h = 0; p.has_sink && h < p.heads_q; ++h) {
        const double peak = *row_of<float>(o.max, seq, h, row), sum = *row_of<float>(o.sum, seq, h, row);
        if (peak != -infinity && sum != 0.0) left -= __builtin_exp(o.sink[h] - peak) / sum;
    }
    return static_cast<float>(1.0 / left);
}

// ------------------------------------------------------------------------------------------------- the indexer's part

// I of keys from their products [key][pitch].
inline void weigh_scores(const float *products, std::int64_t pitch, std::int64_t heads, const float *weights,
                         std::int64_t count, float *scores) {
    for (std::int64_t i = 0; i < count; ++i, products += pitch) {
        Floats sum = {};
        for (std::int64_t h = 0; h < heads; h += lanes) {
            const Floats term = larger(Floats{}, load<Floats>(products + h)) * load<Floats>(weights + h);
            // 0 * inf is NaN: a head that is not there may not even count as zeros.
            const Words there = (Words)(lane_numbers() < static_cast<std::int32_t>(heads - h));
            sum += floats_of(bits_of(term) & there);
        }
        scores[i] = sum_of(sum);
    }
}

struct Likelihood {  // y = exp(I - top) * share, ln y = I - top - log_sum
    float top, share, log_sum;
    float head_share;  // 1 / N
    bool clamped;      // p as a factor is clamped too

    Likelihood(float top_, float sum, float head_share_, bool clamped_)
        : top(top_), share(1.0f / sum), log_sum(__builtin_logf(sum)), head_share(head_share_), clamped(clamped_) {}
};

// The softmax of a whole row; behind its scores is room for a vector.
inline Likelihood likelihood_of(float *scores, std::int64_t count, float head_share) {
    store(scores + count, all(-infinity));
    Floats found = all(-infinity), sum = {};
    for (std::int64_t i = 0; i < count; i += lanes) found = larger(found, load<Floats>(scores + i));
    const float top = largest_of(found);
    for (std::int64_t i = 0; i < count; i += lanes) sum += exp2<6>((load<Floats>(scores + i) - top) * log2_e);
    return {top, sum_of(sum), head_share, true};
}

// dI in place of the scores of keys whose probabilities over all heads add up to `target`; returns their loss.
__attribute__((noinline)) inline double judge(float *scores, const float *target, std::int64_t count, const Likelihood y) {
    double loss = 0.0;
    for (std::int64_t i = 0; i < count; i += lanes) {
        const Floats score = load_floats(scores + i, count - i) - y.top;
        const Floats p = load_floats(target + i, count - i) * y.head_share;
        const Floats clamped = larger(all(least_share), p), log_y = larger(all(log_least), score - y.log_sum);
        float terms[lanes];
        store(terms, (y.clamped ? clamped : p) * (natural_log(clamped) - log_y));
        for (std::int64_t k = 0; k < least<std::int64_t>(lanes, count - i); ++k) loss += terms[k];
        store_floats(scores + i, exp2<6>(score * log2_e) * y.share - p, count - i);
    }
    return loss;
}

// ---------------------------------------------------------------------------------------------------------- with lists

template <class Format> struct ListScratch {
    using Word = typename Format::Word;
    static constexpr std::int64_t chunk = 2 * GradientScratch<Format>::chunk;
    std::int64_t pitch;            // of the attention's scores
    Word *q, *rows;                // of one key head's query heads; of a block of keys, of either
    float *scores, *shift, *share; // [key][pitch], [head]
    float *products;               // [key][pitch of the gradient], of the whole list
    float *target, *given;         // [key], of the whole list
    std::size_t bytes;

    ListScratch(const SparseProblem &attention, const SparseProblem &index, std::int64_t index_pitch, std::int64_t longest,
                void *memory)
        : pitch(round_up<std::int64_t>(attention.heads_q / attention.heads_kv, lanes)) {
        const SparseSizes<Format> sizes(attention), own(index);
        const std::int64_t listed = most_keys(index, longest);
        Carver carver(memory);
        carver.take(q, pitch * sizes.words);
        carver.take(rows, block_rows * most(sizes.words, own.words));
        carver.take(scores, chunk * pitch);
        carver.take(shift, pitch);
        carver.take(share, pitch);
        carver.take(products, round_up<std::int64_t>(listed, block_rows) * index_pitch);
        carver.take(target, listed + lanes);
        carver.take(given, listed + lanes);
        bytes = carver.bytes();
    }
};

// Products of a chunk's keys with heads that lie beside each other, to [key][pitch].
template <class Format, class T>
void score_chunk(const SparseJob &job, const SparseItem &item, const Chunk &chunk, const typename Format::Word *q,
                 typename Format::Word *rows, float *to, std::int64_t pitch, std::int64_t columns, Ahead<T> &ahead) {
    const SparseProblem &p = *job.problem;
    const SparseOperands &o = *job.operands;
    const SparseSizes<Format> sizes(p);
    const std::int64_t words = sizes.words, main = sizes.main_words;
    for (std::int64_t at = 0; at < chunk.count; at += block_rows) {
        const std::int64_t here = least<std::int64_t>(block_rows, chunk.count - at);
        for (std::int64_t i = at; i < at + here; i += Format::depth) {
            auto *const row = rows + (i - at) * words;
            gather<Format, T>(o.k, item, chunk, i, p.dim_qk, main, words, row, nullptr, 0);
            if (p.dim_rope) gather<Format, T>(o.k_rope, item, chunk, i, p.dim_rope, words - main, words, row + main, nullptr, 0);
        }
        clear_rows(here, words, rows);
        ahead.gathered(here);
        by_panels<Format, block_rows, false>(rows, words, q, words, words, to + at * pitch, pitch, columns, nullptr, ahead);
    }
}

// Adds what one key head's query heads think of a chunk's keys.
template <class Format>
__attribute__((noinline)) void add_probabilities(const ListScratch<Format> &s, const Probability<Format> probability,
                                                 std::int64_t count, float *target) {
    for (std::int64_t i = 0; i < count; ++i) {
        Floats sum = {};
        for (std::int64_t h = 0; h < s.pitch; h += lanes) {
            const Floats share = load<Floats>(s.share + h);
            const Floats found = probability(load<Floats>(s.scores + i * s.pitch + h), load<Floats>(s.shift + h), share);
            sum += share == Floats{} ? Floats{} : found;
        }
        target[i] += sum_of(sum);
    }
}

// Sums of probabilities over all heads of the attention, of all keys of a list.
template <class Format, class T>
void list_target(const SparseJob &job, const SparseItem &item, const ListScratch<Format> &s, const std::int32_t *keys,
                 std::int64_t count) {
    const SparseProblem &p = *job.problem;
    const SparseOperands &o = *job.operands;
    const SparseSizes<Format> sizes(p);
    const std::int64_t group = p.heads_q / p.heads_kv;
    const Probability<Format> probability(p);
    std::memset(s.target, 0, count * sizeof *s.target);
    for (std::int64_t g = 0; g < p.heads_kv; ++g) {
        const SparseItem own = {item.seq, g, g * group, group, item.row};
        pack_beside<Format>(row_of<const T>(o.q, own.seq, own.head0, own.row), o.q.stride_head[own.seq], group, p.dim_qk,
                            sizes.main_words, 0, sizes.words, s.q);
        if (p.dim_rope) {
            pack_beside<Format>(row_of<const T>(o.q_rope, own.seq, own.head0, own.row), o.q_rope.stride_head[own.seq], group,
                                p.dim_rope, sizes.words - sizes.main_words, sizes.main_words, sizes.words, s.q);
        }
        for (std::int64_t h = 0; h < s.pitch; ++h) {
            const Saved saved = h < group ? saved_of<Format>(o, own.seq, own.head0 + h, own.row) : Saved{0.0f, 0.0f};
            s.shift[h] = saved.shift;
            s.share[h] = saved.share;
        }
        Ahead<T> ahead(job, own, keys, count, s.chunk, s.pitch * sizes.words);
        for (std::int64_t at = 0; at < count; at += s.chunk) {
            const Chunk chunk = {keys + at, least<std::int64_t>(s.chunk, count - at), count - at};
            score_chunk<Format, T>(job, own, chunk, s.q, s.rows, s.scores, s.pitch, s.pitch, ahead);
            add_probabilities(s, probability, chunk.count, s.target + at);
        }
    }
}

// From dI to the gradients, chunk by chunk.
template <class Format, class T>
void descend_list(const Descent<Format> &w, const ListScratch<Format> &list, std::int64_t count, const Turn &turn,
                  const KeySums &table) {
    const auto &s = w.s;
    const std::int64_t last = count ? s.keys[count - 1] : -1;
    Idle idle;
    for (std::int64_t at = 0; at < count; at += s.chunk) {
        const Chunk chunk = {s.keys + at, least<std::int64_t>(s.chunk, count - at), count - at};
        for (std::int64_t i = 0; i < chunk.count; i += Format::depth) {
            gather<Format, T>(w.o.k, w.item, chunk, i, w.p.dim_qk, 0, 0, nullptr, s.across, s.deep);
        }
        const IndexerWeights weights = {list.products + at * s.pitch, list.given + at, s.share, s.delta, s.pitch};
        weigh_chunk<Format, false>(s, chunk.count, round_up<std::int64_t>(chunk.count, lanes * Format::depth), weights);
        add_dq(w, chunk.count, s.dq, idle);
        turn.wait(turn.state, turn.item, chunk.keys[0], chunk.keys[chunk.count - 1]);
        add_keys(w, chunk, table);
        if (chunk.left > chunk.count) turn.done(turn.state, turn.item, chunk.keys[chunk.count], last);
    }
    turn.done(turn.state, turn.item, last + 1, last);
}

template <class Format, class T>
void select_loss(const SparseJob &job, const SparseItem &item, const Turn &turn, const KeySums &table, double *loss,
                 void *scratch) {
    const Descent<Format> w(job, item, scratch);
    const auto &s = w.s;
    const ListScratch<Format> list(*job.attention, w.p, s.pitch, job.sequences[item.seq].kv_len,
                                   static_cast<char *>(scratch) + s.bytes);
    std::uint64_t *sorted;
    const std::int64_t count = sort_keys(w, sorted), rounded = round_up<std::int64_t>(s.pitch, block_rows);
    std::memset(s.dq, 0, rounded * w.sizes.columns * sizeof *s.dq);
    std::memset(s.delta, 0, rounded * sizeof *s.delta);
    for (std::int64_t i = 0; i < rounded; ++i) s.ones[i] = 1.0f;
    *loss = 0.0;
    if (count) {
        turn.done(turn.state, turn.item, s.keys[0], s.keys[count - 1]);
        const SparseJob attention = {job.attention, job.attended, job.sequences};
        list_target<Format, T>(attention, item, list, s.keys, count);
        load_heads<Format, T>(w);
        load_weights(w.p, w.o.weights, item.seq, item.row, s.pitch, s.share);
        Ahead<T> ahead(job, item, s.keys, count, s.chunk, s.padded_heads * w.sizes.words);
        score_chunk<Format, T>(job, item, {s.keys, count, count}, s.q, list.rows, list.products, s.pitch, s.padded_heads, ahead);
        weigh_scores(list.products, s.pitch, item.heads, s.share, count, list.given);
        const float share = head_share(*job.attention, *job.attended, item.seq, item.row);
        *loss = judge(list.given, list.target, count, likelihood_of(list.given, count, share));
    }
    descend_list<Format, T>(w, list, count, turn, table);
    store_head_gradients<Format, T>(w, s.dq, s.delta);
}

// ------------------------------------------------------------------------------------------------------- without lists

// A tile of rows; beside it lies the memory of a gradient, whose heads are those of one row of the indexer.
template <class Format> struct TileScratch {
    using Word = typename Format::Word;
    static constexpr std::int64_t chunk = GradientScratch<Format>::chunk, width = round_up<std::int64_t>(chunk, panel);
    static constexpr std::int64_t rows_at_most = loss_tile_rows + block_rows;
    std::int64_t heads, columns;   // of a row's dq
    Word *q, *keys, *index_rows;   // of one head: [row][word], [key panel][word][key]; of the indexer: [key][word]
    float *scores, *target;        // [block_rows][width], [row][width]
    float *shift, *share;          // [head][row]
    float *head_share;             // [row]
    float *dq, *dweights;          // [row][heads][columns], [row][heads]
    float *sums;                   // [key][columns]
    Word *tame;                    // two rows of the indexer's keys
    std::uint8_t *wild;            // [key]
    std::size_t bytes;

    TileScratch(const SparseProblem &attention, const SparseProblem &index, void *memory)
        : heads(round_up<std::int64_t>(round_up<std::int64_t>(index.heads_q, 2 * lanes), block_rows)),
          columns(SparseSizes<Format>(index).columns) {
        const SparseSizes<Format> sizes(attention), own(index);
        Carver carver(memory);
        carver.take(q, rows_at_most * sizes.words);
        carver.take(keys, width * sizes.words);
        carver.take(index_rows, (chunk + block_rows) * own.words);
        carver.take(scores, block_rows * width);
        carver.take(target, loss_tile_rows * width);
        carver.take(shift, attention.heads_q * loss_tile_rows);
        carver.take(share, attention.heads_q * loss_tile_rows);
        carver.take(head_share, loss_tile_rows);
        carver.take(dq, loss_tile_rows * heads * columns);
        carver.take(dweights, loss_tile_rows * heads);
        carver.take(sums, chunk * columns);
        carver.take(tame, 2 * (columns + lanes));
        carver.take(wild, chunk);
        bytes = carver.bytes();
    }
};

struct Block {  // rows [row0, row1) of a tile, keys [first, end)
    std::int64_t row0, row1, first, end;
};

// What rows of a tile need of the attention's statistics.
template <class Format>
void load_saved(const SparseJob &job, const SparseItem &item, std::int64_t rows, const TileScratch<Format> &t) {
    for (std::int64_t h = 0; h < job.attention->heads_q; ++h) {
        for (std::int64_t r = 0; r < rows; ++r) {
            const Saved saved = saved_of<Format>(*job.attended, item.seq, h, item.row + r);
            t.shift[h * loss_tile_rows + r] = saved.shift;
            t.share[h * loss_tile_rows + r] = saved.share;
        }
    }
    for (std::int64_t r = 0; r < rows; ++r) {
        t.head_share[r] = head_share(*job.attention, *job.attended, item.seq, item.row + r);
    }
}

// Adds what one head thinks of a block's keys; some of them a row may not see, and nobody reads what it thinks of those.
template <class Format>
void add_head(const TileScratch<Format> &t, const Probability<Format> probability, std::int64_t words, const Block &block,
              const float *shift, const float *share) {
    const std::int64_t rows = block.row1 - block.row0, padded = round_up<std::int64_t>(block.end - block.first, panel);
    Idle idle;
    in_blocks(rows, [&](auto height, std::int64_t at) __attribute__((always_inline)) {
        by_panels<Format, height(), false>(t.q + at * words, words, t.keys, words, words, t.scores, t.width, padded, nullptr,
                                           idle);
        for (std::int64_t i = 0; i < least<std::int64_t>(height(), rows - at); ++i) {
            const std::int64_t r = block.row0 + at + i;
            float *const to = t.target + r * t.width;
            for (std::int64_t c = 0; share[r] != 0.0f && c < padded; c += lanes) {
                store(to + c, load<Floats>(to + c) + probability(load<Floats>(t.scores + i * t.width + c), all(shift[r]), all(share[r])));
            }
        }
    });
}

// Sums of probabilities over all heads of the attention, of a block's rows and keys.
template <class Format, class T>
void tile_target(const SparseJob &job, const SparseItem &item, const Block &block, const TileScratch<Format> &t) {
    const SparseProblem &p = *job.attention;
    const SparseOperands &o = *job.attended;
    const SparseSizes<Format> sizes(p);
    const std::int64_t words = sizes.words, main = sizes.main_words, group = p.heads_q / p.heads_kv;
    const std::int64_t rows = block.row1 - block.row0, count = block.end - block.first;
    const Probability<Format> probability(p);
    std::memset(t.target + block.row0 * t.width, 0, rows * t.width * sizeof *t.target);
    std::memset(t.q + rows * words, 0, block_rows * words * sizeof *t.q);
    for (std::int64_t head = 0; head < p.heads_q; ++head) {
        const std::int64_t g = head / group;
        for (std::int64_t at = 0; head % group == 0 && at < count; at += panel) {
            const std::int64_t here = least<std::int64_t>(panel, count - at);
            pack_keys<Format>(row_of<T>(o.k, item.seq, g, block.first + at), o.k.rows.stride_token, here, p.dim_qk, main,
                              t.keys + at * words);
            if (!p.dim_rope) continue;
            pack_keys<Format>(row_of<T>(o.k_rope, item.seq, g, block.first + at), o.k_rope.rows.stride_token, here, p.dim_rope,
                              words - main, t.keys + at * words + main * panel);
        }
        for (std::int64_t r = 0; r < rows; ++r) {
            const std::int64_t row = item.row + block.row0 + r;
            pack_query<Format>(row_of<const T>(o.q, item.seq, head, row), p.dim_qk, main, t.q + r * words);
            if (!p.dim_rope) continue;
            pack_query<Format>(row_of<const T>(o.q_rope, item.seq, head, row), p.dim_rope, words - main, t.q + r * words + main);
        }
        add_head(t, probability, words, block, t.shift + head * loss_tile_rows, t.share + head * loss_tile_rows);
    }
}

// The indexer's keys of a block, as rows and across. Rows that do not see a key have a dS of 0 for it, and 0 * NaN is NaN:
// across there are zeros for elements that are not finite, and their keys are noted.
template <class Format, class T>
void load_index_keys(const Descent<Format> &w, const Block &block, const TileScratch<Format> &t) {
    const std::int64_t words = w.sizes.words, n = w.p.dim_qk, count = block.end - block.first;
    for (std::int64_t i = 0; i < count; i += Format::depth) {
        const T *rows[2] = {};
        for (std::int64_t e = 0; e < Format::depth && i + e < count; ++e) {
            rows[e] = row_of<T>(w.o.k, w.item.seq, 0, block.first + i + e);
            pack_query<Format>(rows[e], n, words, t.index_rows + (i + e) * words);
            t.wild[i + e] = has_wild(rows[e], n);
            if (!t.wild[i + e]) continue;
            T *const tame = reinterpret_cast<T *>(t.tame) + e * (t.columns + lanes);
            for (std::int64_t d = 0; d < n; d += lanes) {
                const Words bits = bits_of(load_floats(rows[e] + d, n - d));
                store_floats(tame + d, floats_of(bits & ~not_finite(bits)), n - d);
            }
            rows[e] = tame;
        }
        put_across<Format>(rows[0], rows[1], n, w.s.across, w.s.deep, i / Format::depth);
    }
    std::memset(t.index_rows + count * words, 0, block_rows * words * sizeof *t.index_rows);
}

// What elements of keys [first, end) of a block that are not finite give to a row's dq.
template <class Format, class T>
__attribute__((noinline)) void add_wild(const Descent<Format> &w, const Block &block, std::int64_t first, std::int64_t end,
                                        const std::uint8_t *wild, float *dq) {
    for (std::int64_t i = first; i < end; ++i) {
        for (std::int64_t h = 0; wild[i] && h < w.item.heads; ++h) {
            const T *k = row_of<T>(w.o.k, w.item.seq, 0, block.first + i);
            const float dscore = Format::get(w.s.dscores + i * w.s.head_words, h);
            for (std::int64_t d = 0; dscore != 0.0f && d < w.p.dim_qk; d += lanes) {
                const Floats value = load_floats(k + d, w.p.dim_qk - d);
                const Words term = bits_of(value * dscore) & not_finite(bits_of(value));
                float *const to = dq + h * w.sizes.columns + d;
                store(to, load<Floats>(to) + floats_of(term));
            }
        }
    }
}

// Row r of a tile meets a block: adds to its dq and dweights and to the block's sums; returns its loss.
template <class Format, class T>
double meet(const SparseJob &job, const SparseItem &tile, const Block &block, std::int64_t r, const TileScratch<Format> &t,
            void *scratch) {
    const Sequence &seq = job.sequences[tile.seq];
    const SparseItem item = {tile.seq, 0, 0, tile.heads, tile.row + r};
    const std::int64_t first = most(first_key(seq, item.row), block.first) - block.first;
    const std::int64_t end = least(end_key(seq, item.row), block.end) - block.first;
    if (end <= first) return 0.0;
    const Descent<Format> w(job, item, scratch);
    const auto &s = w.s;
    const std::int64_t words = w.sizes.words, start = first / block_rows * block_rows;
    float *const dq = t.dq + r * t.heads * t.columns;
    Idle idle;
    load_heads<Format, T>(w);
    load_weights(w.p, w.o.weights, item.seq, item.row, s.pitch, s.share);
    for (std::int64_t at = start; at < end; at += block_rows) {
        by_panels<Format, block_rows, false>(t.index_rows + at * words, words, s.q, words, words, s.scores + at * s.pitch,
                                             s.pitch, s.padded_heads, nullptr, idle);
    }
    std::memset(s.scores, 0, first * s.pitch * sizeof *s.scores);
    std::memset(s.given, 0, first * sizeof *s.given);
    weigh_scores(s.scores + first * s.pitch, s.pitch, item.heads, s.share, end - first, s.given + first);
    const Likelihood y(*row_of<float>(w.o.max, item.seq, 0, item.row), *row_of<float>(w.o.sum, item.seq, 0, item.row),
                       t.head_share[r], false);
    const double loss = judge(s.given + first, t.target + r * t.width + first, end - first, y);
    weigh_chunk<Format, false>(s, end, round_up<std::int64_t>(end, lanes * Format::depth),
                               IndexerWeights{s.scores, s.given, s.share, t.dweights + r * t.heads, s.pitch});
    add_dq(w, end, dq, idle);
    add_wild<Format, T>(w, block, first, end, t.wild, dq);
    for (std::int64_t i = 0; i < round_up<std::int64_t>(end, block_rows) + block_rows; ++i) {
        s.sums[i] = i >= first && i < end ? t.sums + i * t.columns : s.nowhere;
    }
    add_to_keys(w, start, end);
    return loss;
}

template <class Format, class T>
void tile_loss(const SparseJob &job, const SparseItem &item, const Turn &turn, const KeySums &table, double *loss,
               void *scratch) {
    const Sequence &seq = job.sequences[item.seq];
    const Descent<Format> w(job, item, scratch);
    const TileScratch<Format> t(*job.attention, w.p, static_cast<char *>(scratch) + w.s.bytes);
    const std::int64_t rows = least(loss_tile_rows, seq.q_len - item.row);
    const std::int64_t begin = first_key(seq, item.row), end = most<std::int64_t>(end_key(seq, item.row + rows - 1), 0);
    std::memset(t.dq, 0, rows * t.heads * t.columns * sizeof *t.dq);
    std::memset(t.dweights, 0, rows * t.heads * sizeof *t.dweights);
    for (std::int64_t h = 0; h < t.heads; ++h) w.s.ones[h] = 1.0f;
    if (begin < end) load_saved(job, item, rows, t);
    *loss = 0.0;
    for (std::int64_t at = begin; at < end; at += t.chunk) {
        Block block = {0, rows, at, least(at + t.chunk, end)};
        while (block.row0 < rows && end_key(seq, item.row + block.row0) <= block.first) ++block.row0;
        while (block.row1 > block.row0 && first_key(seq, item.row + block.row1 - 1) >= block.end) --block.row1;
        tile_target<Format, T>(job, item, block, t);
        load_index_keys<Format, T>(w, block, t);
        std::memset(t.sums, 0, (block.end - at) * t.columns * sizeof *t.sums);
        for (std::int64_t r = block.row0; r < block.row1; ++r) *loss += meet<Format, T>(job, item, block, r, t, scratch);
        turn.wait(turn.state, turn.item, at, block.end - 1);
        for (std::int64_t i = 0; i < (block.end - at) * t.columns; i += lanes) {
            float *const to = table.memory + at * t.columns + i;
            store(to, load<Floats>(to) + load<Floats>(t.sums + i));
        }
        if (block.end < end) turn.done(turn.state, turn.item, block.end, end - 1);
    }
    turn.done(turn.state, turn.item, end, end - 1);
    for (std::int64_t r = 0; r < rows; ++r) {
        const SparseItem row = {item.seq, 0, 0, item.heads, item.row + r};
        const Descent<Format> own(job, row, scratch);
        store_head_gradients<Format, T>(own, t.dq + r * t.heads * t.columns, t.dweights + r * t.heads);
    }
}

// -------------------------------------------------------------------------------------------------- from end to end

template <class Format>
std::size_t loss_bytes(const SparseProblem &attention, const SparseProblem &index, std::int64_t longest) {
    const GradientScratch<Format> gradient(index, SparseSizes<Format>(index), index.heads_q, longest, nullptr);
    if (!index.select_count) return gradient.bytes + TileScratch<Format>(attention, index, nullptr).bytes;
    return gradient.bytes + ListScratch<Format>(attention, index, gradient.pitch, longest, nullptr).bytes;
}

template <class Format, class T>
void indexer_loss(const SparseJob &job, const SparseItem &item, const Turn &turn, const KeySums &table, double *loss,
                  void *scratch) {
    (job.problem->select_count ? select_loss<Format, T> : tile_loss<Format, T>)(job, item, turn, table, loss, scratch);
}

}  // namespace
}  // namespace fusion
