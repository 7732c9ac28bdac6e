// The last step of a decode: merges partial results of the same rows in order, divides, rounds and stores them.

#pragma once

#include "decode/queries.h"
#include "simd/softmax_sink_and_nan.h"

namespace fusion {
namespace {
namespace decode {

// Merges the partial results of row `i` into the first one; returns its maximum and sum.
inline const float *merge_partials(const DecodeProblem &p, const DecodeRows &r, std::int64_t i, float *partials) {
    const std::int64_t stride = partial_stride(p);
    float *first = partials + r.place + i * stride;
    if (r.count == 1) return first;
    const float factor = natural_scale(p) * log2_e, nan = __builtin_nanf("");
    float peak = -infinity, sum = 0;
    for (std::int64_t c = 0; c < r.count; ++c) {
        const float other = first[c * r.stride];
        peak = peak != peak || other != other ? nan : most(peak, other);
    }
    for (std::int64_t c = 0; c < r.count; ++c) {
        const float *from = first + c * r.stride;
        float weight = from[0] == peak ? 1.0f : exp2(all((from[0] - peak) * factor))[0];
        if (from[0] > -infinity) weight = most(weight, least_weight);  // 0 * inf is NaN
        sum = c ? sum + from[1] * weight : from[1] * weight;
        for (std::int64_t d = partial_head; d < stride; d += lanes) {
            const Floats added = load<Floats>(from + d) * all(weight);
            store(first + d, c ? load<Floats>(first + d) + added : added);
        }
    }
    first[0] = peak;
    first[1] = sum;
    return first;
}

inline void merge_rows(const DecodeJob &job, const DecodeRows &r, float *partials) {
    for (std::int64_t i = 0; i < r.row1 - r.row0; ++i) merge_partials(*job.problem, r, i, partials);
}

inline float at(const PerChannel &values, std::int64_t head, std::int64_t d, float otherwise) {
    return values.base ? values.base[head * values.stride_head + d * values.stride] : otherwise;
}

inline void store_integers(const DecodeProblem &p, const DecodeOperands &o, std::int64_t head, const float *from,
                           std::int8_t *to) {
    for (std::int64_t d = 0; d < p.dim_v; ++d) {
        float x = from[d] * at(o.out_scale, head, d, 1.0f);
        __asm__("" : "+m"(x));  // rounds the product here, so that it is not fused with an addition
        x += at(o.out_offset, head, d, 0.0f);
        x = x > -129.0f ? (x < 129.0f ? x : 129.0f) : x <= -129.0f ? -129.0f : 0.0f;
        float rounded = __builtin_rintf(x);
        if (p.rounding == Rounding::away) {
            rounded = static_cast<float>(static_cast<int>(x));
            const float rest = x - rounded;
            rounded += rest >= 0.5f ? 1.0f : rest <= -0.5f ? -1.0f : 0.0f;
        }
        to[d] = static_cast<std::int8_t>(rounded > 127.0f ? 127.0f : rounded < -128.0f ? -128.0f : rounded);
    }
}

inline void store_out(const DecodeProblem &p, const DecodeOperands &o, std::int64_t b, std::int64_t head,
                      std::int64_t token, const float *from) {
    if (p.rounding != Rounding::none)
        return store_integers(p, o, head, from, row_of<std::int8_t>(o.out, b, head, token));
    by_dtype(p.dtype,
             [&](auto stored) { store_scaled(row_of<decltype(stored)>(o.out, b, head, token), from, p.dim_v, 1.0f); });
}

inline std::int64_t finish_rows(const DecodeJob &job, const DecodeRows &r, float *partials) {
    const DecodeProblem &p = *job.problem;
    const DecodeOperands &o = *job.operands;
    const std::int64_t group = p.heads_q / p.heads_kv, columns = partial_stride(p) - partial_head;
    const float nan = __builtin_nanf("");
    std::int64_t empty = 0;
    for (std::int64_t i = 0; i < r.row1 - r.row0; ++i) {
        const std::int64_t token = (r.row0 + i) / group, head = r.head * group + (r.row0 + i) % group;
        const float *state = merge_partials(p, r, i, partials);
        float *out = partials + r.place + i * partial_stride(p) + partial_head;
        float peak = state[0] * natural_scale(p), sum = state[1];
        const float fraction = p.has_sink ? join_sink(o.sink[head], peak, sum) : 1.0f;
        if (peak == infinity) sum = nan;
        else mark_nan(peak, sum);
        const bool none = peak == -infinity;
        const Floats factor = all(sum != sum ? nan : fraction / sum);
        for (std::int64_t d = 0; d < columns; d += lanes) {
            store(out + d, none ? Floats{} : load<Floats>(out + d) * factor);
        }
        store_out(p, o, r.seq, head, token, out);
        if (o.max.base) {
            *row_of<float>(o.max, r.seq, head, token) = peak;
            *row_of<float>(o.sum, r.seq, head, token) = none ? 0.0f : sum;
        }
        empty += none;
    }
    return empty;
}

}  // namespace decode
}  // namespace
}  // namespace fusion
