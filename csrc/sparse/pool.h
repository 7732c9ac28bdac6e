// Pooling of windows of rows by a softmax per channel: read from pool_forward() and pool_backward().
//
// The kernels are bound by memory, so rows are read in the order in which they lie: a group of up to eight rows at a
// time, channel by channel. Windows with more rows keep the maximum, the sum of weights and the sum of weighted values
// of every channel between groups. The groups of a window depend on its number of rows only.
//
// Results that are not finite are computed again, one channel at a time in double, so that an infinity or a sum beyond
// the range of float32 does not depend on weights that underflow.

#pragma once

#include "data/pool.h"
#include "simd/rows.h"

namespace fusion {
namespace {

constexpr std::int64_t group_rows = 8;

// A window, whose rows are consecutive: with overlap first those of the window before it.
template <class T> struct PoolWindow {
    const PoolJob &job;
    std::int64_t seq, head, result, previous, rows, token;  // previous: rows of the window before; token: first row

    PoolWindow(const PoolJob &job_, const PoolItem &item, std::int64_t result_)
        : job(job_), seq(item.seq), head(item.head), result(result_) {
        const PoolProblem &p = *job.problem;
        const std::int64_t number = result + job.sequences[seq].before;
        previous = p.overlap && number > 0 ? p.ratio : 0;
        rows = previous + p.ratio;
        token = number * p.ratio - previous;
    }

    // The half of a row's channels that belong to this window.
    std::int64_t half(std::int64_t i) const { return job.problem->overlap && i >= previous ? 1 : 0; }
    std::int64_t position(std::int64_t i) const { return i < previous ? i : i - previous; }
    template <class Element = T> Element *at(const Rows &rows_, std::int64_t i) const {
        return row_of<Element>(rows_, seq, head, token + i) + half(i) * job.problem->dim;
    }
    const float *bias(std::int64_t i) const {
        const float *all_rows = job.operands->bias;
        return all_rows ? all_rows + position(i) * job.problem->channels() + half(i) * job.problem->dim : nullptr;
    }
    template <class Element = T> Element *result_of(const Rows &rows_) const {
        return row_of<Element>(rows_, seq, head, result);
    }
};

// Rows of a window that are read together. bias: zeros if there is none.
template <class T> struct PoolGroup {
    std::int64_t first, count, ahead_kv, ahead_gate;  // ahead: elements from these rows to those that are read next
    const T *kv[group_rows], *gate[group_rows];
    const float *bias[group_rows];

    PoolGroup(const PoolWindow<T> &window, std::int64_t from, const float *zeros)
        : first(from), count(least(group_rows, window.rows - from)) {
        const PoolOperands &o = *window.job.operands;
        const std::int64_t ahead = window.rows > group_rows ? count : window.job.problem->ratio;
        ahead_kv = ahead * o.kv.stride_token, ahead_gate = ahead * o.gate.stride_token;
        for (std::int64_t i = 0; i < count; ++i) {
            kv[i] = window.at(o.kv, from + i);
            gate[i] = window.at(o.gate, from + i);
            bias[i] = o.bias ? window.bias(from + i) : zeros;
        }
    }

    // Calls body(d) for vectors of channels [d, d + lanes) of the rows; the last one is read from a copy with zeros.
    template <class Body> FUSION_INLINE void each_vector(std::int64_t dim, Body body) {
        for (std::int64_t d = 0; d < dim; d += lanes) {
            if (__builtin_expect(d + lanes > dim, 0)) pad(d, dim - d);
            body(d);
        }
    }

    // Prefetches a cache line of each of the rows that are read next; processors foresee few of so many streams.
    FUSION_INLINE void prefetch_next(std::int64_t rows, std::int64_t d) const {
        if (d % (64 / static_cast<std::int64_t>(sizeof(T)))) return;
        for (std::int64_t i = 0; i < rows; ++i) {
            prefetch(kv[i] + ahead_kv + d, 1), prefetch(gate[i] + ahead_gate + d, 1);
        }
    }

    FUSION_INLINE Floats gates(std::int64_t i, std::int64_t d) const {
        return load_floats(gate[i] + d, lanes) + load<Floats>(bias[i] + d);
    }

private:
    T kv_rest[group_rows][lanes], gate_rest[group_rows][lanes];
    float bias_rest[group_rows][lanes];

    __attribute__((noinline)) void pad(std::int64_t d, std::int64_t n) {
        std::memset(kv_rest, 0, sizeof kv_rest), std::memset(gate_rest, 0, sizeof gate_rest);
        std::memset(bias_rest, 0, sizeof bias_rest);
        for (std::int64_t i = 0; i < count; ++i) {
            std::memcpy(kv_rest[i], kv[i] + d, static_cast<std::size_t>(n) * sizeof(T));
            std::memcpy(gate_rest[i], gate[i] + d, static_cast<std::size_t>(n) * sizeof(T));
            std::memcpy(bias_rest[i], bias[i] + d, static_cast<std::size_t>(n) * sizeof(float));
            kv[i] = kv_rest[i] - d, gate[i] = gate_rest[i] - d, bias[i] = bias_rest[i] - d;
        }
    }
};

// Calls body(count) with the number of a group's rows, as a constant if it is a complete one.
template <class T, class Body> FUSION_INLINE void by_count(const PoolGroup<T> &group, Body body) {
    if (group.count == group_rows) return body(std::integral_constant<std::int64_t, group_rows>{});
    body(group.count);
}

// Short vectors have loops; unrolled, they would take long to compile.
#if defined(__AVX__)
#define FUSION_UNROLL_ROWS FUSION_UNROLL
#else
#define FUSION_UNROLL_ROWS
#endif

// Statistics of a softmax over rows, for a vector of channels: the shift of exponents, which follows from the maximum,
// the sum of weights, and the sum of weighted values.
struct PoolSums {
    Floats shift, sum, total;

    static PoolSums load_from(const float *state, std::int64_t padded) {
        return {load<Floats>(state), load<Floats>(state + padded), load<Floats>(state + 2 * padded)};
    }
    void store_to(float *state, std::int64_t padded) const {
        store(state, shift), store(state + padded, sum), store(state + 2 * padded, total);
    }
};

// With fused multiply-adds, weights are 2^(z log2 e - shift): the rounding error of the shift is common to all weights
// of a channel. If it makes them overflow, or all of them zero, results are not finite and are computed again.
#if defined(__FMA__) || defined(__aarch64__)
FUSION_INLINE Floats pool_shift(Floats peak) { return rounded(peak * log2_e); }
FUSION_INLINE Floats pool_exponent(Floats z, Floats shift) { return z * log2_e - shift; }
FUSION_INLINE Floats pool_fade(Floats from, Floats to) { return from - to; }
#else
FUSION_INLINE Floats pool_shift(Floats peak) { return peak; }
FUSION_INLINE Floats pool_exponent(Floats z, Floats shift) { return rounded(z - shift) * log2_e; }
FUSION_INLINE Floats pool_fade(Floats from, Floats to) { return rounded(from - to) * log2_e; }
#endif

// 2^x for x <= 127 to a relative error of 8e-8; 0 below 2^-126, NaN for NaN. Unlike exp2(), it keeps weights whose
// products may be subnormal, because gates that are 70 apart are rare.
FUSION_INLINE Floats pool_weight(Floats x) {
    const Floats magic = all(12582912.0f);  // as in exp2()
    x = larger(all(-127.0f), x);
    const Floats shifted = x + magic;
    const Floats r = x - (shifted - magic);
    constexpr float c[] = {1.0f,         6.931472e-1f,  2.4022648e-1f, 5.5503324e-2f,
                           9.618437e-3f, 1.3398875e-3f, 1.5353362e-4f};
    Floats p = all(c[6]);
    FUSION_UNROLL for (int i = 5; i >= 0; --i) p = p * r + all(c[i]);
    return p * floats_of((bits_of(shifted) << 23) + (127u << 23));
}

// Adds the rows of a group to the statistics of channels [d, d + lanes), of which n exist. weights, values: of its
// rows.
template <class T, class Count>
FUSION_INLINE void add_group(const PoolGroup<T> &group, Count count, std::int64_t d, PoolSums &x,
                             Floats (&weights)[group_rows], Floats (&values)[group_rows]) {
    const std::int64_t rows = count;
    group.prefetch_next(rows, d);
    Floats top = weights[0] = group.gates(0, d);
    FUSION_UNROLL_ROWS for (std::int64_t i = 1; i < rows; ++i) {
        weights[i] = group.gates(i, d);
        top = larger(top, weights[i]);
    }
    const Floats shift = larger(x.shift, pool_shift(top));
    if (group.first) {
        const Floats fade = pool_weight(pool_fade(x.shift, shift));
        x.sum = x.sum * fade, x.total = x.total * fade;
    }
    x.shift = shift;
    FUSION_UNROLL_ROWS for (std::int64_t i = 0; i < rows; ++i) {
        values[i] = load_floats(group.kv[i] + d, lanes);
        weights[i] = pool_weight(pool_exponent(weights[i], shift));
        x.sum += weights[i];
        x.total = x.total + weights[i] * values[i];
    }
}

constexpr PoolSums no_rows = {Floats{} - infinity, Floats{}, Floats{}};

FUSION_INLINE bool not_finite(Floats x) { return any(bits_of(x - x)); }

// ---------------------------------------------------------------------------------------------------- in double

// Statistics of one channel of a window in double.
template <class T> struct PoolChannel {
    const PoolWindow<T> &window;
    const std::int64_t d;
    double peak = -__builtin_inf(), sum = 0, total = 0;

    PoolChannel(const PoolWindow<T> &of, std::int64_t channel) : window(of), d(channel) {
        for (std::int64_t i = 0; i < window.rows; ++i) {
            if (const double z = gate(i); z > peak || z != z) peak = z;
        }
        for (std::int64_t i = 0; i < window.rows; ++i) sum += __builtin_exp(gate(i) - peak);
        for (std::int64_t i = 0; i < window.rows; ++i) total += weight(i) * value(i);
    }

    double value(std::int64_t i) const { return load_floats(window.at(window.job.operands->kv, i) + d, 1)[0]; }
    double gate(std::int64_t i) const {
        const float *bias = window.bias(i);
        return static_cast<double>(load_floats(window.at(window.job.operands->gate, i) + d, 1)[0]) +
               (bias ? static_cast<double>(bias[d]) : 0);
    }
    double weight(std::int64_t i) const { return __builtin_exp(gate(i) - peak) / sum; }
};

template <class T>
__attribute__((noinline)) void pool_exactly(const PoolWindow<T> &window, std::int64_t d, std::int64_t n, Floats &out) {
    for (std::int64_t i = 0; i < least<std::int64_t>(n, lanes); ++i) {
        if (out[i] - out[i] != 0.0f) out[i] = static_cast<float>(PoolChannel<T>(window, d + i).total);
    }
}

// The gradients of rows [first, first + count) for those of channels [d, d + n) in which one of them is not finite.
template <class T>
__attribute__((noinline)) void differentiate_exactly(const PoolWindow<T> &window, std::int64_t first,
                                                     std::int64_t count, std::int64_t d, std::int64_t n,
                                                     Floats (&dkv)[group_rows], Floats (&dgate)[group_rows]) {
    for (std::int64_t lane = 0; lane < least<std::int64_t>(n, lanes); ++lane) {
        bool finite = true;
        for (std::int64_t i = 0; i < count; ++i) finite = finite && dkv[i][lane] - dkv[i][lane] == 0.0f;
        for (std::int64_t i = 0; i < count; ++i) finite = finite && dgate[i][lane] - dgate[i][lane] == 0.0f;
        if (finite) continue;
        const PoolChannel<T> channel(window, d + lane);
        const double dout = load_floats(window.result_of(window.job.operands->dout) + d + lane, 1)[0];
        double total = 0;
        for (std::int64_t i = 0; i < window.rows; ++i) total += channel.weight(i) * (dout * channel.value(i));
        for (std::int64_t i = 0; i < count; ++i) {
            const double weight = channel.weight(first + i);
            dkv[i][lane] = static_cast<float>(dout * weight);
            dgate[i][lane] = static_cast<float>(weight * (dout * channel.value(first + i) - total));
        }
    }
}

// ------------------------------------------------------------------------------------------------------- forward

// Adds the rows of a window to statistics in memory, except those of the last group, and returns its first row.
template <class T>
std::int64_t add_groups(const PoolWindow<T> &window, float *state, std::int64_t padded, const float *zeros) {
    const std::int64_t dim = window.job.problem->dim;
    std::int64_t first = 0;
    for (; first + group_rows < window.rows; first += group_rows) {
        PoolGroup<T> group(window, first, zeros);
        constexpr std::integral_constant<std::int64_t, group_rows> count;
        group.each_vector(dim, [&](std::int64_t d) __attribute__((always_inline)) {
            Floats weights[group_rows], values[group_rows];
            PoolSums x = first ? PoolSums::load_from(state + d, padded) : no_rows;
            add_group(group, count, d, x, weights, values);
            x.store_to(state + d, padded);
        });
    }
    return first;
}

// Scratch of a thread: statistics of a window, and a row of zeros.
struct PoolScratch {
    std::int64_t padded;
    float *state;
    const float *zeros;

    PoolScratch(std::int64_t dim, float *memory)
        : padded(round_up(dim, pool_padding)), state(memory), zeros(memory + 3 * padded) {
        std::memset(memory + 3 * padded, 0, static_cast<std::size_t>(padded) * sizeof(float));
    }
};

template <class T> void pool_forward(const PoolJob &job, const PoolItem &item, float *memory) {
    const std::int64_t dim = job.problem->dim;
    const PoolScratch scratch(dim, memory);
    for (std::int64_t w = item.first; w < item.end; ++w) {
        const PoolWindow<T> window(job, item, w);
        const std::int64_t rest = add_groups(window, scratch.state, scratch.padded, scratch.zeros);
        PoolGroup<T> last(window, rest, scratch.zeros);
        T *const to = window.template result_of<T>(job.operands->out);
        by_count(last, [&](auto count) __attribute__((always_inline)) {
            last.each_vector(dim, [&](std::int64_t d) __attribute__((always_inline)) {
                Floats weights[group_rows], values[group_rows];
                PoolSums x = last.first ? PoolSums::load_from(scratch.state + d, scratch.padded) : no_rows;
                add_group(last, count, d, x, weights, values);
                Floats out = x.total / x.sum;
                if (__builtin_expect(not_finite(out), 0)) pool_exactly(window, d, dim - d, out);
                store_floats(to + d, out, dim - d);
            });
        });
    }
}

// ------------------------------------------------------------------------------------------------------ backward

// Stores bytes of a cache line past the caches.
template <std::int64_t bytes> FUSION_INLINE void stream(char *to, const char *from) {
#if defined(__AVX512F__)
    if constexpr (bytes == 64) return _mm512_stream_si512(reinterpret_cast<__m512i *>(to), load<__m512i>(from));
#endif
#if defined(__AVX__)
    if constexpr (bytes == 32) return _mm256_stream_si256(reinterpret_cast<__m256i *>(to), load<__m256i>(from));
#endif
#if defined(__SSE2__)
    if constexpr (bytes == 16) return _mm_stream_si128(reinterpret_cast<__m128i *>(to), load<__m128i>(from));
#endif
    std::memcpy(to, from, bytes);
}

// Without instructions for it, the conversion to float16 is long.
#if defined(__F16C__) || defined(__aarch64__)
#define FUSION_STORE FUSION_INLINE
#else
#define FUSION_STORE __attribute__((noinline))
#endif

// A vector of finite values.
template <class T> FUSION_STORE void store_finite(T *to, Floats x) { store_floats(to, x, lanes); }
#if defined(FUSION_AVX2)
FUSION_INLINE void store_finite(Brain *to, Floats x) {  // without the treatment of NaN
    const Words bits = bits_of(x);
    const __m256i upper = (__m256i)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    store(to, _mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1)));
}
#endif

// Cache lines of gradients of a group, which are computed vector by vector.
template <class T> struct PoolLines {
    static constexpr std::int64_t size = 64 / sizeof(T);  // at least `lanes`

    alignas(64) T kv[group_rows][size], gate[group_rows][size];

    FUSION_INLINE static void write(T *to, const T *from, std::int64_t n, bool streamed) {
        if (n < size) {
            std::memcpy(to, from, static_cast<std::size_t>(n) * sizeof(T));
        } else if (streamed && reinterpret_cast<std::uintptr_t>(to) % 64 == 0) {
            // Loads of the size of the stores before them, which processors can forward.
            constexpr std::int64_t chunk = most<std::int64_t>(lanes * sizeof(T), 16);
            FUSION_UNROLL for (std::int64_t at = 0; at < 64; at += chunk) {
                stream<chunk>(reinterpret_cast<char *>(to) + at, reinterpret_cast<const char *>(from) + at);
            }
        } else {
            std::memcpy(to, from, size * sizeof(T));
        }
    }
};

// Computes and stores the gradients of a group's rows. One: the group is the complete window; otherwise the state has
// the statistics of all rows: shift, 1 / sum and the result.
template <bool One, class T, class Count>
FUSION_INLINE void differentiate_group(const PoolWindow<T> &window, PoolGroup<T> &group, Count count,
                                       const PoolScratch &scratch, float *dbias) {
    const PoolOperands &o = *window.job.operands;
    const std::int64_t dim = window.job.problem->dim, halves = window.job.problem->overlap ? 2 : 1, rows = count;
    const T *const dout = window.result_of(o.dout);
    T *dkv_at[group_rows], *dgate_at[group_rows];
    float *dbias_at[group_rows];
    for (std::int64_t i = 0; i < rows; ++i) {
        const std::int64_t row = group.first + i;
        dkv_at[i] = window.at(o.dkv, row), dgate_at[i] = window.at(o.dgate, row);
        dbias_at[i] = dbias ? dbias + (window.position(row) * halves + window.half(row)) * scratch.padded : nullptr;
    }
    PoolLines<T> lines;
    group.each_vector(dim, [&](std::int64_t d) __attribute__((always_inline)) {
        Floats dkv[group_rows], dgate[group_rows], factor, out;
        const Floats upstream = load_floats(dout + d, dim - d);
        if constexpr (One) {
            PoolSums x = no_rows;
            add_group(group, count, d, x, dkv, dgate);
            factor = 1.0f / x.sum;
            out = rows == 1 ? dgate[0] : x.total * factor;  // the gradient of the gate of a single row is 0
        } else {
            const PoolSums x = PoolSums::load_from(scratch.state + d, scratch.padded);
            factor = x.sum, out = x.total;
            FUSION_UNROLL_ROWS for (std::int64_t i = 0; i < rows; ++i) {
                dkv[i] = pool_weight(pool_exponent(group.gates(i, d), x.shift));
                dgate[i] = load_floats(group.kv[i] + d, lanes);
            }
        }
        factor = factor * upstream;
        Floats check = {};  // a gradient of a row of kv that is not finite makes that of its gate so
        FUSION_UNROLL_ROWS for (std::int64_t i = 0; i < rows; ++i) {
            dkv[i] = dkv[i] * factor;
            dgate[i] = dkv[i] * (dgate[i] - out);
            check = check + dgate[i] * 0.0f;
        }
        const std::int64_t at = d % lines.size;
        if (__builtin_expect(any(bits_of(check)), 0)) {
            differentiate_exactly(window, group.first, group.count, d, dim - d, dkv, dgate);
            for (std::int64_t i = 0; i < rows; ++i) {
                store_floats(lines.kv[i] + at, dkv[i], lanes), store_floats(lines.gate[i] + at, dgate[i], lanes);
            }
        } else {
            FUSION_UNROLL_ROWS for (std::int64_t i = 0; i < rows; ++i) {
                store_finite(lines.kv[i] + at, dkv[i]), store_finite(lines.gate[i] + at, dgate[i]);
            }
        }
        if (dbias) {
            FUSION_UNROLL_ROWS for (std::int64_t i = 0; i < rows; ++i) {
                store(dbias_at[i] + d, load<Floats>(dbias_at[i] + d) + dgate[i]);
            }
        }
        if (at + lanes < lines.size && d + lanes < dim) return;
        for (std::int64_t i = 0; i < rows; ++i) {
            lines.write(dkv_at[i] + d - at, lines.kv[i], dim - d + at, o.streamed);
            lines.write(dgate_at[i] + d - at, lines.gate[i], dim - d + at, o.streamed);
        }
    });
}

template <class T> void pool_backward(const PoolJob &job, const PoolItem &item, float *dbias, float *memory) {
    const std::int64_t dim = job.problem->dim;
    const PoolScratch scratch(dim, memory);
    for (std::int64_t w = item.first; w < item.end; ++w) {
        const PoolWindow<T> window(job, item, w);
        if (window.rows <= group_rows) {
            PoolGroup<T> group(window, 0, scratch.zeros);
            by_count(group, [&](auto count) { differentiate_group<true>(window, group, count, scratch, dbias); });
            continue;
        }
        const std::int64_t rest = add_groups(window, scratch.state, scratch.padded, scratch.zeros);
        PoolGroup<T> last(window, rest, scratch.zeros);
        last.each_vector(dim, [&](std::int64_t d) __attribute__((always_inline)) {
            Floats weights[group_rows], values[group_rows];
            PoolSums x = PoolSums::load_from(scratch.state + d, scratch.padded);
            add_group(last, last.count, d, x, weights, values);
            x.sum = 1.0f / x.sum;
            x.total = x.total * x.sum;
            x.store_to(scratch.state + d, scratch.padded);
        });
        for (std::int64_t first = 0; first < window.rows; first += group_rows) {
            PoolGroup<T> group(window, first, scratch.zeros);
            by_count(group, [&](auto count) { differentiate_group<false>(window, group, count, scratch, dbias); });
        }
    }
}

void pool_forward_of(const PoolJob &job, const PoolItem &item, float *scratch) {
    by_dtype(job.problem->dtype, [&](auto stored) { pool_forward<decltype(stored)>(job, item, scratch); });
}

void pool_backward_of(const PoolJob &job, const PoolItem &item, float *dbias, float *scratch) {
    by_dtype(job.problem->dtype, [&](auto stored) { pool_backward<decltype(stored)>(job, item, dbias, scratch); });
}

constexpr PoolKernels pool_kernels = {pool_forward_of, pool_backward_of};

}  // namespace
}  // namespace fusion
