// What the parts of the core's own test share: which there are, and a call as the core takes it.

#pragma once

#include "judge.h"

namespace check {

void test_quantised_decode(Report &report);  // decode_test.cpp
void test_caches(Report &report);            // cache_test.cpp
void test_pooling(Report &report);           // pool_test.cpp
void test_sparse(Report &report);            // sparse_test.cpp
void test_teams(Report &report);             // team_test.cpp
void test_tiles(Report &report);             // tiles_test.cpp

// Those to test, without those that share this part with a weaker one.
std::vector<fusion::Built> with_own_sparse_part(const Report &report);

inline fusion::Operands operands_of(Call &c) {
    fusion::Operands o;
    o.q = c.q.view(), o.k = c.k.view(), o.v = c.v.view(), o.q_rope = c.q_rope.view(), o.k_rope = c.k_rope.view();
    o.out = c.out.view(), o.max = c.max.view(), o.sum = c.sum.view();
    o.bias = c.bias_at.view(c.bias.data(), c.problem.dtype);
    o.blocked = c.blocked_at.view(c.blocked.data(), Dtype::float32);
    o.drop_bits = c.bits_at.view(c.bits.data(), Dtype::float32);
    o.blocked_tiles = c.tiles_at.view(c.tiles.data(), Dtype::float32);
    o.blocked_bits = c.tile_bits.data(), o.blocked_count = static_cast<Long>(c.tile_bits.size() / 2048);
    o.slopes = c.slopes.data(), o.sink = c.sink.data(), o.seed = c.seed, o.offset = c.offset;
    return o;
}

inline fusion::Cache cache_of(RowMemory &m, Dtype dtype) {
    fusion::Cache c;
    c.base = static_cast<const char *>(m.elements.data()), c.item = kind_of(dtype).bytes;
    c.address = m.address.data(), c.stride_head = m.stride_head.data(), c.stride_token = m.stride_token;
    return c;
}

inline std::vector<fusion::Tile> tiles_of(const Call &c) {
    std::vector<fusion::Tile> out;
    for (std::size_t b = 0; b < c.sequences.size(); ++b) {
        const fusion::Sequence &s = c.sequences[b];
        for (Long row = 0; row < s.q_len; row += fusion::tile_rows) {
            const Long last = std::min(row + fusion::tile_rows, s.q_len);
            const Long begin = std::max<Long>(row + s.lo, 0);
            const Long end = std::min(std::max(last - 1 + s.hi, s.prefix), s.kv_len);
            out.push_back({static_cast<Long>(b), row, last, begin < end ? begin : 0, begin < end ? end : 0});
        }
    }
    return out;
}

}  // namespace check
