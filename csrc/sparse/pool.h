// Pooling of windows of rows by a softmax per channel: read from pool_forward() and pool_backward().
//
// A window is pooled block by block. A block is a cache line of channels of all rows: its gates are read first, for the
// maximum of every channel, then its rows of kv. The exponentials of a row do not depend on those of another, so a core
// computes several of them at once.
//
// Results that are not finite are computed again, one channel at a time in double, so that an infinity or a sum beyond
// the range of float32 does not depend on weights that underflow.

#pragma once

#include "data/pool.h"
#include "simd/row_addresses.h"

namespace fusion {
namespace {

// Rows of a window. In a window with overlap, its last rows begin `shift` elements later than the ones before it.
template <class T> struct WindowRows {
    T *first;
    std::int64_t stride, previous, shift;

    FUSION_INLINE T *operator[](std::int64_t i) const { return first + i * stride + (i < previous ? 0 : shift); }
};

constexpr float no_bias[pool_block] = {};

// A window, whose rows are consecutive: with overlap first those of the window before it.
template <class T> struct PoolWindow {
    const PoolProblem &problem;
    const PoolOperands &operands;
    std::int64_t seq, head, result, previous, rows, token;  // previous: rows of the window before; token: first row
    WindowRows<const T> kv, gate;
    WindowRows<const float> bias;  // zeros, whatever the channel, if there is none

    PoolWindow(const PoolJob &job, const PoolItem &item, std::int64_t result_)
        : problem(*job.problem), operands(*job.operands), seq(item.seq), head(item.head), result(result_) {
        const std::int64_t number = result + job.sequences[seq].before;
        previous = problem.overlap && number > 0 ? problem.ratio : 0;
        rows = previous + problem.ratio;
        token = number * problem.ratio - previous;
        kv = of<const T>(operands.kv), gate = of<const T>(operands.gate);
        bias = {no_bias, 0, 0, 0};
        if (operands.bias) bias = by_position(operands.bias, problem.dim);
    }

    template <class Element> WindowRows<Element> of(const Rows &all_rows) const {
        return {row_of<Element>(all_rows, seq, head, token), all_rows.stride_token, previous,
                problem.overlap ? problem.dim : 0};
    }
    // Rows [ratio][1 or 2][size], by the position of a row in its window and by its half of the channels.
    template <class Element> WindowRows<Element> by_position(Element *all_rows, std::int64_t size) const {
        const std::int64_t stride = problem.overlap ? 2 * size : size;
        return {all_rows, stride, previous, problem.overlap ? size - previous * stride : 0};
    }
    template <class Element> Element *result_of(const Rows &all_rows) const {
        return row_of<Element>(all_rows, seq, head, result);
    }
};

// With fused multiply-adds, weights are 2^(z log2 e - shift): the rounding error of the shift is common to all weights
// of a channel. If it makes them overflow, or all of them zero, results are not finite and are computed again.
#if defined(__FMA__) || defined(__aarch64__)
FUSION_INLINE Floats pool_shift(Floats peak) { return rounded(peak * log2_e); }
FUSION_INLINE Floats pool_exponent(Floats z, Floats shift) { return z * log2_e - shift; }
#else
FUSION_INLINE Floats pool_shift(Floats peak) { return peak; }
FUSION_INLINE Floats pool_exponent(Floats z, Floats shift) { return rounded(z - shift) * log2_e; }
#endif

// 2^x for x <= 127 to a relative error of 2e-7; 0 below 2^-126, NaN for NaN. Unlike exp2(), it keeps weights whose
// products may be subnormal, because gates that are 70 apart are rare.
FUSION_INLINE Floats pool_weight(Floats x) {
    const Floats magic = all(12582912.0f + 127.0f);  // as in exp2(); the lowest bits of a sum are those of an exponent
    x = larger(all(-127.0f), x);
    const Floats shifted = x + magic;
    const Floats r = x - (shifted - magic);
    constexpr float c[] = {1.0f, 0.693147f, 0.24022242f, 5.5507336e-2f, 9.671513e-3f, 1.3264727e-3f};
    Floats p = all(c[5]);
    FUSION_UNROLL for (int i = 4; i >= 0; --i) p = p * r + all(c[i]);
    return p * floats_of(bits_of(shifted) << 23);
}

// Lines of the rows that the next window reads first, in the order of memory: one for each row of a block.
template <class T> class NextWindow {
public:
    static constexpr std::int64_t line = 64 / sizeof(T);

    FUSION_INLINE NextWindow(const WindowRows<const T> &rows_, const PoolProblem &p, std::int64_t count, std::int64_t d)
        : rows(rows_), end(p.dim - line), ahead(p.ratio * rows_.stride) {
        const std::int64_t lines = most<std::int64_t>(p.dim / line, 1), first = d / line * count;
        row = first / lines, at = first % lines * line;
    }
    FUSION_INLINE void prefetch_line() {
        prefetch<2>(rows[row] + ahead + at, 1);
        at += line;
        if (at > end) at = 0, ++row;
    }

private:
    const WindowRows<const T> &rows;
    const std::int64_t end, ahead;
    std::int64_t row, at;
};

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

    double value(std::int64_t i) const { return load_floats(window.kv[i] + d, 1)[0]; }
    double gate(std::int64_t i) const {
        const double bias = window.operands.bias ? static_cast<double>(window.bias[i][d]) : 0;
        return static_cast<double>(load_floats(window.gate[i] + d, 1)[0]) + bias;
    }
    double weight(std::int64_t i) const { return __builtin_exp(gate(i) - peak) / sum; }
};

template <class T>
FUSION_RARE void pool_exactly(const PoolWindow<T> &window, std::int64_t d, std::int64_t n, Floats &out) {
    for (std::int64_t i = 0; i < least<std::int64_t>(n, lanes); ++i) {
        if (out[i] - out[i] != 0.0f) out[i] = static_cast<float>(PoolChannel<T>(window, d + i).total);
    }
}

// The gradients of those of channels [d, d + n) in which `check` is not finite. dgate: a vector of each row.
template <class T>
FUSION_RARE void differentiate_exactly(const PoolWindow<T> &window, std::int64_t d, std::int64_t n, Floats check,
                                       const WindowRows<T> &dkv, float *dgate, std::int64_t stride) {
    for (std::int64_t lane = 0; lane < least<std::int64_t>(n, lanes); ++lane) {
        if (check[lane] == 0.0f) continue;
        const PoolChannel<T> channel(window, d + lane);
        const double dout = load_floats(window.template result_of<T>(window.operands.dout) + d + lane, 1)[0];
        double total = 0;
        for (std::int64_t i = 0; i < window.rows; ++i) total += channel.weight(i) * (dout * channel.value(i));
        for (std::int64_t i = 0; i < window.rows; ++i) {
            const double weight = channel.weight(i);
            store_floats(dkv[i] + d + lane, Floats{} + static_cast<float>(dout * weight), 1);
            const auto gradient = static_cast<float>(weight * (dout * channel.value(i) - total));
            dgate[i * stride + lane] = gradient == gradient ? gradient : __builtin_nanf("");
        }
    }
}

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

template <class T> FUSION_INLINE void stream_finite(T *to, Floats x) {
    T values[lanes];
    store_finite(values, x);
    stream<sizeof values>(reinterpret_cast<char *>(to), reinterpret_cast<const char *>(values));
}

// Copies `dim` elements of each row past the caches.
template <class T>
void stream_rows(const WindowRows<T> &to, const WindowRows<T> &from, std::int64_t rows, std::int64_t dim) {
    constexpr std::int64_t step = sizeof(Floats), line = 64;
    for (std::int64_t i = 0; i < rows; ++i) {
        char *const target = reinterpret_cast<char *>(to[i]);
        const char *const source = reinterpret_cast<const char *>(from[i]);
        const std::int64_t bytes = dim * static_cast<std::int64_t>(sizeof(T));
        const std::int64_t lines = reinterpret_cast<std::uintptr_t>(target) % line ? 0 : bytes / line * line;
        for (std::int64_t at = 0; at < lines; at += step) stream<step>(target + at, source + at);
        std::memcpy(target + lines, source + lines, static_cast<std::size_t>(bytes - lines));
    }
}

// ------------------------------------------------------------------------------------------------------- a block

FUSION_INLINE bool not_finite(Floats x) { return any(bits_of(x - x)); }

// Channels [d, d + size) of a window, of which n exist: all if complete.
template <class T, bool complete> struct PoolBlock {
    static constexpr std::int64_t vectors = least<std::int64_t>(64 / sizeof(T) / lanes, 4), size = vectors * lanes;
    static_assert(size <= pool_block);

    const PoolWindow<T> &window;
    const std::int64_t d, n;
    float *const scratch;  // [rows][size]: gates, then weights, then gradients of gates
    Floats shift[vectors], sum[vectors], total[vectors];

    PoolBlock(const PoolWindow<T> &of, std::int64_t channel, float *memory)
        : window(of), d(channel), n(of.problem.dim - channel), scratch(memory) {}

    template <class Body> FUSION_INLINE void each_vector(Body body) const {
        FUSION_UNROLL for (std::int64_t v = 0; v < vectors; ++v) {
            if (complete || v * lanes < n) body(v);
        }
    }
    template <class Element> FUSION_INLINE Floats load_at(const Element *row, std::int64_t v) const {
        return load_floats(row + v * lanes, complete ? lanes : n - v * lanes);
    }
    FUSION_INLINE float *scratch_at(std::int64_t i, std::int64_t v) const { return scratch + i * size + v * lanes; }

    // Reads gates: shifts of the exponents, which follow from the maximum.
    FUSION_INLINE void read_gates() {
        const std::int64_t rows = window.rows, bias_at = window.operands.bias ? d : 0;
        each_vector([&](std::int64_t v) { shift[v] = Floats{} - infinity; });
        NextWindow<T> next(window.gate, window.problem, rows, d);
        for (std::int64_t i = 0; i < rows; ++i) {
            const T *const gate = window.gate[i] + d;
            const float *const bias = window.bias[i] + bias_at;
            next.prefetch_line();
            each_vector([&](std::int64_t v) {
                const Floats x = load_at(gate, v) + load_at(bias, v);
                store(scratch_at(i, v), x);
                shift[v] = larger(shift[v], x);
            });
        }
        each_vector([&](std::int64_t v) { shift[v] = pool_shift(shift[v]); });
    }

    // Reads kv: sums of weights and of weighted rows.
    template <bool weights_needed> FUSION_INLINE void read_rows() {
        each_vector([&](std::int64_t v) { sum[v] = total[v] = Floats{}; });
        NextWindow<T> next(window.kv, window.problem, window.rows, d);
        for (std::int64_t i = 0; i < window.rows; ++i) {
            const T *const kv = window.kv[i] + d;
            next.prefetch_line();
            each_vector([&](std::int64_t v) {
                const Floats weight = pool_weight(pool_exponent(load<Floats>(scratch_at(i, v)), shift[v]));
                if (weights_needed) store(scratch_at(i, v), weight);
                sum[v] += weight;
                total[v] = total[v] + weight * load_at(kv, v);
            });
        }
    }

    void forward(T *to) {
        read_gates();
        read_rows<false>();
        each_vector([&](std::int64_t v) {
            Floats out = total[v] / sum[v];
            const std::int64_t at = d + v * lanes, left = n - v * lanes;
            if (__builtin_expect(not_finite(out), 0)) pool_exactly(window, at, left, out);
            store_floats(to + at, out, left);
        });
    }

    void backward(const WindowRows<T> &dkv, const WindowRows<T> &dgate, const WindowRows<float> &dbias) {
        read_gates();
        read_rows<true>();
        const T *const dout = window.template result_of<const T>(window.operands.dout) + d;
        const bool single = window.rows == 1;  // whose gate has the gradient 0
        Floats factor[vectors], check[vectors];
        each_vector([&](std::int64_t v) {
            factor[v] = 1.0f / sum[v];
            total[v] = single ? load_at(window.kv[0] + d, v) : total[v] * factor[v];
            factor[v] = factor[v] * load_at(dout, v);
            check[v] = Floats{};
        });
        for (std::int64_t i = 0; i < window.rows; ++i) {
            const T *const kv = window.kv[i] + d;
            T *const to = dkv[i] + d;
            const bool streamed = streams(to);
            each_vector([&](std::int64_t v) {
                const Floats x = load<Floats>(scratch_at(i, v)) * factor[v], y = x * (load_at(kv, v) - total[v]);
                check[v] = check[v] + y * 0.0f;  // a gradient of kv that is not finite makes that of its gate so
                store(scratch_at(i, v), y);
                write(to, x, v, streamed);
            });
        }
        each_vector([&](std::int64_t v) {
            if (__builtin_expect(any(bits_of(check[v])), 0)) {
                differentiate_exactly(window, d + v * lanes, n - v * lanes, check[v], dkv, scratch_at(0, v), size);
            }
        });
        for (std::int64_t i = 0; i < window.rows; ++i) {
            T *const to = dgate[i] + d;
            float *const sums = dbias.first ? dbias[i] + d : nullptr;
            const bool streamed = streams(to);
            each_vector([&](std::int64_t v) {
                const Floats y = load<Floats>(scratch_at(i, v));
                write(to, y, v, streamed);
                if (sums) store(sums + v * lanes, load<Floats>(sums + v * lanes) + y);
            });
        }
    }

    // Blocks that are complete cache lines are written past the caches.
    FUSION_INLINE bool streams(const T *to) const {
        return complete && window.operands.streamed && reinterpret_cast<std::uintptr_t>(to) % 64 == 0;
    }
    FUSION_INLINE void write(T *to, Floats x, std::int64_t v, bool streamed) const {
        if (!complete && n < (v + 1) * lanes) return store_floats(to + v * lanes, x, n - v * lanes);
        if (streamed) return stream_finite(to + v * lanes, x);
        store_finite(to + v * lanes, x);
    }
};

// Calls body(block) for all channels of a window.
template <class T, class Body>
FUSION_INLINE void each_block(const PoolWindow<T> &window, float *scratch, Body body) {
    std::int64_t d = 0;
    for (; d + PoolBlock<T, true>::size <= window.problem.dim; d += PoolBlock<T, true>::size) {
        body(PoolBlock<T, true>(window, d, scratch));
    }
    if (d < window.problem.dim) body(PoolBlock<T, false>(window, d, scratch));
}

template <class T> void pool_forward(const PoolJob &job, const PoolItem &item, float *scratch) {
    for (std::int64_t w = item.first; w < item.end; ++w) {
        const PoolWindow<T> window(job, item, w);
        T *const out = window.template result_of<T>(job.operands->out);
        each_block(window, scratch, [&](auto block) { block.forward(out); });
    }
}

template <class T> void pool_backward(const PoolJob &job, const PoolItem &item, float *dbias, float *scratch) {
    const PoolProblem &problem = *job.problem;
    const std::int64_t stride = problem.gathered_row(), floats = pool_block * problem.window_rows();
    T *const gathered = job.operands->gathered ? reinterpret_cast<T *>(scratch + floats) : nullptr;
    for (std::int64_t w = item.first; w < item.end; ++w) {
        const PoolWindow<T> window(job, item, w);
        const WindowRows<T> dkv = window.template of<T>(job.operands->dkv),
                            dgate = window.template of<T>(job.operands->dgate);
        WindowRows<T> to = dkv, gate_to = dgate;
        if (gathered) to = {gathered, stride, 0, 0}, gate_to = {gathered + window.rows * stride, stride, 0, 0};
        WindowRows<float> sums = {};
        if (dbias) sums = window.by_position(dbias, round_up(problem.dim, pool_padding));
        each_block(window, scratch, [&](auto block) { block.backward(to, gate_to, sums); });
        if (!gathered) continue;
        stream_rows(dkv, to, window.rows, problem.dim);
        stream_rows(dgate, gate_to, window.rows, problem.dim);
    }
}

template <class T> constexpr PoolKernels pool_kernels = {pool_forward<T>, pool_backward<T>};

}  // namespace
}  // namespace fusion
