// The indexer's loss over all visible keys of a band: sparse/loss.h without lists.
//
// An item is a tile of rows, because heads of the attention may have different keys. First p is computed for all rows
// and a block of keys, head by head; then the indexer, whose heads share keys, row by row with chunks of this block. No
// array has the size of all rows times all keys. Start reading at tile_loss().

#pragma once

#include "sparse/loss.h"

namespace fusion {
namespace {

// Scratch of a tile of rows, in addition to the GradientScratch of one row of the indexer.
template <class Format> struct TileScratch {
    using Word = typename Format::Word;
    static constexpr std::int64_t chunk = GradientScratch<Format>::chunk,
                                  width = 192;  // keys per chunk of the indexer, keys per block
    static constexpr std::int64_t rows_at_most = loss_tile_rows + block_rows;
    std::int64_t heads, columns;  // sizes of a row's dq
    Word *q, *keys, *index_rows;  // of one head: [row][word], [key panel][word][key]; of the indexer: [key][word]
    float *scores, *target;       // [block_rows][width], [row][width]
    float *shift, *inverse_sum;   // [head][row]
    float *head_share, *mass;     // [row]: 1 / N, sum of the caller's target
    float *dq, *dweights;         // [row][heads][columns], [row][heads]
    float *sums;                  // [key][columns]
    Word *finite;                 // two rows of the indexer's keys
    std::uint8_t *nonfinite;      // [key]
    std::size_t bytes;

    TileScratch(const SparseProblem &attention, const SparseProblem &index, void *memory)
        : heads(round_up<std::int64_t>(round_up<std::int64_t>(index.heads_q, 2 * lanes), block_rows)),
          columns(Sizes<Format>(index).columns) {
        const Sizes<Format> sizes(attention), index_sizes(index);
        Carver carver(memory);
        carver.take(q, rows_at_most * sizes.words);
        carver.take(keys, width * sizes.words);
        carver.take(index_rows, (chunk + block_rows) * index_sizes.words);
        carver.take(scores, block_rows * width);
        carver.take(target, loss_tile_rows * width);
        carver.take(shift, attention.heads_q * loss_tile_rows);
        carver.take(inverse_sum, attention.heads_q * loss_tile_rows);
        carver.take(head_share, loss_tile_rows);
        carver.take(mass, loss_tile_rows);
        carver.take(dq, loss_tile_rows * heads * columns);
        carver.take(dweights, loss_tile_rows * heads);
        carver.take(sums, chunk * columns);
        carver.take(finite, 2 * (columns + lanes));
        carver.take(nonfinite, chunk);
        bytes = carver.bytes();
    }
};

struct TileBlock {  // rows [row0, row1) of a tile, keys [first, end)
    std::int64_t row0, row1, first, end;
};

// The sum of the caller's target of a row over its visible keys.
inline float sum_of_target(const SparseJob &job, std::int64_t b, std::int64_t row) {
    const Sequence &seq = job.sequences[b];
    const float *const given = row_of<const float>(job.operands->target, b, 0, row);
    double sum = 0.0;
    for (std::int64_t j = first_key(seq, row); j < end_key(*job.problem, seq, row); ++j) sum += given[j];
    return static_cast<float>(sum);
}

// Loads the attention's statistics for the rows of a tile, or the sums of the caller's target.
template <class Format>
void load_saved(const SparseJob &job, const SparseItem &item, std::int64_t rows, const TileScratch<Format> &t) {
    for (std::int64_t h = 0; h < job.attention->heads_q; ++h) {
        for (std::int64_t r = 0; r < rows; ++r) {
            const Saved saved = saved_of<Format>(*job.attended, item.seq, h, item.row + r);
            t.shift[h * loss_tile_rows + r] = saved.shift;
            t.inverse_sum[h * loss_tile_rows + r] = saved.inverse_sum;
        }
    }
    for (std::int64_t r = 0; r < rows; ++r) {
        const std::int64_t row = item.row + r;
        t.mass[r] = t.head_share[r] = 1.0f;
        if (job.attention->heads_q) t.head_share[r] = head_share(*job.attention, *job.attended, item.seq, row);
        else if (!job.problem->unit_target) t.mass[r] = sum_of_target(job, item.seq, row);
    }
}

// Adds the probabilities of a block's keys in one head; those of keys that are hidden from a row are not used.
template <class Format>
void add_head(const TileScratch<Format> &t, const Probability<Format> probability, std::int64_t words,
              const TileBlock &block, const float *shift, const float *inverse_sum, PrefetchQueue &next_head) {
    const std::int64_t rows = block.row1 - block.row0, padded = round_up<std::int64_t>(block.end - block.first, panel);
    next_head.spread((rows + block_rows - 1) / block_rows * (padded / panel));
    const auto meanwhile = [&](std::int64_t) __attribute__((always_inline)) { next_head.step(); };
    in_blocks(rows, [&](auto height, std::int64_t at) __attribute__((always_inline)) {
        by_panels<Format, height(), false>(t.q + at * words, words, t.keys, words, words, t.scores, t.width, padded,
                                           nullptr, meanwhile);
        for (std::int64_t i = 0; i < least<std::int64_t>(height(), rows - at); ++i) {
            const std::int64_t r = block.row0 + at + i;
            float *const to = t.target + r * t.width;
            // Copies, because the compiler must assume that stores may change the arrays.
            const float row_shift = shift[r], row_share = inverse_sum[r];
            for (std::int64_t c = 0; row_share != 0.0f && c < padded; c += lanes) {
                const Floats product = load<Floats>(t.scores + i * t.width + c);
                store(to + c, load<Floats>(to + c) + probability(product, all(row_shift), all(row_share)));
            }
        }
    });
}

// Computes the sums of probabilities over all heads of the attention, for a block's rows and keys.
template <class Format, class T>
void tile_target(const SparseJob &job, const SparseItem &item, const TileBlock &block, const TileScratch<Format> &t) {
    const SparseProblem &p = *job.attention;
    const SparseOperands &o = *job.attended;
    const Sizes<Format> sizes(p);
    const std::int64_t words = sizes.words, main = sizes.main_words, group = p.heads_q / p.heads_kv;
    const std::int64_t rows = block.row1 - block.row0, count = block.end - block.first;
    const Probability<Format> probability(p);
    std::memset(t.target + block.row0 * t.width, 0, rows * t.width * sizeof *t.target);
    std::memset(t.q + rows * words, 0, block_rows * words * sizeof *t.q);
    for (std::int64_t head = 0; head < p.heads_q; ++head) {
        const std::int64_t g = head / group;
        for (std::int64_t at = 0; head % group == 0 && at < count; at += panel) {
            const std::int64_t here = least<std::int64_t>(panel, count - at);
            pack_keys<Format>(row_of<T>(o.k, item.seq, g, block.first + at), o.k.rows.stride_token, here, p.dim_qk,
                              main, t.keys + at * words);
            if (!p.dim_rope) continue;
            pack_keys<Format>(row_of<T>(o.k_rope, item.seq, g, block.first + at), o.k_rope.rows.stride_token, here,
                              p.dim_rope, words - main, t.keys + at * words + main * panel);
        }
        for (std::int64_t r = 0; r < rows; ++r) {
            const std::int64_t row = item.row + block.row0 + r;
            pack_query<Format>(row_of<const T>(o.q, item.seq, head, row), p.dim_qk, main, t.q + r * words);
            if (!p.dim_rope) continue;
            pack_query<Format>(row_of<const T>(o.q_rope, item.seq, head, row), p.dim_rope, words - main,
                               t.q + r * words + main);
        }
        PrefetchQueue next;  // in most layouts rows of a head are far apart
        if (head + 1 < p.heads_q) {
            next.add(prefetch_rows<T>(o.q, item.seq, head + 1, item.row + block.row0, rows, p.dim_qk));
            next.add(prefetch_rows<T>(o.q_rope, item.seq, head + 1, item.row + block.row0, rows, p.dim_rope));
        }
        if (head + 1 < p.heads_q && (head + 1) % group == 0) {
            next.add(prefetch_rows<T>(o.k.rows, item.seq, g + 1, block.first, count, p.dim_qk));
            next.add(prefetch_rows<T>(o.k_rope.rows, item.seq, g + 1, block.first, count, p.dim_rope));
        }
        add_head(t, probability, words, block, t.shift + head * loss_tile_rows, t.inverse_sum + head * loss_tile_rows,
                 next);
    }
    for (std::int64_t r = block.row0; r < block.row1; ++r) {
        form_target_anew<T>(p, o, item.seq, item.row + r, t.target + r * t.width, count, block.first, nullptr);
    }
}

// Copies the caller's target of a block's rows and keys; elements of hidden keys are not read.
template <class Format>
void take_target(const SparseJob &job, const SparseItem &item, const TileBlock &block, const TileScratch<Format> &t) {
    const Sequence &seq = job.sequences[item.seq];
    for (std::int64_t r = block.row0; r < block.row1; ++r) {
        const float *const given = row_of<const float>(job.operands->target, item.seq, 0, item.row + r);
        const std::int64_t first = most(first_key(seq, item.row + r), block.first);
        const std::int64_t end = least(end_key(*job.problem, seq, item.row + r), block.end);
        for (std::int64_t j = first; j < end; ++j) t.target[r * t.width + j - block.first] = given[j];
    }
}

// Loads the indexer's keys of a block, as rows and transposed. dS of hidden keys is 0, and 0 * NaN is NaN, so the
// transposed keys have zeros for non-finite elements, and such keys are flagged.
template <class Format, class T>
void load_index_keys(const SparseGradientWork<Format> &w, const TileBlock &block, const TileScratch<Format> &t) {
    const std::int64_t words = w.sizes.words, n = w.p.dim_qk, count = block.end - block.first;
    for (std::int64_t i = 0; i < count; i += Format::depth) {
        const T *rows[2] = {};
        for (std::int64_t e = 0; e < Format::depth && i + e < count; ++e) {
            rows[e] = row_of<T>(w.o.k, w.item.seq, 0, block.first + i + e);
            pack_query<Format>(rows[e], n, words, t.index_rows + (i + e) * words);
            t.nonfinite[i + e] = has_nonfinite(rows[e], n);
            if (!t.nonfinite[i + e]) continue;
            T *const finite = reinterpret_cast<T *>(t.finite) + e * (t.columns + lanes);
            for (std::int64_t d = 0; d < n; d += lanes) {
                const Words bits = bits_of(load_floats(rows[e] + d, n - d));
                store_floats(finite + d, floats_of(bits & ~not_finite(bits)), n - d);
            }
            rows[e] = finite;
        }
        store_across<Format>(rows[0], rows[1], n, w.s.across, w.s.deep, i / Format::depth);
    }
    clear_across<Format>(count, n, w.s.across, w.s.deep);
    std::memset(t.index_rows + count * words, 0, block_rows * words * sizeof *t.index_rows);
}

// Adds the contributions of non-finite elements of a block's keys [first, end) and of a row's heads to the row's dq and
// to the block's sums.
template <class Format, class T>
FUSION_RARE void add_nonfinite_elements(const SparseGradientWork<Format> &w, const TileBlock &block, std::int64_t first,
                                        std::int64_t end, bool nonfinite_heads, const TileScratch<Format> &t,
                                        float *dq) {
    for (std::int64_t i = first; i < end; ++i) {
        for (std::int64_t h = 0; (nonfinite_heads || t.nonfinite[i]) && h < w.item.heads; ++h) {
            if (!(w.s.scores[i * w.s.pitch + h] > 0.0f)) continue;
            const float dscore = Format::get(w.s.dscores + i * w.s.head_words, h);
            const T *k = row_of<T>(w.o.k, w.item.seq, 0, block.first + i);
            add_row<false>(k, w.p.dim_qk, dscore, dq + h * t.columns);
            add_row<false>(row_of<const T>(w.o.q, w.item.seq, h, w.item.row), w.p.dim_qk, dscore,
                           t.sums + i * t.columns);
        }
    }
}

// dS = dvalue * weight and dweight += dvalue * score for positive scores, else 0.
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

// weigh_scores() with heads summed in the order of sparse/indexer.h, so that the largest score equals the maximum in
// the statistics exactly; a difference would scale every y of the row.
inline void weigh_in_order(const float *products, std::int64_t pitch, std::int64_t heads, const float *weights,
                           std::int64_t count, float *scores) {
    for (std::int64_t i = 0; i < count; i += lanes) {
        Floats total = {};
        for (std::int64_t h = 0; h < heads; h += lanes) {
            Words across[lanes];
            for (int k = 0; k < lanes; ++k) {
                across[k] = i + k < count ? load<Words>(products + (i + k) * pitch + h) : Words{};
            }
            transpose(across);
            for (int e = 0; e < least<std::int64_t>(lanes, heads - h); ++e) {
                total += larger(Floats{}, floats_of(across[e])) * all(weights[h + e]);
            }
        }
        store_floats(scores + i, total, count - i);
    }
}

// Processes row r of a tile and a block of keys, given the address of the target of its first key: adds to dq and
// dweights of the row and to the block's sums; returns the loss.
template <class Format>
double row_loss(const SparseJob &job, const SparseItem &tile, const TileBlock &block, std::int64_t r,
                const float *target, const TileScratch<Format> &t, void *scratch) {
    const Sequence &seq = job.sequences[tile.seq];
    const SparseItem item = {tile.seq, 0, 0, tile.heads, tile.row + r};
    const std::int64_t first = most(first_key(seq, item.row), block.first) - block.first;
    const std::int64_t end = least(end_key(*job.problem, seq, item.row), block.end) - block.first;
    if (end <= first) return 0.0;
    const SparseGradientWork<Format> w(job, item, scratch);
    const auto &s = w.s;
    const std::int64_t words = w.sizes.words, start = first / block_rows * block_rows;
    float *const dq = t.dq + r * t.heads * t.columns;
    Idle idle;
    with_stored<Format>(w.p.dtype, [&](auto x) { load_heads<Format, decltype(x)>(w, s.q_rows); });
    load_weights(w.p, w.o.weights, item.seq, item.row, s.pitch, s.head_factor);
    for (std::int64_t at = start; at < end; at += block_rows) {
        by_panels<Format, block_rows, false>(t.index_rows + at * words, words, s.q, words, words,
                                             s.scores + at * s.pitch, s.pitch, s.padded_heads, nullptr, idle);
    }
    std::memset(s.scores, 0, first * s.pitch * sizeof *s.scores);
    std::memset(s.given, 0, first * sizeof *s.given);
    weigh_in_order(s.scores + first * s.pitch, s.pitch, item.heads, s.head_factor, end - first, s.given + first);
    Likelihood y(*row_of<float>(w.o.max, item.seq, 0, item.row), *row_of<float>(w.o.sum, item.seq, 0, item.row),
                 t.head_share[r], false);
    y.mass = t.mass[r];
    if (w.o.values.base) {
        float *const to = row_of<float>(w.o.values, item.seq, 0, item.row) + block.first + first;
        each_likelihood(s.given + first, end - first, y,
                        [&](std::int64_t at, Floats likelihood)
                            __attribute__((always_inline)) { store_floats(to + at, likelihood, end - first - at); });
    }
    const double loss = kl_divergence(s.given + first, target + first, end - first, y);
    weigh_chunk<Format, false>(s, end,
                               IndexerWeights{s.scores, s.given, s.head_factor, t.dweights + r * t.heads, s.pitch},
                               nullptr, s.dscores);
    add_dq(w, end, s.across, dq, idle);
    if (meets_nonfinite(s.scores + first * s.pitch, s.pitch, end - first, s.padded_heads)) {
        const bool heads = clear_nonfinite<Format>(s.q_rows, item.heads, t.columns);
        with_stored<Format>(w.p.dtype, [&](auto x) {
            add_nonfinite_elements<Format, decltype(x)>(w, block, first, end, heads, t, dq);
        });
    }
    for (std::int64_t i = 0; i < round_up<std::int64_t>(end, block_rows) + block_rows; ++i) {
        s.sums[i] = i >= first && i < end ? t.sums + i * t.columns : s.nowhere;
    }
    const std::int64_t depth = words_of<Format>(item.heads);
    for (std::int64_t at = start; at < end; at += block_rows) {
        add_block_to_sums<Format, block_rows>(s.dscores + at * s.head_words, s.head_words, s.q_rows, depth, s.sums + at,
                                              s.sums + at + block_rows, 0, w.sizes.columns, 1.0f, idle);
    }
    return loss;
}

// Processes all rows and the block of keys from `at` on, whose target has been computed; returns the loss.
template <class Format>
double keys_loss(const SparseGradientWork<Format> &w, const SparseJob &job, const SparseItem &item,
                 const TileBlock &block, std::int64_t at, const TileScratch<Format> &t, void *scratch) {
    double loss = 0.0;
    with_stored<Format>(w.p.dtype, [&](auto x) { load_index_keys<Format, decltype(x)>(w, block, t); });
    std::memset(t.sums, 0, (block.end - block.first) * t.columns * sizeof *t.sums);
    for (std::int64_t r = block.row0; r < block.row1; ++r) {
        loss += row_loss<Format>(job, item, block, r, t.target + r * t.width + block.first - at, t, scratch);
    }
    return loss;
}

template <class Format>
void tile_loss(const SparseJob &job, const SparseItem &item, const Turn &turn, const KeySums &table, double *loss,
               void *scratch) {
    [[maybe_unused]] const ProductRegion<Format> region;
    const Sequence &seq = job.sequences[item.seq];
    const SparseGradientWork<Format> w(job, item, scratch);
    const TileScratch<Format> t(*job.attention, w.p, static_cast<char *>(scratch) + w.s.bytes);
    const std::int64_t rows = least(loss_tile_rows, seq.q_len - item.row);
    const std::int64_t begin = first_key(seq, item.row),
                       end = most<std::int64_t>(end_key(*job.problem, seq, item.row + rows - 1), 0);
    std::memset(t.dq, 0, rows * t.heads * t.columns * sizeof *t.dq);
    std::memset(t.dweights, 0, rows * t.heads * sizeof *t.dweights);
    for (std::int64_t h = 0; h < t.heads; ++h) w.s.ones[h] = 1.0f;
    if (begin < end) load_saved(job, item, rows, t);
    *loss = 0.0;
    for (std::int64_t at = begin; at < end; at += t.width) {
        TileBlock block = {0, rows, at, least(at + t.width, end)};
        while (block.row0 < rows && end_key(*job.problem, seq, item.row + block.row0) <= at) ++block.row0;
        while (block.row1 > block.row0 && first_key(seq, item.row + block.row1 - 1) >= block.end) --block.row1;
        if (job.attention->heads_q) {
            with_stored<Format>(w.p.dtype, [&](auto x) { tile_target<Format, decltype(x)>(job, item, block, t); });
        } else {
            take_target(job, item, block, t);
        }
        for (std::int64_t stop = block.end; block.first < stop; block.first = block.end) {
            block.end = least(block.first + t.chunk, stop);
            *loss += keys_loss<Format>(w, job, item, block, at, t, scratch);
            if (!turn.wait(turn.state, turn.item, block.first, block.end - 1)) return;
            for (std::int64_t i = 0; i < (block.end - block.first) * t.columns; i += lanes) {
                float *const to = table.memory + block.first * t.columns + i;
                store(to, load<Floats>(to) + load<Floats>(t.sums + i));
            }
            if (block.end < end) turn.done(turn.state, turn.item, block.end, end - 1);
        }
    }
    turn.done(turn.state, turn.item, end, end - 1);
    for (std::int64_t r = 0; r < rows; ++r) {
        const SparseItem row = {item.seq, 0, 0, item.heads, item.row + r};
        const SparseGradientWork<Format> row_work(job, row, scratch);
        store_head_gradients(row_work, t.dq + r * t.heads * t.columns, t.dweights + r * t.heads);
    }
}

}  // namespace
}  // namespace fusion
