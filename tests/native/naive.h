// The same call by loops in double, one row and one key after the other, and beside every sum the sum of its absolute
// terms: what rounding errors are relative to. Shares no line with the core.

#pragma once

#include "memory.h"

#include <algorithm>
#include <map>
#include <string>

namespace check {

using fusion::Bias;
using fusion::Dropout;

struct Call {
    fusion::Problem problem{};
    std::vector<fusion::Sequence> sequences;
    RowMemory q, k, v, q_rope, k_rope, dout;
    MatrixMemory bias_at, blocked_at, bits_at, tiles_at;
    Elements bias;
    std::vector<unsigned char> blocked, bits, tile_bits;
    std::vector<std::int32_t> tiles;  // of 128 rows and keys
    std::vector<float> slopes, sink;
    std::uint64_t seed = 0x123456789abcdef;
    std::uint32_t offset = 77;
    RowMemory out, max, sum;               // what a forward saved
    std::vector<std::vector<Long>> lists;  // of selected keys, by list_at(); none: a row meets the keys of its band

    std::size_t list_at(Long b, Long head_kv, Long row) const {
        Long before = 0;
        for (Long a = 0; a < b; ++a) before += sequences[a].q_len;
        return static_cast<std::size_t>((before + row) * problem.heads_kv + head_kv);
    }
    Long group() const { return problem.heads_q / problem.heads_kv; }
};

// Values of a tensor and the sizes of their sums, in the order of RowMemory::each or of memory.
struct Sums {
    std::vector<double> value, size, more;  // more: allowed besides, where there is any
    explicit Sums(Long count = 0) : value(count), size(count) {}
    void add(Long at, double x, double magnitude) {
        value[at] += x;
        size[at] += magnitude;
    }
};
using Results = std::map<std::string, Sums>;

// Philox4x32-7 as published, for counter (key / 8, row, stream, offset); key % 8 selects a 16-bit half.
inline bool drawn(const Call &c, Long b, Long head, Long row, Long key) {
    std::uint32_t x[4] = {static_cast<std::uint32_t>(key / 8), static_cast<std::uint32_t>(row),
                          static_cast<std::uint32_t>(b * c.problem.heads_q + head), c.offset};
    std::uint32_t k0 = static_cast<std::uint32_t>(c.seed), k1 = static_cast<std::uint32_t>(c.seed >> 32);
    for (int round = 0; round < 7; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        const std::uint64_t m0 = std::uint64_t{0xD2511F53u} * x[0], m1 = std::uint64_t{0xCD9E8D57u} * x[2];
        const auto high0 = static_cast<std::uint32_t>(m0 >> 32), low0 = static_cast<std::uint32_t>(m0);
        const auto high1 = static_cast<std::uint32_t>(m1 >> 32), low1 = static_cast<std::uint32_t>(m1);
        const std::uint32_t next[4] = {high1 ^ x[1] ^ k0, low1, high0 ^ x[3] ^ k1, low0};
        std::copy(next, next + 4, x);
    }
    return static_cast<Long>(x[key % 8 / 2] >> (key % 2 * 16) & 0xffff) < c.problem.keep_below;
}

inline bool is_retained(const Call &c, Long b, Long head, Long row, Long key) {
    if (c.problem.dropout == Dropout::none) return true;
    if (c.problem.dropout == Dropout::philox) return drawn(c, b, head, row, key);
    const Long bit = c.bits_at.at(b, head, row, key);
    return c.bits[bit / 8] >> (bit % 8) & 1;
}

inline bool is_visible(const Call &c, Long b, Long head, Long row, Long key) {
    const fusion::Sequence &s = c.sequences[b];
    if (key < row + s.lo || key >= std::max(s.prefix, row + s.hi)) return false;
    if (c.problem.has_blocked && c.blocked[c.blocked_at.at(b, head, row, key)]) return false;
    if (!c.problem.has_blocked_tiles) return true;
    const std::int32_t tile = c.tiles[c.tiles_at.at(b, head, row / 128, key / 128)];
    const std::size_t byte = static_cast<std::size_t>(tile) * 2048 + row % 128 * 16 + key % 128 / 8;
    if (tile < 0 || byte >= c.tile_bits.size()) return tile == -2;
    return !(c.tile_bits[byte] >> key % 8 & 1);
}

struct Dot {
    double value = 0, size = 0;
    void add(double x, double y) {
        value += x * y;
        size += std::fabs(x * y);
    }
};

inline Dot dot(const RowMemory &x, const RowMemory &y, Long b, Long x_head, Long row, Long y_head, Long key) {
    Dot out;
    for (Long d = 0; d < x.dim; ++d) out.add(x.get(b, x_head, row, d), y.get(b, y_head, key, d));
    return out;
}

inline Dot score(const Call &c, Long b, Long head, Long row, Long key) {
    const fusion::Problem &p = c.problem;
    const Long kv_head = head / c.group();
    const Dot main = dot(c.q, c.k, b, head, row, kv_head, key),
              rope = dot(c.q_rope, c.k_rope, b, head, row, kv_head, key);
    double bias = 0;
    if (p.bias == Bias::matrix) bias = c.bias.get(c.bias_at.at(b, head, row, key));
    if (p.bias == Bias::slopes || p.bias == Bias::slopes_sqrt) {
        const double distance = std::fabs(static_cast<double>(key - row + c.sequences[b].shift));
        bias = -c.slopes[b * p.heads_q + head] * (p.bias == Bias::slopes ? distance : std::sqrt(distance));
    }
    if (p.bias_scaled) bias *= p.scale;
    double value = (main.value + rope.value) * p.scale;
    if (p.softcap > 0) value = p.softcap * std::tanh(value / p.softcap);
    return {value + bias, (main.size + rope.size) * std::fabs(p.scale) + std::fabs(bias)};
}

// Of a score, by its scaled product.
inline double slope(const Call &c, Long b, Long head, Long row, Long key) {
    if (!(c.problem.softcap > 0)) return 1;
    const Long kv_head = head / c.group();
    const double product =
        dot(c.q, c.k, b, head, row, kv_head, key).value + dot(c.q_rope, c.k_rope, b, head, row, kv_head, key).value;
    const double cosine = std::cosh(product * c.problem.scale / c.problem.softcap);
    return 1 / (cosine * cosine);
}

// The scores of a row that it sees, with their keys: one of -inf hides its key.
struct KeyScore {
    Long key;
    double score;
};
inline std::vector<KeyScore> row_scores(const Call &c, Long b, Long head, Long row, double &largest) {
    std::vector<KeyScore> out;
    const auto meet = [&](Long key) {
        if (!is_visible(c, b, head, row, key)) return;
        const Dot s = score(c, b, head, row, key);
        if (s.value == -INFINITY) return;
        out.push_back({key, s.value});
        largest = std::max(largest, s.size);
    };
    if (c.lists.empty()) {
        for (Long key = 0; key < c.sequences[b].kv_len; ++key) meet(key);
    } else {
        for (Long key : c.lists[c.list_at(b, head / c.group(), row)]) meet(key);
    }
    return out;
}

// Where a row begins in the order of RowMemory::each.
inline Long place(const RowMemory &m, Long b, Long head, Long token) {
    Long before = 0;
    for (Long a = 0; a < b; ++a) before += m.heads * m.tokens[a];
    return (before + head * m.tokens[b] + token) * m.dim;
}

template <class Do> void each_row(const Call &c, Do run) {  // run(b, head, row)
    for (std::size_t b = 0; b < c.sequences.size(); ++b) {
        for (Long h = 0; h < c.problem.heads_q; ++h) {
            for (Long i = 0; i < c.sequences[b].q_len; ++i) run(static_cast<Long>(b), h, i);
        }
    }
}

// out, max and sum; largest: the size of the largest score.
inline Results forward(const Call &c, double &largest) {
    const fusion::Problem &p = c.problem;
    Results r{{"out", Sums(c.out.size())}, {"max", Sums(c.max.size())}, {"sum", Sums(c.sum.size())}};
    each_row(c, [&](Long b, Long h, Long i) {
        const std::vector<KeyScore> row = row_scores(c, b, h, i, largest);
        double peak = p.has_sink ? c.sink[h] : -INFINITY, sum = 0;
        for (const KeyScore &s : row) peak = std::max(peak, s.score);
        for (const KeyScore &s : row) sum += std::exp(s.score - peak);
        if (p.has_sink) sum += std::exp(c.sink[h] - peak);
        const Long one = place(c.max, b, h, i), at = place(c.out, b, h, i);
        r["max"].add(one, peak, std::fabs(peak));
        r["sum"].add(one, sum, sum);
        for (const KeyScore &s : row) {
            if (!is_retained(c, b, h, i, s.key)) continue;
            const double weight = std::exp(s.score - peak) / sum / p.keep_prob;
            for (Long d = 0; d < p.dim_v; ++d) {
                const double x = weight * c.v.get(b, h / c.group(), s.key, d);
                r["out"].add(at + d, x, std::fabs(x));
            }
        }
    });
    return r;
}

inline void add_row(Sums &to, Long at, const RowMemory &from, Long b, Long head, Long token, double weight,
                    double size) {
    for (Long d = 0; d < from.dim; ++d) {
        const double x = from.get(b, head, token, d);
        to.add(at + d, weight * x, size * std::fabs(x));
    }
}

// The gradients, from the saved out, max and sum.
inline Results backward(const Call &c, double &largest) {
    const fusion::Problem &p = c.problem;
    Results r{{"dq", Sums(c.q.size())},
              {"dk", Sums(c.k.size())},
              {"dv", Sums(c.v.size())},
              {"dq_rope", Sums(c.q_rope.size())},
              {"dk_rope", Sums(c.k_rope.size())},
              {"dsink", Sums(p.has_sink ? p.heads_q : 0)},
              {"dbias", Sums(p.bias == Bias::matrix ? c.bias_at.count : 0)}};
    each_row(c, [&](Long b, Long h, Long i) {
        const double peak = c.max.get(b, h, i, 0), sum = c.sum.get(b, h, i, 0);
        if (peak == -INFINITY) return;
        const Long kv_head = h / c.group();
        const Dot delta = dot(c.dout, c.out, b, h, i, h, i);
        if (p.has_sink) {
            const double weight = std::exp(c.sink[h] - peak) / sum;
            r["dsink"].add(h, -weight * delta.value, weight * delta.size);
        }
        for (const KeyScore &s : row_scores(c, b, h, i, largest)) {
            const double weight = std::exp(s.score - peak) / sum;
            const double keep = is_retained(c, b, h, i, s.key) ? 1 / p.keep_prob : 0;
            const Dot dprob = dot(c.dout, c.v, b, h, i, kv_head, s.key);
            const double ds = weight * (dprob.value * keep - delta.value);
            const double size = weight * (dprob.size * keep + delta.size), natural_size = std::fabs(p.scale);
            const double natural = p.scale * slope(c, b, h, i, s.key);
            add_row(r["dv"], place(c.v, b, kv_head, s.key), c.dout, b, h, i, weight * keep, weight * keep);
            add_row(r["dq"], place(c.q, b, h, i), c.k, b, kv_head, s.key, ds * natural, size * natural_size);
            add_row(r["dk"], place(c.k, b, kv_head, s.key), c.q, b, h, i, ds * natural, size * natural_size);
            add_row(r["dq_rope"], place(c.q_rope, b, h, i), c.k_rope, b, kv_head, s.key, ds * natural,
                    size * natural_size);
            add_row(r["dk_rope"], place(c.k_rope, b, kv_head, s.key), c.q_rope, b, h, i, ds * natural,
                    size * natural_size);
            if (p.bias != Bias::matrix) continue;
            const double factor = p.bias_scaled ? p.scale : 1.0;
            r["dbias"].add(c.bias_at.at(b, h, i, s.key), ds * factor, size * std::fabs(factor));
        }
    });
    return r;
}

}  // namespace check
