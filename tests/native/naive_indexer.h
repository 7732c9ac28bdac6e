// The lightning indexer and its loss by loops in double, beside every sum that of its absolute terms. Shares no line
// with the core.

#pragma once

#include "naive.h"

namespace check {

struct Index {  // heads of q share one of k
    Long heads = 0, dim = 0;
    RowMemory q, k, weights;  // weights: a row of `heads` elements
    RowMemory max, sum;       // saved statistics, where no lists are given
};

// I = sum over heads of w * max(0, q . k), and the products.
struct IndexScore {
    Dot total;
    std::vector<double> products;
};

inline IndexScore index_score(const Index &x, Long b, Long row, Long key) {
    IndexScore out;
    for (Long h = 0; h < x.heads; ++h) {
        const Dot product = dot(x.q, x.k, b, h, row, 0, key);
        const double weight = x.weights.get(b, 0, row, h);
        out.products.push_back(product.value);
        out.total.value += weight * std::max(0.0, product.value);
        out.total.size += std::fabs(weight) * product.size;
    }
    return out;
}

// The keys of a row, each as often as its list names it.
inline std::vector<Long> index_keys(const Call &c, Long b, Long row) {
    std::vector<Long> out;
    const auto meet = [&](Long key) {
        if (is_visible(c, b, 0, row, key)) out.push_back(key);
    };
    if (!c.lists.empty()) {
        for (Long key : c.lists[c.list_at(b, 0, row)]) meet(key);
        return out;
    }
    for (Long key = 0; key < c.sequences[b].kv_len; ++key) meet(key);
    return out;
}

struct Softmax {
    double peak = -INFINITY, sum = 0;
};

inline Softmax index_softmax(const Index &x, const std::vector<Long> &keys, Long b, Long row, double &largest) {
    Softmax out;
    std::vector<double> scores;
    for (Long key : keys) {
        const Dot score = index_score(x, b, row, key).total;
        scores.push_back(score.value);
        out.peak = std::max(out.peak, score.value);
        largest = std::max(largest, score.size);
    }
    for (double score : scores) out.sum += std::exp(score - out.peak);
    return out;
}

// The attention's probability of a key, the mean over heads, from its saved statistics.
inline double target_of(const Call &c, Long b, Long row, Long key, double &largest) {
    double total = 0, heads = static_cast<double>(c.problem.heads_q);
    for (Long h = 0; h < c.problem.heads_q; ++h) {
        const double peak = c.max.get(b, h, row, 0), sum = c.sum.get(b, h, row, 0);
        const Dot s = score(c, b, h, row, key);
        largest = std::max(largest, s.size);
        total += std::exp(s.value - peak) / sum;
        if (c.problem.has_sink) heads -= std::exp(c.sink[h] - peak) / sum;
    }
    return total / heads;
}

// What a gradient of a row's score of one key gives to q, k and the weights.
inline void add_index_gradient(const Index &x, Long b, Long row, Long key, double dscore, double size, Results &r) {
    const IndexScore score = index_score(x, b, row, key);
    for (Long h = 0; h < x.heads; ++h) {
        const double product = score.products[h], weight = x.weights.get(b, 0, row, h);
        if (product <= 0) continue;
        r["dweights"].add(place(x.weights, b, 0, row) + h, dscore * product, size * product);
        add_row(r["dq"], place(x.q, b, h, row), x.k, b, 0, key, dscore * weight, size * std::fabs(weight));
        add_row(r["dk"], place(x.k, b, 0, key), x.q, b, h, row, dscore * weight, size * std::fabs(weight));
    }
}

inline Results empty_gradients(const Index &x) {
    return {{"dq", Sums(x.q.size())}, {"dk", Sums(x.k.size())}, {"dweights", Sums(x.weights.size())}};
}

// The loss and its gradients; a row without keys gives nothing.
inline Results index_loss(const Call &c, const Index &x, double &largest) {
    constexpr double least = 1e-8;
    Results r = empty_gradients(x);
    r["loss"] = Sums(1);
    x.max.each([&](Long b, Long, Long i, Long) {
        const std::vector<Long> keys = index_keys(c, b, i);
        const Softmax softmax = index_softmax(x, keys, b, i, largest);
        for (Long key : keys) {
            const Dot score = index_score(x, b, i, key).total;
            const double y = std::exp(score.value - softmax.peak) / softmax.sum;
            const double p = target_of(c, b, i, key, largest);
            const double log_p = std::log(std::max(p, least)), log_y = std::log(std::max(y, least));
            const double factor = c.lists.empty() ? p : std::max(p, least);
            // The logarithms err by as much as probabilities do, relatively.
            r["loss"].add(0, factor * (log_p - log_y), factor * (1 + std::fabs(log_p) + std::fabs(log_y)));
            add_index_gradient(x, b, i, key, y - p, y + p, r);
        }
    });
    return r;
}

}  // namespace check
