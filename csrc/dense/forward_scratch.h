// Scratch memory and parameters of a tile of the forward, and its blocks of rows.

#pragma once

#include "dense/bias.h"
#include "dense/pack_from_kv_cache.h"
#include "simd/operand_formats.h"
#include "simd/mask_bits.h"
#include "simd/prefetch_queue.h"
#include "simd/tile.h"

namespace fusion {
namespace {

constexpr std::int64_t most_step = 512;                       // most keys of a step of a tile,
constexpr std::int64_t step_bytes = std::int64_t{640} << 10;  // and most bytes of their panels in a second-level cache

static_assert(tile_rows % block_rows == 0 && block_rows % block_parts == 0 && most_step % (8 * lanes) == 0);

// The number of keys of a step. It depends on the problem only, because it determines the order in which weights are
// summed.
template <class Format> FUSION_INLINE std::int64_t step_keys(const Sizes<Format> &sizes) {
    std::int64_t keys = most_step;
    while (keys > 128 && keys * (sizes.words + sizes.value_columns / Format::depth) * 4 > step_bytes) keys /= 2;
    return keys;
}

template <class Format> struct Scratch {  // scratch memory of a thread
    using Word = typename Format::Word;
    Word *q;        // [tile_rows][words]
    float *out;     // [tile_rows][columns], not yet divided by the sum; undefined before a row's first step
    float *sum;     // [tile_rows][lanes], one sum per lane
    float *peak;    // [tile_rows + lanes], the largest score so far
    float *shift;   // [tile_rows + lanes], subtracted from scores: the peak, or (Format::fused) peak * factor, rounded
    float *scores;  // [block_rows][most_step]
    Word *weights;  // [block_rows][most_step / depth]; shares the memory of scores if both have the same size
    std::uint8_t *visible, *keep;  // [block_rows][most_step / 8]
    std::size_t bytes;

    Scratch(const Sizes<Format> &sizes, void *memory) {
        Carver carver(memory);
        carver.take(q, tile_rows * sizes.words);
        carver.take(out, tile_rows * sizes.value_columns);
        carver.take(sum, tile_rows * lanes);
        carver.take(peak, tile_rows + lanes);
        carver.take(shift, tile_rows + lanes);
        carver.take(scores, block_rows * most_step);
        if constexpr (Format::depth == 1) {
            weights = scores;
        } else {
            carver.take(weights, block_rows * most_step / Format::depth);
        }
        carver.take(visible, block_rows * most_step / 8);
        carver.take(keep, block_rows * most_step / 8);
        bytes = carver.bytes();
    }
};

template <class Format> struct Work {  // a tile with its parameters and scratch
    const Problem &p;
    const Operands &o;
    const Sequence &seq;
    const Sizes<Format> sizes;
    const Packed<Format> packed;
    const Scratch<Format> s;
    const Unit &unit;
    const Tile &tile;
    const std::int64_t head;
    const bool bias_pass;  // scores are scaled and biased in a separate pass
    const float natural;   // factor from stored scores to scores of the problem
    const float factor;    // natural * log2(e), the factor to exponents of 2
    const Job &job;

    Work(const Job &job_, const Unit &unit_, std::int64_t head_, const Tile &tile_, void *scratch)
        : p(*job_.problem), o(*job_.operands), seq(job_.sequences[unit_.seq]), sizes(p), packed(sizes, unit_),
          s(sizes, scratch), unit(unit_), tile(tile_), head(head_), bias_pass(needs_bias_pass(p)),
          natural(bias_pass ? 1.0f : static_cast<float>(p.scale)), factor(natural * log2_e), job(job_) {}
};

// Rows [row, row + rows) of the tile and complete panels of keys, [first, first + count) of the sequence. Counted from
// first, keys outside [some_begin, some_end) are hidden from all rows, and keys in [full_begin, full_end) are visible
// to all rows of the band.
struct Block {
    std::int64_t row, rows, first, count, some_begin, some_end, full_begin, full_end;
    bool hidden;   // some key is hidden from some row
    bool by_bits;  // a mask determines the hidden keys
};

// The number of rows of a block for a tile of `rows` rows: the fewest blocks possible, of equal height.
inline std::int64_t height_of(std::int64_t rows) {
    const std::int64_t blocks = (rows + block_rows - 1) / block_rows;
    return round_up<std::int64_t>((rows + blocks - 1) / blocks, block_rows / block_parts);
}

// The block with the keys of [begin, end) that are visible to its rows, in complete panels; count 0 if there are none.
template <class Format>
Block cut_block(const Work<Format> &w, std::int64_t row, std::int64_t rows, std::int64_t begin, std::int64_t end) {
    const std::int64_t top = w.tile.row0 + row, bottom = top + rows - 1;
    const std::int64_t some_begin = most(begin, first_key(w.seq, top)), some_end = least(end, end_key(w.seq, bottom));
    if (some_end <= some_begin) return {};
    const std::int64_t first = some_begin / panel * panel, count = round_up<std::int64_t>(some_end, panel) - first;
    const std::int64_t full_begin = first_key(w.seq, bottom) - first, full_end = end_key(w.seq, top) - first;
    const bool hidden = w.p.has_blocked || full_begin > 0 || full_end < count;
    return {row,        rows,     first,  count,          some_begin - first, some_end - first,
            full_begin, full_end, hidden, w.p.has_blocked};
}

// Calls use(block); with a mask of tiles, use(section) for each run of consecutive tiles with visible keys.
template <class Format, class Use> void for_seen_parts(const Work<Format> &w, const Block &b, Use use) {
    if (!w.p.has_blocked_tiles) return use(b);
    const MaskRows rows = {w.tile.seq, w.head, w.tile.row0 + b.row, b.rows};
    const std::int64_t end = b.first + b.some_end;
    for (std::int64_t from = b.first + b.some_begin; from < end;) {
        const KeyRun run = next_run(w.o, rows, from, end);
        if (run.begin == run.end) return;
        Block section = cut_block(w, b.row, b.rows, run.begin, run.end);
        section.hidden |= run.partial;
        section.by_bits |= run.partial;
        use(section);
        from = run.end;
    }
}

template <class Format> FUSION_INLINE Floats weight_of(Floats scores, float factor, float shift) {
    if constexpr (Format::fused) return exp2(Format::rest(scores, all(factor), all(shift)));
    return exp2<6>((scores - shift) * factor);
}

}  // namespace
}  // namespace fusion
