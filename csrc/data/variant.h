// Tables of the functions of one instruction-set variant of the CPU core, through which the baseline code calls them.
//
// The four variant_*.cpp are compiled once per instruction set. Each copy has its functions in an anonymous namespace
// and exports one C entry point, so that no function compiled for a newer CPU can be linked into code that an older one
// runs. Kernels that its instructions do not change are null pointers, and dispatch.cpp takes them from the variant
// before.

#pragma once

#include "data/decode.h"
#include "data/pool.h"
#include "data/problem.h"
#include "data/variant_sparse.h"

namespace fusion {

// The kernels of one operand format. Sizes are bytes and multiples of 64.
struct Kernels {
    std::int64_t panel;  // keys per panel; key ranges are rounded to panels
    std::size_t (*packed_bytes)(const Problem &, const Unit &);
    std::size_t (*scratch_bytes)(const Problem &);
    // Packs panels [first, end) of a unit, counted from its key_begin.
    void (*pack)(const Job &, const Unit &, std::int64_t first, std::int64_t end);
    void (*pack_stored)(const Job &, const Unit &, std::int64_t first, std::int64_t end);  // of a job with a cache
    // Moves `panels` panels, from to.key_begin on, to their position in unit `to`. Both units are packed in the same
    // memory with the same number of keys, and `to` begins later in the same sequence.
    void (*carry)(const Problem &, const Unit &from, const Unit &to, std::int64_t panels);
    // Computes one tile of one query head; returns its number of empty rows.
    std::int64_t (*attend)(const Job &, const Unit &, std::int64_t head, const Tile &, const Prefetches &,
                           void *scratch);
};

// The backward kernels of one operand format. One thread processes a tile of keys from load_keys to store_keys.
struct GradientKernels {
    std::int64_t tile_keys;
    std::size_t (*row_bytes)(const Problem &, std::int64_t rows);  // of a packed tile of rows
    std::size_t (*key_bytes)(const Problem &);                     // of a tile of keys and scratch of a thread
    PackedRows (*pack_rows)(const Job &, const RowTile &);
    void (*load_keys)(const Job &, const KeyTile &);
    void (*accumulate)(const Job &, const RowTile &, const KeyTile &, const RowTurn &, const Prefetches &);
    void (*store_keys)(const Job &, const KeyTile &);
    void (*store_rows)(const Job &, const RowTile &);
};

// The decode kernels. Partial results are rows of floats whose layout is private to the variant.
struct DecodeKernels {
    std::size_t (*scratch_bytes)(const DecodeProblem &);
    std::size_t (*partial_floats)(const DecodeProblem &);  // of one row
    // Computes a unit. next: the unit that this thread computes next, or null. Returns the rows of each head with
    // non-finite results, which are invalid; other rows of such a head are invalid too, unless the unit has rows of
    // several sequences. They are computed again from floats with `careful`, after which every result is valid.
    using Attend = DecodeNonfinite(const DecodeJob &, const DecodeUnit &, const DecodeUnit *next, void *scratch,
                                   float *partial, bool careful);
    Attend *attend[static_cast<int>(DecodeFormat::count)];
    // Merges partial results, in order, into the first one of each row.
    void (*merge)(const DecodeJob &, const DecodeRows &, float *partials);
    // Merges partial results and writes out and statistics; returns the number of empty rows.
    std::int64_t (*finish)(const DecodeJob &, const DecodeRows &, float *partials);

    Attend *attend_of(DecodeFormat format) const {
        Attend *const kernel = attend[static_cast<int>(format)];
        return kernel ? kernel : attend[static_cast<int>(DecodeFormat::floats)];
    }
};

struct DenseVariant {
    Kernels as_float;  // float32, float16, and bfloat16 if as_pairs is missing
    Kernels as_pairs;  // bfloat16 by dot products of pairs; null pointers where the instruction is missing
    GradientKernels gradients_as_float, gradients_as_pairs;
    double (*float_work)(std::int64_t turns, float *result);  // peak.h
    double (*pair_work)(std::int64_t turns, float *result);

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
    SparseVariant sparse;
    PoolVariant pool;
    std::size_t cache = std::size_t{1} << 20;  // bytes of a core's second-level cache; results do not depend on it
};

constexpr std::int64_t tile_rows = 96;       // most query rows of a tile of the forward
constexpr std::int64_t gradient_rows = 192;  // most query rows of a tile of the backward

}  // namespace fusion
