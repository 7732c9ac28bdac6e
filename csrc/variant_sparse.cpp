// The sparse part of an instruction-set variant: selected keys and the indexer. Compiled as variant_dense.cpp is, with
// the same care.

#include "sparse/indexer.h"
#include "sparse/loss_tiles.h"
#include "kernel_table.h"
#include "simd/formats.h"
#include "sparse/attend.h"
#include "sparse/gradient.h"

namespace fusion {
namespace {

template <class Format> std::size_t scratch_bytes(const SparseProblem &p, std::int64_t heads, std::int64_t longest) {
    return SparseScratch<Format>(p, Sizes<Format>(p), heads, longest, nullptr).bytes;
}

template <class Format> std::size_t gradient_bytes(const SparseProblem &p, std::int64_t heads, std::int64_t longest) {
    return GradientScratch<Format>(p, Sizes<Format>(p), heads, longest, nullptr).bytes;
}

template <class Format> std::size_t index_scratch_bytes(const SparseProblem &p, std::int64_t rows) {
    return IndexScratch<Format>(p, IndexSizes(p), rows, nullptr).bytes;
}

template <class Format> constexpr SparseKernels kernels() {
    return {scratch_bytes<Format>,
            FUSION_KERNEL(select_attend),
            gradient_bytes<Format>,
            sum_columns<Format>,
            FUSION_KERNEL(select_gradient),
            FUSION_KERNEL(store_sums),
            loss_bytes<Format>,
            FUSION_KERNEL(tile_loss),
            list_notes_bytes<Format>,
            FUSION_KERNEL(list_loss),
            add_list<Format>,
            index_packed_bytes<Format>,
            FUSION_KERNEL(index_pack),
            index_scratch_bytes<Format>,
            FUSION_KERNEL(index_stats),
            FUSION_KERNEL(index_rows),
            FUSION_KERNEL(index_scores),
            FUSION_KERNEL(index_choose)};
}

#if defined(FUSION_BRAIN_PRODUCTS)
constexpr SparseVariant variant = {kernels<Single>(), kernels<Pair>(), panel};
#else
constexpr SparseVariant variant = {kernels<Single>(), {}, panel};
#endif

}  // namespace
}  // namespace fusion

extern "C" const fusion::SparseVariant *FUSION_ENTRY(_sparse)() { return &fusion::variant; }
