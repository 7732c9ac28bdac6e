// What a result of one case may be off, and what was found.
//
// Allowed for every element: what the roundings of the operand dtype, and float32 sums of so many terms, can make of
// the sum of its absolute terms.

#pragma once

#include "dispatch.h"
#include "naive.h"

#include <cstdio>

namespace check {

struct Report {
    std::string only;  // the variant that is tested alone; empty: all that run here
    int failures = 0;

    bool tests(const fusion::Built &built) const { return built.variant && (only.empty() || only == built.name); }

    void fail(const std::string &what) {
        if (++failures <= 20) std::printf("FAILED %s\n", what.c_str());
    }
};

class Judge {
public:
    // terms: of the longest sum behind an element.
    Judge(Report &report, const char *name, Dtype dtype, Long terms)
        : report_(report), name_(name), dtype_(dtype), terms_(terms) {}
    ~Judge() {
        const char *const names[] = {"float32", "float16", "bfloat16"};
        std::printf("%-24s %-9s worst error / allowed %.2f\n", name_, names[static_cast<int>(dtype_)], worst_);
    }
    Judge(const Judge &) = delete;
    Judge &operator=(const Judge &) = delete;

    // Whose results come now; rounds_weights: to bfloat16, for dot products of pairs.
    void begin(const char *variant, const char *stage, bool rounds_weights) {
        variant_ = variant, stage_ = stage;
        rounds_weights_ = rounds_weights && dtype_ == Dtype::bfloat16;
    }

    void report(const std::string &what, const std::string &why) {
        report_.fail(std::string(variant_) + ", " + name_ + ", dtype " + std::to_string(static_cast<int>(dtype_)) +
                     ": " + stage_ + what + ": " + why);
    }

    void require_same(const char *what, const Elements &one, const Elements &other) {
        if (one.bytes() != other.bytes()) report(what, "other bits with other threads");
    }

    // float32 sums of n terms err like sqrt(n); an error of a score, whose terms add up to `largest`, is one of the
    // exponential's relative error. low: stored in the operand dtype. more: allowed besides.
    void check(const char *what, double got, double want, double size, double largest, bool low, double more = 0) {
        double relative = 2 * unit(Dtype::float32) * std::sqrt(static_cast<double>(terms_)) * (1 + largest);
        if (rounds_weights_) relative += unit(dtype_);
        if (low && dtype_ != Dtype::float32) relative += unit(dtype_);
        const double least = low && dtype_ == Dtype::float16 ? 0x1p-24 : 1e-30;  // below its normal numbers
        const double allowed = relative * size + more + least;
        const bool same = got == want, close = std::fabs(got - want) <= allowed;
        if (!same && !close) report(what, std::to_string(got) + ", expected " + std::to_string(want));
        if (!same && close) worst_ = std::max(worst_, std::fabs(got - want) / allowed);
    }

    // Of rows of elements. A maximum is known as well as a score.
    void compare(const char *what, const RowMemory &got, const Sums &want, double largest, bool low,
                 bool is_max = false) {
        Long at = 0;
        got.each([&](Long b, Long h, Long t, Long d) {
            const double more = want.more.empty() ? 0 : want.more[at];
            check(what, got.get(b, h, t, d), want.value[at], is_max ? 1 + largest : want.size[at], largest, low, more);
            ++at;
        });
        if (got.elements.poisoned() != got.elements.count() - got.size()) report(what, "memory beside was written");
    }

    void compare(const char *what, const std::vector<float> &got, const Sums &want, double largest) {
        for (std::size_t i = 0; i < want.value.size(); ++i) {
            check(what, got[i], want.value[i], want.size[i], largest, false);
        }
    }

private:
    Report &report_;
    const char *name_, *variant_ = "", *stage_ = "";
    Dtype dtype_;
    Long terms_;
    bool rounds_weights_ = false;
    double worst_ = 0;
};

inline Long most_terms(const Call &c) {
    Long terms = c.problem.dim_qk + c.problem.dim_rope;
    for (const fusion::Sequence &s : c.sequences) terms = std::max({terms, s.q_len, s.kv_len});
    return terms;
}

}  // namespace check
