// The kernel of the lightning indexer: scores of rows for all visible keys, and the top_k largest of each row in order.
//
// A tile of products [heads][keys] stays in registers until their ReLU and weighted sum over heads. Keys are processed
// in chunks; each row has a buffer of candidates by ascending key, of which only the top_k largest remain when it is
// full. A later key loses a tie, so keys whose scores are not above the smallest of these are dropped. The selection is
// exact and does not depend on chunks. Keys of many rows are packed once before; keys of few rows are packed panel by
// panel for each tile of rows, in the first-level cache. Start reading at index_rows().

#pragma once

#include "dtype_dispatch.h"
#include "sparse/gather.h"

namespace fusion {
namespace {

constexpr std::int64_t index_chunk = 512;

struct IndexSizes {
    std::int64_t heads, chosen, capacity;  // heads rounded up to blocks; top_k; capacity of a row's candidates

    explicit IndexSizes(const SparseProblem &p)
        : heads(round_up<std::int64_t>(p.heads_q, block_rows)), chosen(p.select_count),
          capacity(chosen + most(chosen, 2 * index_chunk)) {}
};

template <class Format> struct IndexScratch {
    using Word = typename Format::Word;
    Word *q;                  // [row][head][word]
    Word *keys;               // [word][key] of a panel, if keys are not packed before
    float *weights;           // [row][head]
    float *scores;            // [index_chunk + lanes]
    std::int32_t *ranks;      // [row][capacity + lanes] of candidates: scores as integers in the same order
    std::int32_t *positions;  // [row][capacity + lanes], keys of candidates
    std::int32_t *rest;       // [capacity + lanes]
    std::int64_t *counts;
    std::int32_t *floors;  // [row], ranks of candidates must be larger
    std::uint64_t *list, *spare;
    std::uint32_t *histogram;
    float *peaks, *sums;  // [row], for statistics
    std::size_t bytes;

    IndexScratch(const SparseProblem &p, const IndexSizes &sizes, std::int64_t rows, void *memory) {
        Carver carver(memory);
        carver.take(q, rows * sizes.heads * Sizes<Format>(p).words);
        carver.take(keys, panel * Sizes<Format>(p).words);
        carver.take(weights, rows * round_up<std::int64_t>(sizes.heads, lanes));
        carver.take(scores, index_chunk + lanes);
        carver.take(ranks, rows * (sizes.capacity + lanes));
        carver.take(positions, rows * (sizes.capacity + lanes));
        carver.take(rest, sizes.capacity + lanes);
        carver.take(counts, rows);
        carver.take(floors, rows);
        carver.take(list, sizes.chosen);
        carver.take(spare, sizes.chosen);
        carver.take(histogram, std::int64_t{1} << digit_bits);
        carver.take(peaks, rows);
        carver.take(sums, rows);
        bytes = carver.bytes();
    }
};

template <class Format> struct IndexWork {
    const SparseJob &job;
    const SparseProblem &p;
    const std::int64_t seq;
    const std::int64_t words;
    const IndexSizes sizes;
    const IndexScratch<Format> s;
    const typename Format::Word *packed;  // [panel][word][key], or null

    IndexWork(const SparseJob &job_, std::int64_t seq_, std::int64_t rows, const char *packed_, void *scratch)
        : job(job_), p(*job.problem), seq(seq_), words(Sizes<Format>(p).words), sizes(p), s(p, sizes, rows, scratch),
          packed(reinterpret_cast<const typename Format::Word *>(packed_)) {}
};

template <class Format> std::size_t index_packed_bytes(const SparseProblem &p, std::int64_t keys) {
    return round_up<std::size_t>(round_up<std::int64_t>(keys, panel) * Sizes<Format>(p).words * 4, 64);
}

// Packs panels [first, end) of a sequence's keys, padded with zeros.
template <class Format, class T>
void pack_keys(const SparseJob &job, std::int64_t seq, std::int64_t first, std::int64_t end,
               typename Format::Word *to) {
    const SparseProblem &p = *job.problem;
    const Keys &k = job.operands->k;
    const std::int64_t words = Sizes<Format>(p).words, there = job.sequences[seq].kv_len;
    for (std::int64_t j = first * panel; j < end * panel; j += panel, to += panel * words) {
        const std::int64_t here = least<std::int64_t>(panel, there - j);
        if (!k.table || j % k.page_size + here <= k.page_size) {
            pack_keys<Format>(row_of<T>(k, seq, 0, j), k.rows.stride_token, here, p.dim_qk, words, to);
            continue;
        }
        for (int c = 0; c < panel; c += lanes) {
            for (std::int64_t d = 0; d < words; d += lanes) {
                Words block[lanes];
                for (int i = 0; i < lanes; ++i) {
                    block[i] =
                        c + i < here ? load_words<Format>(row_of<T>(k, seq, 0, j + c + i), d, p.dim_qk) : Words{};
                }
                transpose(block);
                for (std::int64_t i = 0; i < least<std::int64_t>(lanes, words - d); ++i)
                    store(to + (d + i) * panel + c, block[i]);
            }
        }
    }
}

template <class Format, class T>
void index_pack(const SparseJob &job, std::int64_t seq, std::int64_t first, std::int64_t end, char *packed) {
    auto *const keys = reinterpret_cast<typename Format::Word *>(packed);
    pack_keys<Format, T>(job, seq, first, end, keys + first * panel * Sizes<Format>(*job.problem).words);
}

// The panel of keys that begins at `first`; packs it unless it was packed before.
template <class Format> const typename Format::Word *panel_of(const IndexWork<Format> &w, std::int64_t first) {
    if (w.packed) return w.packed + first * w.words;
    with_stored<Format>(w.p.dtype, [&](auto x) {
        pack_keys<Format, decltype(x)>(w.job, w.seq, first / panel, first / panel + 1, w.s.keys);
    });
    return w.s.keys;
}

constexpr std::int32_t nothing = -0x7f800001;  // the rank of -inf; such a key is not selected

template <class Format> void begin_choice(const IndexWork<Format> &w, std::int64_t slot) {
    w.s.counts[slot] = 0;
    w.s.floors[slot] = nothing;
}

template <class Format> void load_index_row(const IndexWork<Format> &w, std::int64_t row, std::int64_t slot) {
    auto *const q = w.s.q + slot * w.sizes.heads * w.words;
    with_stored<Format>(w.p.dtype, [&](auto x) {
        for (std::int64_t h = 0; h < w.p.heads_q; ++h) {
            const auto *const from = row_of<const decltype(x)>(w.job.operands->q, w.seq, h, row);
            pack_query<Format>(from, w.p.dim_qk, w.words, q + h * w.words);
        }
    });
    std::memset(q + w.p.heads_q * w.words, 0, (w.sizes.heads - w.p.heads_q) * w.words * sizeof *q);
    const std::int64_t pitch = round_up<std::int64_t>(w.sizes.heads, lanes);
    load_weights(w.p, w.job.operands->weights, w.seq, row, pitch, w.s.weights + slot * pitch);
    begin_choice(w, slot);
}

// ------------------------------------------------------------------------------------------------------------- scores

// Prefetches keys that are packed later while others are multiplied, because packing reads faster than memory. A few
// lines at a time, because prefetches are dropped if no miss buffer of the first-level cache is free.
template <class Format> class KeysAhead {
public:
    explicit KeysAhead(const IndexWork<Format> &w)
        : step(w.packed ? w.words : 16), w_(w),
          pace_(panel / (((w.p.heads_q + block_rows - 1) / block_rows) * ((w.words + step - 1) / step)) + 1) {}

    const std::int64_t step;  // words of a block's heads multiplied between two prefetches

    // Starts the prefetches of a panel of keys.
    void aim(std::int64_t first) {
        next_ = first;
        end_ = least(first + panel, w_.job.sequences[w_.seq].kv_len);
    }
    FUSION_INLINE void operator()() {
        if (next_ < end_) ask();
    }

private:
    __attribute__((noinline)) void ask() {
        const Keys &k = w_.job.operands->k;
        for (std::int64_t i = 0; i < pace_ && next_ < end_; ++i, ++next_) {
            if (w_.p.dtype == Dtype::float32) prefetch<2>(row_of<float>(k, w_.seq, 0, next_), w_.p.dim_qk);
            else prefetch<2>(row_of<Half>(k, w_.seq, 0, next_), w_.p.dim_qk);  // rows of Brain have the same size
        }
    }

    const IndexWork<Format> &w_;
    const std::int64_t pace_;  // keys per step
    std::int64_t next_ = 0, end_ = 0;
};

// Adds the first `heads` of M heads to the scores of one panel of keys.
template <class Format, int M>
__attribute__((noinline)) void add_index_scores(const typename Format::Word *q, std::int64_t words,
                                                const typename Format::Word *keys, const float *weights,
                                                std::int64_t heads, float *to, KeysAhead<Format> &ahead) {
    constexpr int N = panel_vectors;
    StagedBlock<Format, M, N> tile;
    for (std::int64_t k = 0; k < words; k += ahead.step) {
        ahead();
        keys = tile.add(k, least(k + ahead.step, words), RowMajor<typename Format::Word>{q, words}, keys, panel);
    }
    const auto sums = tile.sums();
    FUSION_UNROLL for (int j = 0; j < N; ++j) {
        Floats total = load<Floats>(to + j * lanes);
        FUSION_UNROLL for (int i = 0; i < M; ++i) {
            if (i >= heads) break;  // missing heads are skipped, because 0 * inf is NaN
            total += larger(Floats{}, sums(i, j)) * all(weights[i]);
        }
        store(to + j * lanes, total);
    }
}

// Scores of `count` keys from `first` on, the start of a panel, for the row of a slot; complete panels are written. If
// keys are not packed before and `later` is not negative, keys from `later` on are prefetched.
template <class Format>
void score_keys(const IndexWork<Format> &w, std::int64_t slot, std::int64_t first, std::int64_t count, float *scores,
                std::int64_t later) {
    const auto *q = w.s.q + slot * w.sizes.heads * w.words;
    const float *weights = w.s.weights + slot * round_up<std::int64_t>(w.sizes.heads, lanes);
    KeysAhead<Format> ahead(w);
    for (std::int64_t j = 0; j < count; j += panel, scores += panel) {
        const auto *const keys = panel_of(w, first + j);
        if (!w.packed && later >= 0) ahead.aim(later + j);
        for (int i = 0; i < panel; i += lanes) store(scores + i, Floats{});
        in_blocks(w.p.heads_q, [&](auto height, std::int64_t h) __attribute__((always_inline)) {
            add_index_scores<Format, height()>(q + h * w.words, w.words, keys, weights + h, w.p.heads_q - h, scores,
                                               ahead);
        });
    }
}

// ----------------------------------------------------------------------------------------------------------- choosing

// int32 ranks in the order of float32 scores: NaN is above all, and both zeros are equal.
FUSION_INLINE Ints rank_of(Floats score) {
    const Ints bits = (Ints)bits_of(score + Floats{});
    const Ints rank = bits ^ (bits >> 31 & 0x7fffffff);
    return score == score ? rank : all(std::int32_t{0x7fffffff});
}

inline float score_of(std::int32_t rank) {
    const std::int32_t bits = rank ^ (rank >> 31 & 0x7fffffff);
    float score;
    std::memcpy(&score, &bits, 4);
    return score;
}

// The number of ranks that are at least `bound` among n, a multiple of lanes.
inline std::int64_t count_from(const std::int32_t *ranks, std::int64_t n, std::int32_t bound) {
    Ints lane_counts = {};
    for (std::int64_t i = 0; i < n; i += lanes) lane_counts -= load<Ints>(ranks + i) >= bound;
    std::int64_t sum = 0;
    for (int i = 0; i < lanes; ++i) sum += lane_counts[i];
    return sum;
}

// The k-th largest of `count` ranks and the number of larger ones, by bisection. `rest` is memory for count + lanes
// ranks, in which fewer and fewer remain.
inline std::int32_t select_rank(const std::int32_t *ranks, std::int64_t count, std::int64_t k, std::int32_t *rest,
                                std::int64_t &larger_ones) {
    constexpr std::int32_t below = -0x7fffffff - 1;  // below all ranks
    Ints least_one = all(std::int32_t{0x7fffffff}), largest_one = all(below);
    for (std::int64_t i = 0; i < count; i += lanes) {
        Ints x = load<Ints>(ranks + i);
        const Ints there = lane_numbers() < static_cast<std::int32_t>(least<std::int64_t>(count - i, lanes));
        least_one = there & (x < least_one) ? x : least_one;
        x = there ? x : all(below);
        largest_one = x > largest_one ? x : largest_one;
        store(rest + i, x);
    }
    std::int32_t low = least_one[0], high = largest_one[0];
    for (int i = 1; i < lanes; ++i) {
        low = least(low, least_one[i]);
        high = most(high, largest_one[i]);
    }
    std::int64_t n = count, from_low = count, above_high = 0, gone = 0;  // gone: larger than high and no longer in rest
    while (low < high) {
        const auto half = (static_cast<std::uint32_t>(high) - static_cast<std::uint32_t>(low) + 1) / 2;
        const auto middle = static_cast<std::int32_t>(static_cast<std::uint32_t>(low) + half);
        const std::int64_t at_least = gone + count_from(rest, n, middle);
        if (at_least >= k) {
            low = middle;
            from_low = at_least;
        } else {
            high = middle - 1;
            above_high = at_least;
        }
        if (from_low - above_high > n / 2) continue;
        std::int64_t remaining = 0;
        for (std::int64_t i = 0; i < n; i += lanes) {
            const Ints x = load<Ints>(rest + i);
            const std::uint32_t mask = mask_of((x >= low) & (x <= high));
            compress(rest + remaining, x, mask);
            remaining += __builtin_popcount(mask);
        }
        store(rest + remaining, all(below));
        n = remaining;
        gone = above_high;
    }
    larger_ones = above_high;
    return low;
}

// Keeps the `chosen` largest candidates, the first ones among equals.
template <class Format> void prune(const IndexWork<Format> &w, std::int64_t slot) {
    std::int32_t *ranks = w.s.ranks + slot * (w.sizes.capacity + lanes),
                 *positions = w.s.positions + slot * (w.sizes.capacity + lanes);
    const std::int64_t count = w.s.counts[slot];
    std::int64_t larger_ones, retained = 0;
    const std::int32_t floor = select_rank(ranks, count, w.sizes.chosen, w.s.rest, larger_ones);
    std::int64_t equals = w.sizes.chosen - larger_ones;
    for (std::int64_t i = 0; i < count; i += lanes) {
        const Ints rank = load<Ints>(ranks + i), place = load<Ints>(positions + i);
        const std::uint32_t there = i + lanes <= count ? ~0u : (1u << (count - i)) - 1;
        std::uint32_t same = mask_of(rank == floor) & there;
        const std::uint32_t above = mask_of(rank > floor) & there;
        while (__builtin_popcount(same) > equals) same &= ~(0x80000000u >> __builtin_clz(same));
        equals -= __builtin_popcount(same);
        compress(ranks + retained, rank, above | same);
        compress(positions + retained, place, above | same);
        retained += __builtin_popcount(above | same);
    }
    w.s.counts[slot] = retained;
    w.s.floors[slot] = floor;
}

// Adds keys [first, end), at most index_chunk, to the candidates of a row if their scores are above its floor.
template <class Format>
void take(const IndexWork<Format> &w, std::int64_t slot, std::int64_t first, std::int64_t end, const float *scores) {
    if (w.s.counts[slot] + (end - first) > w.sizes.capacity) prune(w, slot);
    std::int32_t *ranks = w.s.ranks + slot * (w.sizes.capacity + lanes),
                 *positions = w.s.positions + slot * (w.sizes.capacity + lanes);
    const std::int32_t floor = w.s.floors[slot];
    std::int64_t count = w.s.counts[slot];
    for (std::int64_t j = first; j < end; j += lanes) {
        const Ints rank = rank_of(load_floats(scores + j - first, end - j));
        std::uint32_t mask = mask_of(rank > floor);
        if (end - j < lanes) mask &= (1u << (end - j)) - 1;
        if (!mask) continue;
        compress(ranks + count, rank, mask);
        compress(positions + count, lane_numbers() + static_cast<std::int32_t>(j), mask);
        count += __builtin_popcount(mask);
    }
    w.s.counts[slot] = count;
}

// Stores the selected keys by descending score, padded with -1.
template <class Format> void store_choice(const IndexWork<Format> &w, std::int64_t row, std::int64_t slot) {
    if (w.s.counts[slot] > w.sizes.chosen) prune(w, slot);
    const std::int32_t *ranks = w.s.ranks + slot * (w.sizes.capacity + lanes),
                       *positions = w.s.positions + slot * (w.sizes.capacity + lanes);
    const std::int64_t count = w.s.counts[slot];
    for (std::int64_t i = 0; i < count; ++i) {  // inverted ranks, so that an ascending sort gives descending scores
        const std::uint32_t order = ~static_cast<std::uint32_t>(ranks[i]) ^ 0x80000000;
        w.s.list[i] = static_cast<std::uint64_t>(order) << 32 | static_cast<std::uint32_t>(positions[i]);
    }
    const std::uint64_t *sorted = sort_upward(w.s.list, w.s.spare, count, 32, 64, w.s.histogram);
    auto *const indices = row_of<std::int32_t>(w.job.operands->indices, w.seq, 0, row);
    for (std::int64_t i = 0; i < w.sizes.chosen; ++i)
        indices[i] = i < count ? static_cast<std::int32_t>(sorted[i]) : -1;
    if (!w.job.operands->values.base) return;
    const auto store_values = [&](auto kind) {
        auto *const values = row_of<decltype(kind)>(w.job.operands->values, w.seq, 0, row);
        for (std::int64_t i = 0; i < w.sizes.chosen; ++i) {
            const auto rank =
                static_cast<std::int32_t>(~static_cast<std::uint32_t>(sorted[i < count ? i : 0] >> 32) ^ 0x80000000);
            store_floats(values + i, all(i < count ? score_of(rank) : -infinity), 1);
        }
    };
    if (w.p.wide_values) store_values(float{});
    else with_stored<Format>(w.p.dtype, store_values);
}

// --------------------------------------------------------------------------------------------------------- statistics

// Adds scores of keys to a row's maximum and its sum of exp(score - maximum); a NaN makes both NaN. The array of scores
// has room for one more vector.
inline void join_scores(float *scores, std::int64_t count, float &peak, float &sum) {
    store(scores + count, all(-infinity));
    Floats maxima = all(-infinity), added = {};
    Words strange = {};
    for (std::int64_t i = 0; i < count; i += lanes) {
        const Floats x = load<Floats>(scores + i);
        maxima = larger(x, maxima);
        strange |= (Words)(x != x);
    }
    const float top = largest_of(maxima), now = any(strange) ? __builtin_nanf("") : top > peak ? top : peak;
    const float shift = now == -infinity ? 0.0f : now;
    for (std::int64_t i = 0; i < count; i += lanes) added += exp2<6>((load<Floats>(scores + i) - shift) * log2_e);
    sum = (now == peak ? sum : sum * exp2<6>(all((peak - now) * log2_e))[0]) + sum_of(added);
    peak = now;
}

// ----------------------------------------------------------------------------------------------------- from end to end

// Computes scores of rows [row0, row1) for their visible keys, chunk by chunk, and calls use(slot of the row, first
// key, end, scores).
template <class Format, class Use>
FUSION_INLINE void score_chunks(const IndexWork<Format> &w, std::int64_t row0, std::int64_t row1, Use use) {
    const Sequence &lengths = w.job.sequences[w.seq];
    std::int64_t last = 0;
    for (std::int64_t row = row0; row < row1; ++row) {
        load_index_row(w, row, row - row0);
        last = most(last, end_key(w.p, lengths, row));
    }
    for (std::int64_t at = 0; at < last; at += index_chunk) {
        for (std::int64_t row = row0; row < row1; ++row) {
            const std::int64_t first = most(at, first_key(lengths, row));
            const std::int64_t end = least(at + index_chunk, end_key(w.p, lengths, row));
            if (end <= first) continue;
            const std::int64_t begin = first / panel * panel;
            score_keys(w, row - row0, begin, end - begin, w.s.scores, row == row0 ? begin + index_chunk : -1);
            use(row - row0, first, end, w.s.scores + (first - begin));
        }
    }
}

template <class Format>
void index_stats(const SparseJob &job, std::int64_t seq, std::int64_t row0, std::int64_t row1, const char *packed,
                 void *scratch) {
    [[maybe_unused]] const ProductRegion<Format> region;
    const IndexWork<Format> w(job, seq, index_tile_rows, packed, scratch);
    for (std::int64_t slot = 0; slot < row1 - row0; ++slot) w.s.peaks[slot] = -infinity, w.s.sums[slot] = 0.0f;
    score_chunks(w, row0, row1, [&](std::int64_t slot, std::int64_t first, std::int64_t end, float *scores) {
        join_scores(scores, end - first, w.s.peaks[slot], w.s.sums[slot]);
    });
    for (std::int64_t row = row0; row < row1; ++row) {
        *row_of<float>(job.operands->max, seq, 0, row) = w.s.peaks[row - row0];
        *row_of<float>(job.operands->sum, seq, 0, row) = w.s.sums[row - row0];
    }
}

template <class Format>
void index_rows(const SparseJob &job, std::int64_t seq, std::int64_t row0, std::int64_t row1, const char *packed,
                void *scratch) {
    [[maybe_unused]] const ProductRegion<Format> region;
    const IndexWork<Format> w(job, seq, index_tile_rows, packed, scratch);
    score_chunks(w, row0, row1, [&](std::int64_t slot, std::int64_t first, std::int64_t end, float *scores) {
        take(w, slot, first, end, scores);
    });
    for (std::int64_t row = row0; row < row1; ++row) store_choice(w, row, row - row0);
}

template <class Format>
void index_scores(const SparseJob &job, std::int64_t seq, std::int64_t row0, std::int64_t row1, std::int64_t first,
                  std::int64_t end, std::int64_t later, const char *packed, float *scores, std::int64_t pitch,
                  void *scratch) {
    [[maybe_unused]] const ProductRegion<Format> region;
    const IndexWork<Format> w(job, seq, 1, packed, scratch);
    for (std::int64_t row = row0; row < row1; ++row, scores += pitch) {
        load_index_row(w, row, 0);
        score_keys(w, 0, first, end - first, scores + first, row == row0 ? later : -1);
    }
}

template <class Format>
void index_choose(const SparseJob &job, std::int64_t seq, std::int64_t row, const float *scores, void *scratch) {
    const IndexWork<Format> w(job, seq, 1, nullptr, scratch);
    begin_choice(w, 0);
    const std::int64_t end = end_key(*job.problem, job.sequences[seq], row);
    for (std::int64_t j = first_key(job.sequences[seq], row); j < end; j += index_chunk) {
        take(w, 0, j, least(j + index_chunk, end), scores + j);
    }
    store_choice(w, row, 0);
}

}  // namespace
}  // namespace fusion
