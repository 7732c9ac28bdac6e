// Selected keys and the indexer for one instruction-set variant; compiled as variant.cpp is, with the same care.

#include "sparse/indexer.h"
#include "sparse/loss_tiles.h"
#include "single.h"
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

std::int64_t attend_single(const SparseJob &job, const SparseItem &item, void *scratch) {
    FUSION_SINGLE(select_attend, (job, item, scratch))
}

void gradient_single(const SparseJob &job, const SparseItem &item, const Turn &turn, const KeySums &table, float *dsink,
                     void *scratch) {
    FUSION_SINGLE(select_gradient, (job, item, turn, table, dsink, scratch))
}

void store_single(const SparseJob &job, std::int64_t seq, std::int64_t head, const KeySums &table, std::int64_t first,
                  std::int64_t end) {
    FUSION_SINGLE(store_sums, (job, seq, head, table, first, end))
}

void tile_loss_single(const SparseJob &job, const SparseItem &item, const Turn &turn, const KeySums &table,
                      double *loss, void *scratch) {
    FUSION_SINGLE(tile_loss, (job, item, turn, table, loss, scratch))
}

void list_loss_single(const SparseJob &job, const SparseItem &item, void *notes, double *loss, void *scratch) {
    FUSION_SINGLE(list_loss, (job, item, notes, loss, scratch))
}

void index_pack_single(const SparseJob &job, std::int64_t seq, std::int64_t first, std::int64_t end, char *packed) {
    FUSION_SINGLE(index_pack, (job, seq, first, end, packed))
}

void index_stats_single(const SparseJob &job, std::int64_t seq, std::int64_t row0, std::int64_t row1,
                        const char *packed, void *scratch) {
    FUSION_SINGLE(index_stats, (job, seq, row0, row1, packed, scratch))
}

void index_rows_single(const SparseJob &job, std::int64_t seq, std::int64_t row0, std::int64_t row1, const char *packed,
                       void *scratch) {
    FUSION_SINGLE(index_rows, (job, seq, row0, row1, packed, scratch))
}

void index_scores_single(const SparseJob &job, std::int64_t seq, std::int64_t row, std::int64_t first, std::int64_t end,
                         const char *packed, float *scores, void *scratch) {
    FUSION_SINGLE(index_scores, (job, seq, row, first, end, packed, scores, scratch))
}

void index_choose_single(const SparseJob &job, std::int64_t seq, std::int64_t row, const float *scores, void *scratch) {
    FUSION_SINGLE(index_choose, (job, seq, row, scores, scratch))
}

constexpr SparseVariant variant = {
    {scratch_bytes<Single>, attend_single, gradient_bytes<Single>, sum_columns<Single>, gradient_single, store_single,
     loss_bytes<Single>, tile_loss_single, list_notes_bytes<Single>, list_loss_single, add_list<Single>,
     index_packed_bytes<Single>, index_pack_single, index_scratch_bytes<Single>, index_stats_single, index_rows_single,
     index_scores_single, index_choose_single},
#if defined(__AVX512BF16__)
    {scratch_bytes<Pair>, select_attend<Pair, Brain>, gradient_bytes<Pair>, sum_columns<Pair>,
     select_gradient<Pair, Brain>, store_sums<Pair, Brain>, loss_bytes<Pair>, tile_loss<Pair, Brain>,
     list_notes_bytes<Pair>, list_loss<Pair, Brain>, add_list<Pair>, index_packed_bytes<Pair>, index_pack<Pair, Brain>,
     index_scratch_bytes<Pair>, index_stats<Pair, Brain>, index_rows<Pair, Brain>, index_scores<Pair, Brain>,
     index_choose<Pair, Brain>},
#else
    {},
#endif
    panel,
};

}  // namespace
}  // namespace fusion

#define FUSION_JOIN(entry, suffix) entry##suffix
#define FUSION_SUFFIX(entry, suffix) FUSION_JOIN(entry, suffix)
extern "C" const fusion::SparseVariant *FUSION_SUFFIX(FUSION_VARIANT_ENTRY, _sparse)() { return &fusion::variant; }
