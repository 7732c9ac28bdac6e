// Numbers in the core's three dtypes, and operands in hostile memory: gaps between rows, heads and sequences hold NaN.

#pragma once

#include "data/problem.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

namespace check {

using fusion::Dtype;
using Long = std::int64_t;

struct Kind {
    int bytes, precision, least_exponent, shift;  // significand bits; of the least normal number; of the pattern
};

inline Kind kind_of(Dtype dtype) {
    if (dtype == Dtype::float16) return {2, 11, -13, 0};
    return dtype == Dtype::bfloat16 ? Kind{2, 8, -125, 16} : Kind{4, 24, -125, 0};
}

// The relative error of one rounding.
inline double unit(Dtype dtype) { return std::ldexp(1.0, -kind_of(dtype).precision); }

inline double rounded(Dtype dtype, double x) {
    const Kind kind = kind_of(dtype);
    int exponent = 0;
    std::frexp(x, &exponent);
    const double ulp = std::ldexp(1.0, std::max(exponent, kind.least_exponent) - kind.precision);
    return std::nearbyint(x / ulp) * ulp;
}

// A number of the dtype as its bits, and back.
inline std::uint32_t encode(Dtype dtype, double x) {
    if (dtype == Dtype::float16) {
        const std::uint32_t sign = std::signbit(x) ? 0x8000 : 0;
        if (!std::isfinite(x)) return sign | (std::isnan(x) ? 0x7e00 : 0x7c00);
        const double size = std::fabs(x);
        if (size < 0x1p-14) return sign | static_cast<std::uint32_t>(size * 0x1p24);
        int exponent = 0;
        const double fraction = std::frexp(size, &exponent);
        const auto significand = static_cast<std::uint32_t>(fraction * 2048) & 1023;
        return sign | static_cast<std::uint32_t>((exponent + 14) << 10) | significand;
    }
    const float single = static_cast<float>(x);
    std::uint32_t bits;
    std::memcpy(&bits, &single, 4);
    return bits >> kind_of(dtype).shift;
}

inline double decode(Dtype dtype, std::uint32_t bits) {
    if (dtype == Dtype::float16) {
        const std::uint32_t exponent = bits >> 10 & 31, fraction = bits & 1023;
        const double size = exponent == 31  ? (fraction ? NAN : INFINITY)
                            : exponent == 0 ? std::ldexp(fraction, -24)
                                            : std::ldexp(1024 + fraction, static_cast<int>(exponent) - 25);
        return bits >> 15 ? -size : size;
    }
    bits <<= kind_of(dtype).shift;
    float single;
    std::memcpy(&single, &bits, 4);
    return single;
}

// Elements of one dtype; poison is a NaN that no computation makes.
class Elements {
public:
    Elements() = default;
    Elements(Dtype dtype, std::size_t count) : dtype_(dtype), bytes_(count * kind_of(dtype).bytes, 0xff) {}

    double get(Long at) const {
        std::uint32_t bits = 0;
        std::memcpy(&bits, &bytes_.at(at * size()), size());  // little-endian machines only, as the core
        return decode(dtype_, bits);
    }
    void set(Long at, double x) {
        const std::uint32_t bits = encode(dtype_, rounded(dtype_, x));
        std::memcpy(&bytes_.at(at * size()), &bits, size());
    }
    // Returns the number of elements that were not written.
    Long poisoned() const {
        Long count = 0;
        for (std::size_t at = 0; at < bytes_.size(); at += size()) {
            bool all = true;
            for (int i = 0; i < size(); ++i) all &= bytes_[at + i] == 0xff;
            count += all;
        }
        return count;
    }
    void poison() { std::fill(bytes_.begin(), bytes_.end(), 0xff); }
    void *data() { return bytes_.data(); }
    const std::vector<unsigned char> &bytes() const { return bytes_; }
    Long count() const { return static_cast<Long>(bytes_.size()) / size(); }

private:
    int size() const { return kind_of(dtype_).bytes; }

    Dtype dtype_ = Dtype::float32;
    std::vector<unsigned char> bytes_;
};

// Rows of `dim` elements for every (sequence, head, token); the memory ends with the last row.
struct RowMemory {
    Long heads = 0, dim = 0, stride_token = 0;
    std::vector<Long> tokens, address, stride_head;
    Elements elements;

    RowMemory() = default;
    RowMemory(Dtype dtype, Long heads_, Long dim_, std::vector<Long> tokens_)
        : heads(heads_), dim(dim_), stride_token(heads * (dim + 1) + 2), tokens(std::move(tokens_)) {
        Long end = 3, next = 3;
        for (Long n : tokens) {
            address.push_back(next);
            stride_head.push_back(dim + 1);
            if (n) end = next + (n - 1) * stride_token + (heads - 1) * (dim + 1) + dim;
            next += n * stride_token + 1;
        }
        elements = Elements(dtype, dim ? end : 0);
    }

    Long at(Long b, Long head, Long token, Long d) const {
        return address[b] + head * stride_head[b] + token * stride_token + d;
    }
    double get(Long b, Long head, Long token, Long d) const { return elements.get(at(b, head, token, d)); }
    void set(Long b, Long head, Long token, Long d, double x) { elements.set(at(b, head, token, d), x); }
    Long size() const {
        Long total = 0;
        for (Long n : tokens) total += n * heads * dim;
        return total;
    }
    template <class Do> void each(Do run) const {  // run(b, head, token, d)
        for (std::size_t b = 0; b < tokens.size(); ++b) {
            for (Long h = 0; h < heads; ++h) {
                for (Long t = 0; t < tokens[b]; ++t) {
                    for (Long d = 0; d < dim; ++d) run(static_cast<Long>(b), h, t, d);
                }
            }
        }
    }
    void fill(std::mt19937 &random, double size) {
        each([&](Long b, Long h, Long t, Long d) {
            set(b, h, t, d, size * (static_cast<double>(random()) * 0x1p-31 - 1.0));
        });
    }
    void poison() { elements.poison(); }
    fusion::Rows view() { return {elements.data(), address.data(), stride_head.data(), stride_token}; }
};

// A value or a bit per (head, row, key) of every sequence, without gaps; axes that are not `own` have stride 0.
struct MatrixMemory {
    std::vector<Long> address, stride_head, stride_row;
    Long stride_key = 1, count = 0;

    MatrixMemory() = default;
    MatrixMemory(Long start, Long heads, const std::vector<fusion::Sequence> &sequences, bool own_heads, bool own_rows)
        : count(start) {
        for (const fusion::Sequence &seq : sequences) {
            address.push_back(count);
            stride_row.push_back(own_rows ? seq.kv_len : 0);
            stride_head.push_back(own_heads ? (own_rows ? seq.q_len : 1) * seq.kv_len : 0);
            count += (own_heads ? heads : 1) * (own_rows ? seq.q_len : 1) * seq.kv_len;
        }
    }
    Long at(Long b, Long head, Long row, Long key) const {
        return address[b] + head * stride_head[b] + row * stride_row[b] + key * stride_key;
    }
    fusion::Matrix view(const void *base, Dtype dtype) const {
        return {base, address.data(), stride_head.data(), stride_row.data(), stride_key, dtype};
    }
};

}  // namespace check
