// What one instruction-set variant of the CPU core offers to the baseline code.
//
// variant_dense.cpp, variant_decode.cpp and variant_sparse.cpp are compiled once per instruction set. Each copy of each
// keeps everything in an anonymous namespace and shows one C entry point, so no function compiled for a newer CPU can
// be linked into code that an older one runs.

#pragma once

#include "data/decode.h"
#include "data/problem.h"

namespace fusion {

// The kernels of one operand format. Sizes are bytes and multiples of 64.
struct Kernels {
    std::int64_t panel;  // keys of a panel: what key ranges are rounded to
    std::size_t (*packed_bytes)(const Problem &, const Unit &);
    std::size_t (*scratch_bytes)(const Problem &);
    // Packs panels [first, end) of a unit, counted from its key_begin.
    void (*pack)(const Job &, const Unit &, std::int64_t first, std::int64_t end);
    void (*pack_stored)(const Job &, const Unit &, std::int64_t first, std::int64_t end);  // of a job with a cache
    // Of two units that are packed in the same memory with as many keys each, the second of which begins later in the
    // same sequence: moves `panels` panels, from the second one's key_begin on, to where the second has them.
    void (*carry)(const Problem &, const Unit &from, const Unit &to, std::int64_t panels);
    // Computes one tile of one query head; returns how many of its rows are empty.
    std::int64_t (*attend)(const Job &, const Unit &, std::int64_t head, const Tile &, const Prefetches &,
                           void *scratch);
};

// The same for the backward. A tile of keys belongs to one thread from load_keys to store_keys.
struct GradientKernels {
    std::int64_t tile_keys;
    std::size_t (*row_bytes)(const Problem &, std::int64_t rows);  // of a packed tile of rows
    std::size_t (*key_bytes)(const Problem &);                     // of a tile of keys and all that a thread needs
    RowNotes (*pack_rows)(const Job &, const RowTile &);
    void (*load_keys)(const Job &, const KeyTile &);
    void (*accumulate)(const Job &, const RowTile &, const KeyTile &, const RowTurn &, const Prefetches &);
    void (*store_keys)(const Job &, const KeyTile &);
    void (*store_rows)(const Job &, const RowTile &);
};

// Decode: partial results are rows of floats whose layout the variant alone knows.
struct DecodeKernels {
    std::size_t (*scratch_bytes)(const DecodeProblem &);
    std::size_t (*partial_floats)(const DecodeProblem &);  // of one row
    // next: the unit that this thread computes next, or null. Returns whether what it has placed for its rows is still
    // there.
    bool (*attend)(const DecodeJob &, const DecodeUnit &, const DecodeUnit *next, void *scratch, float *partial);
    // Merges partial results in order into the first ones.
    void (*merge)(const DecodeJob &, const DecodeRows &, float *partials);
    // The same, and writes out and statistics; returns how many rows are empty.
    std::int64_t (*finish)(const DecodeJob &, const DecodeRows &, float *partials);
    std::int32_t (*dot_bytes)(const std::uint8_t *x, const std::int8_t *y,
                              std::size_t n);  // x below 128; for the probe
};

struct DenseVariant {
    int lanes;         // floats per vector register, as compiled
    Kernels as_float;  // float32, float16, and bfloat16 where there is nothing better
    Kernels as_pairs;  // bfloat16 by dot products of pairs; null pointers where the instruction is missing
    GradientKernels gradients_as_float, gradients_as_pairs;
    double (*float_work)(std::int64_t turns, float *result);  // peak.h
    double (*pair_work)(std::int64_t turns, float *result);
    float (*dot)(const float *x, const float *y, std::size_t n);
    float (*dot_bf16)(const std::uint16_t *x, const std::uint16_t *y, std::size_t n);

    const Kernels &kernels(Dtype dtype) const {
        return dtype == Dtype::bfloat16 && as_pairs.attend ? as_pairs : as_float;
    }
    const GradientKernels &gradient_kernels(Dtype dtype) const {
        return dtype == Dtype::bfloat16 && gradients_as_pairs.accumulate ? gradients_as_pairs : gradients_as_float;
    }
};

struct Variant : DenseVariant {
    const char *name;
    DecodeKernels decode;
    std::size_t cache = std::size_t{1} << 20;  // bytes of a core's second-level cache: no result depends on it
};

constexpr std::int64_t tile_rows = 96;       // query rows of a tile of the forward, at most
constexpr std::int64_t gradient_rows = 192;  // and of the backward

}  // namespace fusion
