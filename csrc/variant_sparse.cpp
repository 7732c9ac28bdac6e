// The sparse part of an instruction-set variant: selected keys and the indexer; compiled like variant_dense.cpp, with
// the same restrictions.

#include "sparse/indexer.h"
#include "sparse/loss_tiles.h"
#include "dtype_dispatch.h"
#include "simd/operand_formats.h"
#include "sparse/attend.h"
#include "sparse/gradient.h"

namespace fusion {
namespace {

template <class Format> std::size_t scratch_bytes(const SparseProblem &p, std::int64_t heads) {
    return SparseScratch<Format>(p, Sizes<Format>(p), heads, nullptr).bytes;
}

template <class Format>
GradientScratch<Format> gradient_scratch(const SparseProblem &p, std::int64_t heads) {
    return {p, Sizes<Format>(p), heads, nullptr};
}

template <class Format> std::size_t gradient_bytes(const SparseProblem &p, std::int64_t heads) {
    const auto gradient = gradient_scratch<Format>(p, heads);
    return gradient.bytes + (p.indexes ? IndexListScratch<Format>(p, gradient, nullptr).bytes : 0);
}

template <class Format>
std::size_t loss_bytes(const SparseProblem &attention, const SparseProblem &index) {
    if (index.select_count) {
        return gradient_bytes<Format>(index, index.heads_q) + ListScratch<Format>(attention, index, nullptr).bytes;
    }
    return gradient_scratch<Format>(index, index.heads_q).bytes + TileScratch<Format>(attention, index, nullptr).bytes;
}

template <class Format> std::size_t contribution_bytes(const SparseProblem &p, std::int64_t heads) {
    const auto gradient = gradient_scratch<Format>(p, heads);
    if (p.indexes) return IndexContributions<Format>(p, gradient, nullptr).bytes;
    return GradientContributions<Format>(p, Sizes<Format>(p), gradient, nullptr).bytes;
}

template <class Format>
void gradient(const SparseJob &job, const SparseItem &item, const Contributions &stored, float *dsink, void *scratch) {
    if (job.problem->indexes) return index_gradient<Format>(job, item, stored, scratch);
    select_gradient<Format>(job, item, stored, dsink, scratch);
}

template <class Format>
void add_keys(const SparseJob &job, const SparseItem &item, const Contributions &stored, const Contributions *next,
              const KeyRange &range, const KeySums &sums, void *scratch) {
    const auto add = job.problem->indexes ? add_index_gradient<Format> : add_gradient<Format>;
    add(job, item, stored, next, range, sums, scratch);
}

template <class Format> std::size_t index_scratch_bytes(const SparseProblem &p, std::int64_t rows) {
    return IndexScratch<Format>(p, IndexSizes(p), rows, nullptr).bytes;
}

template <class Format> constexpr SparseKernels kernels() {
    return {panel,
            scratch_bytes<Format>,
            FUSION_KERNEL(select_attend),
            gradient_bytes<Format>,
            contribution_bytes<Format>,
            sum_columns<Format>,
            gradient<Format>,
            list_loss<Format>,
            add_keys<Format>,
            store_sums<Format>,
            loss_bytes<Format>,
            tile_loss<Format>,
            index_packed_bytes<Format>,
            FUSION_KERNEL(index_pack),
            index_scratch_bytes<Format>,
            index_stats<Format>,
            index_rows<Format>,
            index_scores<Format>,
            index_choose<Format>};
}

#if defined(FUSION_BRAIN_PRODUCTS)
constexpr SparseVariant variant = {{}, kernels<Pair>()};
#else
constexpr SparseVariant variant = {kernels<Single>(), {}};
#endif

}  // namespace
}  // namespace fusion

extern "C" const fusion::SparseVariant *FUSION_ENTRY(_sparse)() { return &fusion::variant; }
