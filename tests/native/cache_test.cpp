// Caches that lie in other ways, met by the decode and by the dense forward: rows in fragments and in pages, keys that
// all sequences have in common, scales of rows, masks that begin at a later key.

#include "plan/decode.h"
#include "plan/forward.h"
#include "core_test.h"

namespace check {
namespace {

// clang-format off: a table, which it would lay out one field a line
struct Case {
    const char *name;
    Long heads_q, heads_kv, dim_qk, dim_v, common, page, fragment, window;  // window: most keys that a row sees, or 0
    bool masks, scales;
    Lengths lengths;
};

const Case cases[] = {
    {"pieces", 6, 2, 40, 24, 0, 16, 16, 0, false, false, {{1, 150}, {3, 21}, {0, 30}, {2, 700}}},
    {"common keys", 4, 2, 33, 40, 700, 16, 0, 0, false, false, {{1, 705}, {3, 1300}, {1, 700}, {9, 712}, {1, 701}}},
    {"common keys, windows", 2, 2, 16, 16, 300, 48, 0, 200, false, false, {{1, 350}, {2, 520}, {1, 301}}},
    {"masks, scales of rows", 6, 2, 64, 64, 0, 16, 8, 0, true, true, {{1, 150}, {5, 90}, {4, 4}}},
    {"many rows", 64, 1, 96, 64, 0, 16, 0, 0, false, false, {{1, 700}, {2, 77}, {1, 1}, {1, 145}}},
    {"many rows, masks", 64, 2, 72, 40, 0, 48, 8, 0, true, true, {{1, 150}, {4, 190}, {3, 700}}},
    {"all of it", 3, 1, 96, 48, 130, 32, 16, 0, true, true, {{1, 150}, {5, 190}, {4, 134}, {20, 500}}},
};
// clang-format on

// Keys of rows from `from` on, in pages [head, fragment, token, element]; what is not a key's is poison, and so
// are entries of the table behind the last page.
struct Pages {
    Elements pool;
    std::vector<std::int32_t> table;
    fusion::Cache cache;

    Pages(const RowMemory &m, Dtype dtype, Long from, Long size, Long fragment) {
        const Long width = fragment ? fragment : m.dim, parts = (m.dim + width - 1) / width;
        const Long page = m.heads * parts * size * width;
        const auto count_of = [&](Long tokens) { return (std::max<Long>(tokens - from, 0) + size - 1) / size; };
        Long pages = 0, most = 0;
        for (Long n : m.tokens) pages += count_of(n), most = std::max(most, count_of(n));
        table.assign(m.tokens.size() * (most + 1), 0x7fffffff);
        pool = Elements(dtype, std::max<Long>(pages * page, 1));
        Long next = pages;
        for (std::size_t b = 0; b < m.tokens.size(); ++b) {
            for (Long i = 0; i < count_of(m.tokens[b]); ++i) {
                table[b * (most + 1) + i] = static_cast<std::int32_t>(--next);
            }
        }
        m.each([&](Long b, Long h, Long t, Long d) {
            if (t < from) return;
            const Long token = t - from, first = table[b * (most + 1) + token / size] * page;
            const Long row = first + h * parts * size * width + token % size * width;
            pool.set(row + d / width * size * width + d % width, m.get(b, h, t, d));
        });
        cache.base = static_cast<const char *>(pool.data()), cache.item = kind_of(dtype).bytes;
        cache.table = table.data(), cache.table_stride = most + 1, cache.page_size = size;
        cache.stride_page = page, cache.page_stride_head = parts * size * width, cache.stride_token = width;
        cache.fragment = fragment, cache.stride_fragment = fragment ? size * width : 0;
    }
};

class CacheTest {
public:
    CacheTest(Report &report, const Case &from, Dtype dtype)
        : from_(from), random_(31), call_(make_call(dtype)),
          keys_(call_.k, dtype, from.common, from.page, from.fragment),
          values_(call_.v, dtype, from.common, from.page, from.fragment), want_(forward(call_, largest_)),
          judge_(report, from.name, dtype, most_terms(call_)) {}

    void run(const fusion::Variant &variant) {
        fusion::DecodeProblem problem{call_.problem, static_cast<fusion::Storage>(call_.problem.dtype),
                                      fusion::Rounding::none, false};
        problem.common_keys = from_.common, problem.has_row_scale = from_.scales;
        fusion::DecodeOperands o{operands_of(call_), {}, {}, {}, {}, {}, {}, {}};
        o.q = query_.view(), o.row_scale = scale_.view();
        o.blocked.base = blocked_.data(), o.blocked.first = first_.data();
        o.keys = keys_.cache, o.values = values_.cache;
        o.common_keys = cache_of(common_[0], call_.problem.dtype);
        o.common_values = cache_of(common_[1], call_.problem.dtype);
        const fusion::DecodePlan plan(variant, problem, call_.sequences);
        check(variant, "decode: ", [&](int threads) { plan.run(o, threads); });
        const fusion::ForwardPlan dense(variant, call_.problem, call_.sequences, tiles_of(call_));
        check(variant, "forward: ", [&](int threads) { dense.run(problem, o, threads); });
    }

private:
    template <class Run> void check(const fusion::Variant &variant, const char *stage, Run run) {
        judge_.begin(variant.name, stage, true);
        run_teams(judge_, call_, run);
        compare_outputs(judge_, call_, want_, largest_);
    }

    // The call as loops know it: all keys in rows, queries times their scales, bits of every key.
    Call make_call(Dtype dtype) {
        Call c =
            call_of(plain_problem(from_.heads_q, from_.heads_kv, from_.dim_qk, from_.dim_v, 0, dtype), from_.lengths);
        c.problem.has_blocked = from_.masks;
        for (const auto &[count, length] : from_.lengths) {
            const Long lo = from_.window ? length - count + 1 - from_.window : -everything;
            c.sequences.push_back({count, length, lo, length - count + 1, 0, 0});
        }
        c.q.fill(random_, 2.0), c.k.fill(random_, 2.0), c.v.fill(random_, 2.0);
        take_common(c.k, 0, dtype), take_common(c.v, 1, dtype);
        query_ = c.q, scale_ = c.max;
        scale_.each([&](Long b, Long h, Long t, Long) {
            const double times =
                from_.scales ? std::ldexp(random_() % 2 ? 1.0 : -1.0, static_cast<int>(random_() % 3)) : 1;
            scale_.set(b, h, t, 0, times);
            for (Long d = 0; d < from_.dim_qk; ++d) query_.set(b, h, t, d, c.q.get(b, h, t, d) / times);
        });
        c.blocked_at = MatrixMemory(1, from_.heads_q, c.sequences, false, true);
        c.blocked.assign(c.blocked_at.count, 1);
        for (Long i = 1; i < c.blocked_at.count; ++i) c.blocked[i] = random_() % 3 == 0;
        blocked_ = c.blocked;
        for (std::size_t b = 0; b < c.sequences.size(); ++b) {
            first_.push_back(c.sequences[b].kv_len / 2);
            for (Long i = 0; i < c.sequences[b].q_len; ++i) {
                for (Long j = 0; j < first_[b]; ++j) {  // the core must not ask for these
                    const Long at = c.blocked_at.at(static_cast<Long>(b), 0, i, j);
                    c.blocked[at] = 0, blocked_[at] = 1;
                }
            }
        }
        return c;
    }

    // Every sequence begins with the first one's keys, which also lie by themselves.
    void take_common(RowMemory &m, int which, Dtype dtype) {
        common_[which] = RowMemory(dtype, m.heads, m.dim, {from_.common});
        m.each([&](Long b, Long h, Long t, Long d) {
            if (t >= from_.common) return;
            m.set(b, h, t, d, m.get(0, h, t, d));
            common_[which].set(0, h, t, d, m.get(0, h, t, d));
        });
    }

    const Case &from_;
    std::mt19937 random_;
    RowMemory query_, scale_, common_[2];
    std::vector<unsigned char> blocked_;
    std::vector<Long> first_;
    double largest_ = 0;
    Call call_;
    Pages keys_, values_;
    Results want_;
    Judge judge_;
};

}  // namespace

void test_caches(Report &report) {
    for (const Case &one : cases) {
        for (Dtype dtype : dtypes) {
            CacheTest test(report, one, dtype);
            for (const fusion::Built &built : fusion::built_variants()) {
                if (report.tests(built)) test.run(*built.variant);
            }
        }
    }
}

}  // namespace check
