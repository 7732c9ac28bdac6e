#include "kernels.h"

#include "clock.h"
#include "kernel_times.h"

#include "plan/schedule.h"

#include <cstdio>
#include <cstdlib>

namespace schedule {
namespace {

using namespace fusion;

constexpr std::int64_t panel = 32;

std::size_t lines(std::int64_t bytes) { return static_cast<std::size_t>(round_up<std::int64_t>(bytes, 64)); }

std::int64_t item(Dtype dtype) { return dtype == Dtype::bfloat16 ? 2 : 4; }

// ------------------------------------------------------------------------------------------------------------- forward

// Loading a row of queries and storing its result; packing a key: of 128 bfloat16 columns each. Fitted, with the time
// of a pair, to nine calls of 8 heads, 96 to 1920 rows and 512 to 4096 keys on one thread, all met within 2 %.
constexpr double forward_row = 33, forward_key = 102;
// Moving a packed key, least of 2000 times 256 of them.
constexpr double forward_move = 11;

std::size_t packed_bytes(const Problem &p, const Unit &unit) {
    const std::int64_t keys = unit.key_end - unit.key_begin;
    return lines(keys * (p.dim_qk + p.dim_rope + p.dim_v) * item(p.dtype) + keys / panel);
}

std::size_t forward_scratch(const Problem &p) {
    return lines(tile_rows * ((p.dim_qk + p.dim_rope) * item(p.dtype) + p.dim_v * 4 + 80) + 12 * 512 * 6);
}

double beside_measured(const Problem &p) {  // how long a key's or a row's bytes are beside those measured
    return static_cast<double>((p.dim_qk + p.dim_rope + p.dim_v) * item(p.dtype)) / 512;
}

void pack(const Job &job, const Unit &, std::int64_t first, std::int64_t end) {
    advance(forward_key * beside_measured(*job.problem) * static_cast<double>((end - first) * panel));
}

void carry(const Problem &p, const Unit &, const Unit &, std::int64_t panels) {
    advance(forward_move * beside_measured(p) * static_cast<double>(panels * panel));
}

std::int64_t attend(const Job &job, const Unit &, std::int64_t, const Tile &tile, const Prefetches &, void *) {
    const Problem &p = *job.problem;
    const double pairs = visible_pairs(job.sequences[tile.seq], tile.row0, tile.row1, tile.begin, tile.end);
    const double rows = forward_row * beside_measured(p) * static_cast<double>(tile.row1 - tile.row0);
    advance(products(p.dtype, pairs * static_cast<double>(p.dim_qk + p.dim_rope + p.dim_v), forward_share) + rows);
    return 0;
}

// ------------------------------------------------------------------------------------------------------------ backward

constexpr double backward_row = 209, backward_key = 78;  // packing and storing; fitted as the forward's

std::int64_t keys_of_tile(Dtype dtype) { return dtype == Dtype::bfloat16 ? 256 : 128; }

std::size_t row_bytes(const Problem &p, std::int64_t rows) {
    const std::int64_t qk = p.dim_qk + p.dim_rope;
    return lines(round_up<std::int64_t>(rows, 12) * ((qk + p.dim_v) * 2 * item(p.dtype) + qk * 4 + 19));
}

std::size_t key_bytes(const Problem &p) {
    const std::int64_t qk = p.dim_qk + p.dim_rope, keys = keys_of_tile(p.dtype);
    return lines(keys * ((2 * qk + p.dim_v) * item(p.dtype) + (qk + p.dim_v) * 4) + 12 * keys * 10 +
                 2 * keys * gradient_rows * item(p.dtype));
}

PackedRows pack_rows(const Job &job, const RowTile &rows) {
    advance(backward_row / 2 * beside_measured(*job.problem) * static_cast<double>(rows.row1 - rows.row0));
    return {0, 0};
}

void store_rows(const Job &job, const RowTile &rows) {
    advance(backward_row / 2 * beside_measured(*job.problem) * static_cast<double>(rows.row1 - rows.row0));
}

void load_keys(const Job &job, const KeyTile &keys) {
    advance(backward_key / 2 * beside_measured(*job.problem) * static_cast<double>(keys.key1 - keys.key0));
}

// Tiles of keys add to a row of dq, and heads to an element of dbias, in ascending order.
void add_in_order(const Job &job, const RowTile &rows, const KeyTile &keys, std::int64_t row) {
    auto &order = *static_cast<Order *>(job.gradients->dq.base);
    const std::int64_t head = rows.seq * job.problem->heads_q + rows.head;
    order.add(-1 - ((head << 32) + row), keys.key0);
    const Matrix &m = job.gradients->dbias;
    if (!m.base || job.problem->bias == Bias::table) return;
    order.add(m.address[rows.seq] + rows.head * m.stride_head[rows.seq] + row * m.stride_row[rows.seq] +
                  keys.key0 * m.stride_key,
              head);
}

// Block of rows after block of rows: scores, dP and, in its turn, dq; then dk and dv of all rows.
void accumulate(const Job &job, const RowTile &rows, const KeyTile &keys, const RowTurn &turn, const Prefetches &) {
    constexpr std::int64_t block = 12;
    const Problem &p = *job.problem;
    const double qk = static_cast<double>(p.dim_qk + p.dim_rope), columns = qk + static_cast<double>(p.dim_v);
    double pairs = 0;
    for (std::int64_t row = rows.row0; row < rows.row1; row += block) {
        const std::int64_t end = std::min(row + block, rows.row1);
        const double here = visible_pairs(job.sequences[rows.seq], row, end, keys.key0, keys.key1);
        advance(products(p.dtype, here * columns, backward_share));
        if (turn.wait) turn.wait(turn.state, end - rows.row0);
        advance(products(p.dtype, here * qk, backward_share));
        add_in_order(job, rows, keys, row);
        if (turn.done) turn.done(turn.state, end - rows.row0);
        pairs += here;
    }
    advance(products(p.dtype, pairs * columns, backward_share));
}

GradientKernels gradients(std::int64_t tile_keys) {
    return {tile_keys, row_bytes, key_bytes, pack_rows, load_keys, accumulate, load_keys, store_rows};
}

// -------------------------------------------------------------------------------------------------------------- decode

// A byte of the cache: one core reads so fast. Beginning a head of a unit, with and without placing its queries, and
// merging a row of a partial result.
constexpr double decode_byte = 0.06, decode_place = 700, decode_begin = 100, decode_merge = 10;

std::size_t decode_scratch(const DecodeProblem &p) {
    const std::int64_t qk = p.dim_qk + p.dim_rope;
    return lines(4 * (decode_slots * (qk + 7) + 2 * 16 * decode_tile + decode_tile * (qk + p.dim_v + 4)) +
                 5 * 8 * decode_tile);
}

std::size_t partial_floats(const DecodeProblem &p) {
    return static_cast<std::size_t>(16 + round_up<std::int64_t>(p.dim_v, 32));
}

DecodeNonfinite attend_decode(const DecodeJob &job, const DecodeUnit &unit, const DecodeUnit *, void *, float *, bool) {
    const DecodeProblem &p = *job.problem;
    const std::int64_t columns = p.dim_qk + p.dim_rope + (p.shares_kv ? 0 : p.dim_v);
    const double bytes = static_cast<double>((unit.end - unit.begin) * columns) * (p.storage == Storage::int8 ? 1 : 2);
    const double pairs = static_cast<double>((unit.row1 - unit.row0) * (unit.end - unit.begin));
    const double computed = products(p.dtype, pairs * static_cast<double>(p.dim_qk + p.dim_v), 0.5);
    const double begun = decode_begin + (unit.placed ? 0 : decode_place);
    advance(static_cast<double>(unit.heads) * (begun + std::max(bytes * decode_byte, computed)));
    return {};
}

void merge(const DecodeJob &, const DecodeRows &rows, float *) {
    advance(decode_merge * static_cast<double>((rows.row1 - rows.row0) * rows.count));
}

std::int64_t finish(const DecodeJob &job, const DecodeRows &rows, float *partials) {
    merge(job, rows, partials);
    return 0;
}

// ------------------------------------------------------------------------------------------------------ selected keys

double dims(const SparseProblem &p) { return static_cast<double>(p.dim_qk + p.dim_rope); }

std::int64_t listed(const SparseJob &job, const SparseItem &item) {
    const Sequence &seq = job.sequences[item.seq];
    return std::min(end_key(seq, item.row) - first_key(seq, item.row), job.problem->select_count);
}

// A row's list, ascending.
const std::int32_t *list_of(const SparseJob &job, const SparseItem &item) {
    const Rows &rows = job.operands->indices;
    return static_cast<const std::int32_t *>(rows.base) + rows.address[item.seq] + item.row * rows.stride_token;
}

std::size_t sparse_scratch(const SparseProblem &p, std::int64_t heads) {
    return lines(heads * (p.dim_qk + p.dim_v) * 8 + p.most_keys * 12);
}

std::int64_t sparse_attend(const SparseJob &job, const SparseItem &item, void *) {
    const SparseProblem &p = *job.problem;
    const double pairs = static_cast<double>(listed(job, item) * item.heads);
    advance(products(p.dtype, pairs * (dims(p) + static_cast<double>(p.dim_v)), sparse_share));
    return 0;
}

std::int64_t sum_columns(const SparseProblem &p) { return p.dim_qk + p.dim_rope + (p.shares_kv ? 0 : p.dim_v); }

std::int64_t chunk_of(Dtype dtype) { return dtype == Dtype::bfloat16 ? 96 : 48; }

void find_strips(const SparseJob &job, const SparseItem &item, const Contributions &stored) {
    const std::int32_t *const list = list_of(job, item), *const stop = list + listed(job, item);
    const std::int64_t strips = ceil_div(job.sequences[item.seq].kv_len, stored.strip_keys);
    for (std::int64_t i = 0; i <= strips; ++i) {
        stored.starts[i] = static_cast<std::int32_t>(std::lower_bound(list, stop, i * stored.strip_keys) - list);
    }
}

// All but the products of key gradients.
void sparse_gradient(const SparseJob &job, const SparseItem &item, const Contributions &stored, float *, void *) {
    find_strips(job, item, stored);
    const SparseProblem &p = *job.problem;
    const double pairs = static_cast<double>(listed(job, item) * item.heads);
    advance(products(p.dtype, pairs * (2 * dims(p) + static_cast<double>(p.dim_v)), sparse_backward_share));
}

// Blocks of a list's keys as they are multiplied: the same ones whatever range is asked for, of whole thirds.
std::int64_t multiplied_keys(std::int64_t first, std::int64_t stop) {
    constexpr std::int64_t block = 12;
    std::int64_t keys = 0;
    for (std::int64_t at = first; at < stop;) {
        const std::int64_t next = std::min(stop, (at / block + 1) * block);
        keys += round_up<std::int64_t>(next - at, block / 3);
        at = next;
    }
    return keys;
}

double index_products(const SparseProblem &p) { return static_cast<double>(p.heads_q) * dims(p); }

void add_keys(const SparseJob &job, const SparseItem &item, const Contributions &stored, const Contributions *,
              const KeyRange &range, const KeySums &, void *) {
    const SparseProblem &p = *job.problem;
    const auto keys = static_cast<double>(multiplied_keys(stored.starts[range.first], stored.starts[range.end]));
    if (p.indexes) return advance(products(p.dtype, keys * index_products(p), 0.72));
    const double columns = dims(p) + static_cast<double>(p.dim_v);
    advance(products(p.dtype, keys * static_cast<double>(item.heads) * columns, sparse_backward_share));
}

std::size_t contribution_bytes(const SparseProblem &p, std::int64_t heads) {
    const std::int64_t keys = p.most_keys;
    const std::int64_t a_key = p.indexes ? 8 + heads / 8 : 4 + 2 * heads * item(p.dtype);
    const std::int64_t columns = p.dim_qk + p.dim_rope + p.dim_v;
    return lines(keys * a_key + heads * columns * item(p.dtype));
}

void store_key_sums(const SparseJob &job, std::int64_t, std::int64_t, const KeySums &, std::int64_t first,
                    std::int64_t end) {
    advance(static_cast<double>((end - first) * sum_columns(*job.problem)) * 0.15);  // from memory to memory
}

// ------------------------------------------------------------------------------------------------- the indexer's loss

std::size_t loss_bytes(const SparseProblem &, const SparseProblem &index) {
    return lines(index.most_keys * (index.heads_q * 4 + 64) + (std::int64_t{4} << 20));
}

double attended_products(const SparseJob &job) {  // of a row and a key
    const SparseProblem &p = *job.attention;
    return static_cast<double>(p.heads_q) * dims(p);
}

// A tile of rows: probabilities of a block of keys, the indexer's part, chunk by chunk; then sums are handed on.
void tile_loss(const SparseJob &job, const SparseItem &item, const Turn &turn, const KeySums &, double *loss, void *) {
    constexpr std::int64_t width = 192;
    const SparseProblem &p = *job.problem;
    const Sequence &seq = job.sequences[item.seq];
    const std::int64_t row1 = std::min(item.row + loss_tile_rows, seq.q_len), chunk = chunk_of(p.dtype);
    const std::int64_t begin = first_key(seq, item.row), end = std::max<std::int64_t>(end_key(seq, row1 - 1), 0);
    for (std::int64_t at = begin; at < end; at += width) {
        const std::int64_t stop = std::min(at + width, end);
        const double pairs = visible_pairs(seq, item.row, row1, at, stop);
        advance(products(p.dtype, pairs * attended_products(job), tile_loss_share));
        for (std::int64_t first = at; first < stop; first += chunk) {
            const std::int64_t last = std::min(first + chunk, stop);
            const double here = visible_pairs(seq, item.row, row1, first, last);
            advance(products(p.dtype, 3 * here * index_products(p), tile_loss_share));
            turn.wait(turn.state, turn.item, first, last - 1);
            advance(static_cast<double>((last - first) * p.dim_qk) * 0.1);
            if (last < end) turn.done(turn.state, turn.item, last, end - 1);
        }
    }
    turn.done(turn.state, turn.item, end, end - 1);
    *loss = 0;
}

// All but the products of key gradients.
void list_loss(const SparseJob &job, const SparseItem &item, const Contributions &stored, double *loss, void *) {
    find_strips(job, item, stored);
    const double keys = static_cast<double>(listed(job, item));
    const double columns = attended_products(job) + 2 * index_products(*job.problem);
    advance(products(job.problem->dtype, keys * columns, list_loss_share));
    *loss = 0;
}

// --------------------------------------------------------------------------------------------------------- the indexer

constexpr double index_packing = 0.14;  // a byte of a key, from memory and back
constexpr double index_meeting = 0.02;  // the same by each row that meets it, 0.05 where pages of memory are small
constexpr double choosing = 1;          // a score

std::size_t index_packed_bytes(const SparseProblem &p, std::int64_t keys) {
    return lines(round_up<std::int64_t>(keys, panel) * p.dim_qk * item(p.dtype));
}

void index_pack(const SparseJob &job, std::int64_t, std::int64_t first, std::int64_t end, char *) {
    const SparseProblem &p = *job.problem;
    advance(index_packing * static_cast<double>((end - first) * panel * p.dim_qk * item(p.dtype)));
}

void meet_keys(const SparseProblem &p, std::int64_t rows, std::int64_t keys, const char *packed) {
    if (!packed) advance(index_meeting * static_cast<double>(rows * keys * p.dim_qk * item(p.dtype)));
}

std::size_t index_scratch_bytes(const SparseProblem &p, std::int64_t rows) {
    return lines(rows * (p.heads_q * p.dim_qk * 2 + (std::int64_t{256} << 10)));
}

void index_rows(const SparseJob &job, std::int64_t seq, std::int64_t row0, std::int64_t row1, const char *packed,
                void *) {
    const SparseProblem &p = *job.problem;
    const double pairs = visible_pairs(job.sequences[seq], row0, row1, 0, job.sequences[seq].kv_len);
    meet_keys(p, row1 - row0, job.sequences[seq].kv_len, packed);
    advance(products(p.dtype, pairs * index_products(p), indexer_share) + choosing * pairs);
}

void index_scores(const SparseJob &job, std::int64_t, std::int64_t row0, std::int64_t row1, std::int64_t first,
                  std::int64_t end, std::int64_t, const char *packed, float *, std::int64_t, void *) {
    const SparseProblem &p = *job.problem;
    meet_keys(p, row1 - row0, end - first, packed);
    advance(products(p.dtype, static_cast<double>((row1 - row0) * (end - first)) * index_products(p), indexer_share));
}

void index_choose(const SparseJob &job, std::int64_t seq, std::int64_t, const float *, void *) {
    advance(choosing * static_cast<double>(job.sequences[seq].kv_len));
}

}  // namespace

void Order::add(std::int64_t place, std::int64_t turn) {
    const auto [at, first] = last_.try_emplace(place, turn);
    if (!first && at->second > turn) {
        std::fprintf(stderr, "schedule: %lld was added to out of order\n", static_cast<long long>(place));
        std::abort();
    }
    at->second = turn;
}

const Variant &variant() {
    static const Variant table = [] {
        Variant v = {};
        v.name = "time";
        v.as_float = v.as_pairs = {panel, packed_bytes, forward_scratch, pack, pack, carry, attend};
        v.gradients_as_float = gradients(keys_of_tile(Dtype::float32));
        v.gradients_as_pairs = gradients(keys_of_tile(Dtype::bfloat16));
        v.decode = {decode_scratch, partial_floats, {attend_decode}, merge, finish};
        return v;
    }();
    return table;
}

const SparseVariant &sparse_variant() {
    static constexpr SparseKernels kernels = {
        panel,       sparse_scratch,  sparse_attend,      sparse_scratch, contribution_bytes,
        sum_columns, sparse_gradient, list_loss,          add_keys,       store_key_sums,
        loss_bytes,  tile_loss,       index_packed_bytes, index_pack,     index_scratch_bytes,
        index_rows,  index_rows,      index_scores,       index_choose};
    static const SparseVariant table = {kernels, kernels};
    return table;
}

}  // namespace schedule
