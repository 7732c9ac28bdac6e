// Decode from caches of int8 and int4: scales of channels and of tokens, rows that are multiplied where they lie and
// rows that are staged, one to five query rows to a key head.

#include "plan/decode.h"
#include "core_test.h"

namespace check {
namespace {

using fusion::Dequant;
using fusion::Storage;

// clang-format off: a table, which it would lay out one field a line
struct Case {
    const char *name;
    Storage storage;
    Dequant keys, values;
    Long heads_q, heads_kv, dim_qk, dim_v;
    Lengths lengths;
    double softcap = 0;
};

const Case cases[] = {
    {"int8 channels", Storage::int8, Dequant::channel, Dequant::channel, 8, 2, 64, 64, {{1, 300}, {2, 17}, {1, 1}}},
    {"int8 tokens, odd dims", Storage::int8, Dequant::token, Dequant::token, 3, 3, 37, 21, {{1, 140}, {0, 3}, {3, 5}}},
    {"int8 mixed", Storage::int8, Dequant::channel, Dequant::token, 6, 2, 96, 32, {{1, 1100}}},
    {"int4 channels", Storage::int4, Dequant::channel, Dequant::channel, 8, 2, 64, 64, {{1, 300}, {2, 17}, {1, 0}}},
    {"int4 tokens, odd dims", Storage::int4, Dequant::token, Dequant::token, 2, 1, 37, 21, {{1, 140}, {3, 5}}},
    {"int4 mixed", Storage::int4, Dequant::token, Dequant::channel, 5, 1, 128, 40, {{1, 200}, {2, 130}}},
    {"int8 capped", Storage::int8, Dequant::token, Dequant::channel, 6, 2, 64, 32, {{1, 300}, {2, 17}}, 0.8},
};
// clang-format on

// Stored integers of keys or values, and the float32 numbers that they stand for: scales are powers of two times
// little, so these are exact.
struct Stored {
    Long dim;
    bool nibbles;
    RowMemory place;  // of bytes, not of its own elements
    std::vector<signed char> bytes;
    Dequant kind;
    RowMemory scale, offset, numbers;

    Stored(const Case &from, bool keys, std::mt19937 &random)
        : dim(keys ? from.dim_qk : from.dim_v), nibbles(from.storage == Storage::int4),
          kind(keys ? from.keys : from.values) {
        std::vector<Long> tokens, ones;
        for (const auto &[rows, count] : from.lengths) {
            tokens.push_back(count);
            ones.push_back(kind == Dequant::channel ? 1 : count);
        }
        place = RowMemory(Dtype::float32, from.heads_kv, nibbles ? (dim + 1) / 2 : dim, tokens);
        bytes.assign(place.elements.count(), 0x77);
        scale = offset = RowMemory(Dtype::float32, from.heads_kv, kind == Dequant::channel ? dim : 1, ones);
        numbers = RowMemory(Dtype::float32, from.heads_kv, dim, tokens);
        const double size = nibbles ? 0x1p-6 : 0x1p-10;
        scale.each([&](Long b, Long h, Long t, Long d) { scale.set(b, h, t, d, size * (4.0 + random() % 13)); });
        offset.each([&](Long b, Long h, Long t, Long d) { offset.set(b, h, t, d, random() % 9 - 4.0); });
        numbers.each([&](Long b, Long h, Long t, Long d) {
            const int x = nibbles ? static_cast<int>(random() % 16) - 8 : static_cast<int>(random() % 256) - 128;
            put(b, h, t, d, x);
            numbers.set(b, h, t, d, (x + offset_at(b, h, t, d)) * scale_at(b, h, t, d));
        });
    }

    void put(Long b, Long h, Long t, Long d, int x) {
        signed char &byte = bytes[place.at(b, h, t, 0) + (nibbles ? d / 2 : d)];
        if (!nibbles) byte = static_cast<signed char>(x);
        else if (d % 2) byte = static_cast<signed char>((byte & 15) | x << 4);
        else byte = static_cast<signed char>((byte & ~15) | (x & 15));
    }
    double scale_at(Long b, Long h, Long t, Long d) const { return meaning(scale, b, h, t, d); }
    double offset_at(Long b, Long h, Long t, Long d) const { return meaning(offset, b, h, t, d); }
    double meaning(const RowMemory &m, Long b, Long h, Long t, Long d) const {
        return kind == Dequant::channel ? m.get(b, h, 0, d) : m.get(b, h, t, 0);
    }
    fusion::Cache cache() const {
        fusion::Cache c;
        c.base = reinterpret_cast<const char *>(bytes.data()), c.item = 1;
        c.address = place.address.data(), c.stride_head = place.stride_head.data();
        c.stride_token = place.stride_token;
        return c;
    }
    fusion::Quantised quantised() { return {kind, cache_of(scale, Dtype::float32), cache_of(offset, Dtype::float32)}; }
};

// What 16-bit query rows and weights may make of a row: queries are rounded to 2^-16 of their largest element (times
// its channel's scale), weights to 2^-16 of the largest (times its token's).
void allow_digits(const Call &c, const Stored &k, const Stored &v, Results &want) {
    constexpr double digit = 0x1p-16;
    for (auto &[name, sums] : want) sums.more.assign(sums.value.size(), 0.0);
    each_row(c, [&](Long b, Long h, Long i) {
        double largest = 0, score = 0, weight = 0;
        const Long kv_head = h / c.group(), one = place(c.max, b, h, i), at = place(c.out, b, h, i);
        const std::vector<KeyScore> keys = row_scores(c, b, h, i, largest);
        for (const KeyScore &s : keys) {
            double top = 0, size = 0;
            for (Long d = 0; d < k.dim; ++d) {
                top = std::max(top, std::fabs(c.q.get(b, h, i, d)) * k.scale_at(b, kv_head, s.key, d));
                size += std::fabs(k.numbers.get(b, kv_head, s.key, d)) / k.scale_at(b, kv_head, s.key, d) + 4;
            }
            score = std::max(score, digit * top * size * c.problem.scale);
        }
        const double sum = want["sum"].value[one], peak = want["max"].value[one];
        for (const KeyScore &s : keys) {
            const double times = v.kind == Dequant::token ? v.scale_at(b, kv_head, s.key, 0) : 1;
            weight = std::max(weight, std::exp(s.score - peak) / sum * times);
        }
        want["max"].more[one] = score;
        want["sum"].more[one] = 2 * score * sum;
        for (Long d = 0; d < v.dim; ++d) {
            double &more = want["out"].more[at + d];
            more = 2 * score * want["out"].size[at + d];
            for (const KeyScore &s : keys) {
                const double times = v.kind == Dequant::token ? 1 / v.scale_at(b, kv_head, s.key, 0) : 1;
                more += digit * weight * std::fabs(v.numbers.get(b, kv_head, s.key, d)) * times;
            }
        }
    });
}

void test_case(Report &report, const Case &from, Dtype dtype) {
    std::mt19937 random(29);
    Stored k(from, true, random), v(from, false, random);
    Call c = call_of(plain_problem(from.heads_q, from.heads_kv, from.dim_qk, from.dim_v, 0, dtype), from.lengths);
    c.problem.softcap = from.softcap;
    for (const auto &[count, keys] : from.lengths)
        c.sequences.push_back({count, keys, -everything, keys - count + 1, 0, 0});
    c.q.fill(random, 2.0);
    c.k = k.numbers, c.v = v.numbers;
    double largest = 0;
    Results want = forward(c, largest);
    allow_digits(c, k, v, want);
    const fusion::DecodeProblem problem{c.problem, from.storage, fusion::Rounding::none, false};
    fusion::DecodeOperands o{operands_of(c), k.cache(), v.cache(), {}, k.quantised(), v.quantised(), {}, {}};
    Judge judge(report, from.name, dtype, most_terms(c));
    for (const fusion::Built &built : fusion::built_variants()) {
        if (!report.tests(built)) continue;
        judge.begin(built.name, "", false);
        const fusion::DecodePlan plan(*built.variant, problem, c.sequences);
        run_teams(judge, c, [&](int threads) { plan.run(o, threads); });
        compare_outputs(judge, c, want, largest);
    }
}

}  // namespace

void test_quantised_decode(Report &report) {
    for (const Case &one : cases) {
        for (Dtype dtype : dtypes) test_case(report, one, dtype);
    }
}

}  // namespace check
