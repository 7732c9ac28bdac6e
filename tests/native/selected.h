// One call of each plan that selects keys: two sequences, drawn numbers, the bytes of all results.

#pragma once

#include "memory.h"
#include "plan/indexer.h"
#include "plan/sparse.h"

namespace check {

enum class Selected { forward, backward, indexer, indexed_gradient, list_loss, tile_loss };

class SelectedCall {
public:
    SelectedCall(Dtype dtype, Selected kind) : dtype_(dtype), kind_(kind), random_(23) {
        for (std::size_t b = 0; b < sequences_.size(); ++b) {
            list_address_.push_back(static_cast<Long>(lists_.size()));
            no_heads_.push_back(0);
            for (Long i = 0; i < sequences_[b].q_len * selected; ++i) {
                lists_.push_back(static_cast<std::int32_t>(random_() % sequences_[b].kv_len));
            }
        }
        for (RowMemory *m : {&q_, &k_, &v_, &dout_, &out_, &dvalues_, &weights_, &own_q_, &own_k_}) {
            m->fill(random_, 1.0);
        }
        max_.each([&](Long b, Long h, Long t, Long d) { max_.set(b, h, t, d, 1.0); });
        sum_.each([&](Long b, Long h, Long t, Long d) { sum_.set(b, h, t, d, 40.0); });
    }

    // The bytes of all results.
    std::vector<unsigned char> run(const fusion::SparseVariant &variant, int threads) {
        for (RowMemory *m : {&dq_, &dk_, &dv_, &dweights_, &got_, &values_, &likelihoods_}) m->poison();
        RowMemory top = max_, total = sum_;
        std::vector<std::int32_t> chosen(lists_.size(), -7);
        float loss = 0;
        const fusion::Rows lists = {lists_.data(), list_address_.data(), no_heads_.data(), selected};
        fusion::SparseOperands o;
        o.q = q_.view(), o.k.rows = k_.view(), o.v.rows = v_.view(), o.max = top.view(), o.sum = total.view();
        o.indices = lists, o.out = got_.view(), o.weights = weights_.view(), o.dq = dq_.view(), o.dk = dk_.view();
        o.dv = dv_.view(), o.dweights = dweights_.view(), o.values = values_.view();
        if (kind_ == Selected::indexer) {
            o.indices = {chosen.data(), list_address_.data(), no_heads_.data(), selected};
            fusion::IndexerPlan(variant, index(selected), sequences_).run(o, threads);
        } else if (kind_ == Selected::list_loss || kind_ == Selected::tile_loss) {
            fusion::SparseOperands attended;
            attended.q = own_q_.view(), attended.k.rows = own_k_.view(), attended.max = top.view();
            attended.sum = total.view(), attended.v = attended.k;
            const Long lists_of = kind_ == Selected::list_loss ? selected : 0;
            o.values = likelihoods_.view();
            fusion::SparsePlan(variant, index(lists_of), sequences_, attention()).run(o, attended, &loss, threads);
        } else if (kind_ == Selected::indexed_gradient) {
            o.dout = dvalues_.view();
            fusion::SparsePlan(variant, index(selected), sequences_, true).run(o, threads);
        } else {
            if (kind_ == Selected::backward) o.dout = dout_.view(), o.out = out_.view();
            fusion::SparsePlan(variant, attention(), sequences_, kind_ == Selected::backward).run(o, threads);
        }
        std::vector<unsigned char> bytes;
        const auto add = [&](const void *from, std::size_t count) {
            const auto *const at = static_cast<const unsigned char *>(from);
            bytes.insert(bytes.end(), at, at + count);
        };
        for (const RowMemory *m : {&dq_, &dk_, &dv_, &dweights_, &got_, &values_, &likelihoods_, &top, &total}) {
            add(m->elements.bytes().data(), m->elements.bytes().size());
        }
        add(chosen.data(), chosen.size() * sizeof(std::int32_t));
        add(&loss, sizeof loss);
        return bytes;
    }

private:
    static constexpr Long heads = 5, dim = 24, selected = 60, everything = Long{1} << 40;

    fusion::SparseProblem attention() const {
        return {heads, 1, dim, dim, 0, dtype_, 0.2, false, false, selected, 1, false, dtype_};
    }
    fusion::SparseProblem index(Long count) const {
        return {heads, 1, dim, 0, 0, dtype_, 1.0, false, false, count, 1, true, dtype_};
    }
    RowMemory rows(Long heads_, Long dim_) const { return {dtype_, heads_, dim_, {150, 33}}; }
    RowMemory keys() const { return {dtype_, 1, dim, {1400, 90}}; }

    Dtype dtype_;
    Selected kind_;
    std::mt19937 random_;
    std::vector<fusion::Sequence> sequences_ = {{150, 1400, -everything, 1251, 0, 0}, {33, 90, -everything, 58, 0, 0}};
    RowMemory q_ = rows(heads, dim), k_ = keys(), v_ = keys(), own_q_ = rows(heads, dim), own_k_ = keys();
    RowMemory dout_ = rows(heads, dim), out_ = rows(heads, dim), dvalues_ = rows(1, selected);
    RowMemory weights_ = rows(1, heads), dweights_ = rows(1, heads), dq_ = rows(heads, dim), dk_ = keys(), dv_ = keys();
    RowMemory got_ = rows(heads, dim), values_ = rows(1, selected);
    RowMemory likelihoods_{Dtype::float32, 1, kind_ == Selected::list_loss ? selected : 1400, {150, 33}};
    RowMemory max_{Dtype::float32, heads, 1, {150, 33}}, sum_{Dtype::float32, heads, 1, {150, 33}};
    std::vector<std::int32_t> lists_;
    std::vector<Long> list_address_, no_heads_;
};

}  // namespace check
