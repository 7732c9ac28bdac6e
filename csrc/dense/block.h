// What a tile of the forward needs, and blocks of its rows.

#pragma once

#include "dense/bias.h"
#include "dense/stored.h"
#include "simd/formats.h"
#include "simd/masks.h"
#include "simd/prefetch.h"
#include "simd/tile.h"

namespace fusion {
namespace {

constexpr std::int64_t most_step = 512;                       // keys that a tile meets at a time, at most,
constexpr std::int64_t step_bytes = std::int64_t{640} << 10;  // and what their panels may take of a second-level cache

static_assert(tile_rows % block_rows == 0 && block_rows % block_parts == 0 && most_step % (8 * lanes) == 0);

// A function of the problem alone, since it decides in which order weights are summed.
template <class Format> FUSION_INLINE std::int64_t step_keys(const Sizes<Format> &sizes) {
    std::int64_t keys = most_step;
    while (keys > 128 && keys * (sizes.words + sizes.value_columns / Format::depth) * 4 > step_bytes) keys /= 2;
    return keys;
}

template <class Format> struct Scratch {  // one thread's
    using Word = typename Format::Word;
    Word *q;        // [tile_rows][words]
    float *out;     // [tile_rows][columns], not yet divided by the sum; undefined before a row's first step
    float *sum;     // [tile_rows][lanes], one sum per lane
    float *peak;    // [tile_rows + lanes], the largest score so far
    float *shift;   // [tile_rows + lanes], what is subtracted: the peak, or (Format::fused) the peak * factor, rounded
    float *scores;  // [block_rows][most_step]
    Word *weights;  // [block_rows][most_step / depth]; in the scores' place where they have the same size
    std::uint8_t *seen, *keep;  // [block_rows][most_step / 8]
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
        carver.take(seen, block_rows * most_step / 8);
        carver.take(keep, block_rows * most_step / 8);
        bytes = carver.bytes();
    }
};

template <class Format> struct Work {  // a tile and all that it needs
    const Problem &p;
    const Operands &o;
    const Sequence &seq;
    const Sizes<Format> sizes;
    const Packed<Format> packed;
    const Scratch<Format> s;
    const Unit &unit;
    const Tile &tile;
    const std::int64_t head;
    const bool bias_pass;  // scores are scaled and biased in a pass of their own
    const float natural;   // what a score is multiplied by to give the problem's score
    const float factor;    // and to give it as a power of two
    const Job &job;

    Work(const Job &job_, const Unit &unit_, std::int64_t head_, const Tile &tile_, void *scratch)
        : p(*job_.problem), o(*job_.operands), seq(job_.sequences[unit_.seq]), sizes(p), packed(sizes, unit_),
          s(sizes, scratch), unit(unit_), tile(tile_), head(head_), bias_pass(needs_bias_pass(p)),
          natural(bias_pass ? 1.0f : static_cast<float>(p.scale)), factor(natural * log2_e), job(job_) {}
};

// Rows [row, row + rows) of the tile and whole panels of keys, [first, first + count) of the sequence. Counted from
// first, some row sees a key of [some_begin, some_end) and none any other; every row sees those of [full_begin,
// full_end).
struct Block {
    std::int64_t row, rows, first, count, some_begin, some_end, full_begin, full_end;
    bool hidden;   // some row does not see some key,
    bool by_bits;  // and which, a mask's elements say
};

// Rows of a block, of a tile of so many: as few blocks as there can be, alike.
inline std::int64_t height_of(std::int64_t rows) {
    const std::int64_t blocks = (rows + block_rows - 1) / block_rows;
    return round_up<std::int64_t>((rows + blocks - 1) / blocks, block_rows / block_parts);
}

// The part of keys [begin, end) that the block's rows see, in whole panels; count 0 if they see none.
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

// use(block), or where tiles are blocked, use(part) for its parts, tiles that some row sees beside each other.
template <class Format, class Use> void for_seen_parts(const Work<Format> &w, const Block &b, Use use) {
    if (!w.p.has_blocked_tiles) return use(b);
    const MaskRows rows = {w.tile.seq, w.head, w.tile.row0 + b.row, b.rows};
    const std::int64_t end = b.first + b.some_end;
    for (std::int64_t from = b.first + b.some_begin; from < end;) {
        const KeyRun run = next_run(w.o, rows, from, end);
        if (run.begin == run.end) return;
        Block part = cut_block(w, b.row, b.rows, run.begin, run.end);
        part.hidden |= run.cut;
        part.by_bits |= run.cut;
        use(part);
        from = run.end;
    }
}

template <class Format> FUSION_INLINE Floats weight_of(Floats scores, float factor, float shift) {
    if constexpr (Format::fused) return exp2(Format::rest(scores, all(factor), all(shift)));
    return exp2<6>((scores - shift) * factor);
}

}  // namespace
}  // namespace fusion
