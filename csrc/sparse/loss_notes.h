// What a row of the indexer's loss leaves for the gradients of its keys, and how that is added to their sums.
//
// Start reading at add_list().

#pragma once

#include "sparse/gradient.h"

namespace fusion {
namespace {

// What a row adds to sums of keys, kept until rows have come together: then they go to a few neighbouring keys at a
// time, whose sums stay near one core. dS itself would be as long as keys' rows; what it is made of is an eighth of
// that.
template <class Format> struct ListNotes {
    using Word = typename Format::Word;
    std::int64_t q_words, pitch;
    std::int32_t *keys;      // ascending
    std::int32_t *starts;    // of a range of keys, its first one in the list; one more
    Word *q_rows;            // the row's heads
    float *given;            // [key], dI
    std::uint8_t *positive;  // [key][pitch] bits: whether S is
    std::size_t bytes;

    ListNotes(const SparseProblem &index, const GradientScratch<Format> &s, std::int64_t longest, void *memory)
        : q_words(s.padded_heads / Format::depth * Sizes<Format>(index).columns), pitch(s.pitch) {
        const std::int64_t listed = most_keys(index, longest);
        Carver carver(memory);
        carver.take(keys, listed);
        carver.take(starts, longest / loss_range_keys + 2);
        carver.take(q_rows, q_words);
        carver.take(given, listed + lanes);
        carver.take(positive, listed * pitch / 8);
        bytes = carver.bytes();
    }

    void divide(const std::int32_t *from, std::int64_t count, std::int64_t longest) const {
        std::memcpy(keys, from, count * sizeof *keys);
        std::int64_t at = 0;
        for (std::int64_t range = 0; range < longest / loss_range_keys + 2; ++range) {
            for (std::int64_t step = loss_range_keys; step; step /= 2) {  // a list may name keys more often than once
                while (at + step <= count && from[at + step - 1] < range * loss_range_keys) at += step;
            }
            starts[range] = static_cast<std::int32_t>(at);
        }
    }
};

// From dI to dS, two vectors of heads at a time: bits of scores that are positive say where it is not 0.
FUSION_INLINE void spread_weights(std::uint32_t bits, Floats dvalue, const Floats (&weights)[2], Floats (&dscore)[2]) {
    FUSION_UNROLL for (int u = 0; u < 2; ++u) dscore[u] = pick(bits >> u * lanes, dvalue * weights[u], Floats{});
}

// A range of a row's notes, which another core may have written.
template <class Format>
PrefetchQueue<2> queue_of(const ListNotes<Format> &notes, std::int64_t range, std::int64_t steps) {
    PrefetchQueue<2> queue;
    const std::int64_t first = notes.starts[range], keys = notes.starts[range + 1] - first;
    queue.add(notes.q_rows, notes.q_words * sizeof *notes.q_rows);
    queue.add(notes.keys + first, keys * sizeof *notes.keys);
    queue.add(notes.given + first, keys * sizeof *notes.given);
    queue.add(notes.positive + first * notes.pitch / 8, keys * notes.pitch / 8);
    queue.spread(most<std::int64_t>(steps, 1));
    return queue;
}

// dS of a chunk of noted keys, as the row found it: [key][head_words].
template <class Format>
void recall_weights(const ListNotes<Format> &notes, std::int64_t first, std::int64_t count,
                    const GradientScratch<Format> &s) {
    for (std::int64_t h = 0; h < s.pitch; h += 2 * lanes) {
        const Floats weights[2] = {load<Floats>(s.share + h), load<Floats>(s.share + h + lanes)};
        for (std::int64_t i = 0; i < count; ++i) {
            const std::uint8_t *const row = notes.positive + (first + i) * s.pitch / 8;
            Floats dscore[2];
            spread_weights(lane_bits(row, h) | lane_bits(row, h + lanes) << lanes, all(notes.given[first + i]), weights,
                           dscore);
            Format::store_elements(s.dscores + i * s.head_words, h, dscore[0], dscore[1]);
        }
    }
}

// Adds what a row's notes say of a range of keys to their sums; `next`: notes that are added next, or null.
template <class Format>
void add_list(const SparseJob &job, const SparseItem &item, void *notes, void *next, std::int64_t range,
              const KeySums &table, void *scratch) {
    const SparseGradientWork<Format> w(job, item, scratch);
    const auto &s = w.s;
    const std::int64_t longest = job.sequences[item.seq].kv_len;
    const ListNotes<Format> left(w.p, s, longest, notes), other(w.p, s, longest, next);
    const std::int64_t pitch = sum_columns<Format>(w.p), depth = (item.heads + Format::depth - 1) / Format::depth;
    const std::int64_t first = left.starts[range], stop = left.starts[range + 1];
    PrefetchQueue<2> queue;
    if (next) queue = queue_of(other, range, (stop - first) / block_rows);
    load_weights(w.p, w.o.weights, item.seq, item.row, s.pitch, s.share);
    for (std::int64_t at = first; at < stop; at += s.chunk) {
        const std::int64_t here = least<std::int64_t>(s.chunk, stop - at);
        for (std::int64_t i = 0; i < round_up<std::int64_t>(here, block_rows) + block_rows; ++i) {
            s.sums[i] = at + i < stop ? table.memory + left.keys[at + i] * pitch : s.nowhere;
        }
        recall_weights(left, at, here, s);
        for (std::int64_t i = 0; i < here; i += block_rows) {
            queue.step();
            add_block_to_sums<Format, block_rows>(s.dscores + i * s.head_words, s.head_words, left.q_rows, depth,
                                                  s.sums + i, 0, w.sizes.columns, 1.0f);
        }
    }
}

}  // namespace
}  // namespace fusion
