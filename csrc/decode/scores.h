// The first half of a decode: scores of a tile's keys, while rows that come later are fetched. Vectors of eight lanes
// have loops of their own (lanes8.h).

#pragma once

#include "decode/queries.h"

namespace fusion {
namespace {
namespace decode {

// A processor drops requests that come faster than its memory answers. So rows are asked for half a tile ahead, and
// once more this many keys ahead, which costs little where they have come.
template <class F> constexpr std::int64_t again_keys = F::depth == 1 ? lanes : 2 * lanes;
template <class F> constexpr std::int64_t again_values = F::depth == 1 ? 32 : 16;

// Into the second cache.
FUSION_INLINE void fetch_line(const char *at) { __builtin_prefetch(at, 0, 2); }
FUSION_INLINE void fetch_line(const char *row, std::int64_t byte) {
#if defined(__x86_64__)
    __asm__ volatile("prefetcht1 (%0,%1)" : : "r"(row), "r"(byte));  // gcc would add them in an instruction of its own
#else
    fetch_line(row + byte);
#endif
}

// Whether a quarter of the next keys is asked for while scores are weighed, when memory would rest. Integers take
// longer to multiply than to read.
template <class F> constexpr bool feeds = !F::integer;

// The lines of a tile's rows that follow half a tile later, asked for row by row: memory answers fastest in its own
// order. No PrefetchQueue: rows of pages are known by their addresses, and this stands in the loop over words of a key.
class LinePrefetch {
public:
    LinePrefetch() = default;
    // Bytes [from, to) of `count` rows, which lie `step` apart (0: anyhow), while rows of `met` bytes are multiplied:
    // staged ones are longer than what is stored.
    LinePrefetch(const char *const *rows, std::int64_t count, std::int64_t step, std::int64_t from, std::int64_t to,
                 std::int64_t met)
        : rows_(rows + 1), last_(rows + count), from_(from), size_(to - from) {
        if (size_ <= 0) return;
        every_ = most<std::int64_t>(met / size_, 1), wait_ = 0;
        if (from == 0 && step == to) rows_ = last_, size_ *= count;  // side by side
        at_ = rows[0] + from, end_ = at_ + size_;
    }

    bool any() const { return at_ != nullptr; }
    // The next N lines, each time that as many are due; behind the last, that one again.
    template <int N> FUSION_INLINE void fetch() {
        if (wait_-- > 0) return;
        wait_ = every_ - 1;
        FUSION_UNROLL for (int i = 0; i < N; ++i) step();
    }
    FUSION_INLINE void fetch(std::int64_t count) {
        for (std::int64_t i = 0; at_ && i < count; ++i) step();
    }

    // The next `count` lines are asked for by the caller, from where this says on. Behind the last, some of the last.
    FUSION_INLINE const char *take(std::int64_t count) {
        const char *const from = at_;
        if (__builtin_expect(end_ - from <= count * 64, 0)) return take_last(count);
        at_ += count * 64;
        return from;
    }

private:
    __attribute__((noinline)) const char *take_last(std::int64_t count) {
        for (std::int64_t i = 0; i < count; ++i) step();
        return at_;
    }
    FUSION_INLINE void step() {
        fetch_line(at_);
        at_ += 64;
        if (__builtin_expect(at_ < end_, 1)) return;
        if (rows_ < last_) at_ = *rows_++ + from_, end_ = at_ + size_;
        else at_ -= 64;
    }

    const char *at_ = nullptr, *end_ = nullptr;  // null: none
    const char *const *rows_ = nullptr, *const *last_ = nullptr;
    std::int64_t from_ = 0, size_ = 0, every_ = 1, wait_ = std::int64_t{1} << 62;
};

// Rows that are read next, once more, in the order in which they will be read.
struct RepeatPrefetch {
    const char *const *rows = nullptr;  // null: none
    std::int64_t to = 0;

    template <int N> FUSION_INLINE void fetch(std::int64_t row, std::int64_t byte) const {
        if (!rows || byte >= to) return;
        FUSION_UNROLL for (int i = 0; i < N; ++i) fetch_line(rows[row + i], byte);
    }
    // While P words of each of `lanes` rows are multiplied.
    template <int P> FUSION_INLINE void follow(std::int64_t step) const {
        if constexpr (lanes == 16) {
            fetch<P>(step * P % 16, step * P / 16 * 64);
        } else if (step * P % 16 == 0) {
            fetch<lanes>(0, step * P / 16 * 64);
        }
    }
};

// While P words of each of N rows are multiplied: as many lines.
template <int P, int N> FUSION_INLINE void follow(LinePrefetch &ahead, std::int64_t step) {
    if constexpr (P * N >= 16) ahead.fetch<P * N / 16>();
    else if (step * P * N % 16 == 0) ahead.fetch<1>();
}

template <class F, int P>
FUSION_INLINE void add_products(Floats (&sum)[lanes], const Words *q, const char *const *rows, std::int64_t steps,
                                LinePrefetch &ahead, const RepeatPrefetch &again) {
    for (std::int64_t step = 0; step < steps; ++step) {
        const Words query = load<Words>(q + step);
        follow<P, lanes>(ahead, step);
        again.follow<P>(step);
        FUSION_UNROLL for (int i = 0; i < lanes; ++i) sum[i] = F::dot(sum[i], query, repeat<P>(rows[i] + step * P * 4));
    }
}

template <class F, int P>
FUSION_INLINE void add_digits(Ints (&sum)[lanes], const Words *q, const Ints *start, const char *const *rows,
                              std::int64_t steps, LinePrefetch &ahead, const RepeatPrefetch &again) {
    constexpr int half = least(lanes, 8);  // as many sums of all digits as registers hold
    FUSION_UNROLL for (int from = 0; from < lanes; from += half) {
        Ints digit[F::digits][half];
        FUSION_UNROLL for (int n = 0; n < F::digits; ++n) {
            FUSION_UNROLL for (int i = 0; i < half; ++i) digit[n][i] = load<Ints>(start + n);
        }
        for (std::int64_t step = 0; step < steps; ++step) {
            const Words *query = q + step * F::parts * F::digits;
            follow<P, half>(ahead, step);
            if (from == 0) again.follow<P>(step);
            FUSION_UNROLL for (int i = 0; i < half; ++i) {
                Words part[F::parts];
                F::split(repeat<P>(rows[from + i] + step * P * 4), part);
                FUSION_UNROLL for (int j = 0; j < F::parts * F::digits; ++j) {
                    Ints &to = digit[j % F::digits][i];
                    to = F::dot(to, part[j / F::digits], load<Words>(query + j));
                }
            }
        }
        FUSION_UNROLL for (int i = 0; i < half; ++i) sum[from + i] = F::joined(&digit[0][i], half);
    }
}

// Once more: of the keys that come next, behind the last of which are the first values.
template <class F>
FUSION_INLINE RepeatPrefetch repeat_for(const DecodeWork<F> &w, const RowBlock &b, const DecodeTile &t,
                                        const LinePrefetch &ahead, std::int64_t key) {
    const std::int64_t upcoming = key + again_keys<F> - t.count;
    if (b.row == 0 && (w.sizes.direct_keys || F::widened) && upcoming < 0)
        return {w.s.key_rows + key + again_keys<F>, row_bytes(w.p.storage, w.p.dim_qk)};
    if (upcoming >= 0 && t.count == decode_tile && ahead.any() && !w.p.shares_kv) {
        return {w.s.value_rows + upcoming, row_bytes(w.p.storage, w.p.dim_v)};
    }
    return {};
}

// Converts keys shortly before they are met, while they are in the first cache, but not at once: what has just been
// stored is slow to load.
template <class F> FUSION_INLINE void widen_keys(const DecodeWork<F> &w, const RowBlock &b, const DecodeTile &t,
                                                 std::int64_t key) {
    if constexpr (F::widened) {
        if (b.row > 0) return;
        const std::int64_t words = w.sizes.key_words, n = w.p.dim_qk;
        const bool stay = w.rows() > lanes;
        const std::int64_t begin = key ? key + lanes : 0, end = least(key + 2 * lanes, t.count);
        for (std::int64_t i = begin; i < end; ++i) {
            auto *const to = reinterpret_cast<float *>(w.s.keys) + (stay ? i : i % (2 * lanes)) * words;
            if (n % lanes) store(to + words - lanes, Floats{});
            const char *const row =
                whole_row(w.keys, w.s.key_rows[i], row_bytes(F::stored, n), reinterpret_cast<char *>(w.s.line));
            widen_row<typename F::Element>(row, n, to);
            w.s.key_rows[i] = reinterpret_cast<const char *>(to);
        }
    }
}

#if defined(__AVX512F__)
constexpr int narrow_keys = 8;  // that are met together

// Three or four rows, a pair of them in a vector: each key has a sum of either pair.
template <class F>
FUSION_INLINE void add_narrow(NarrowFloats (&sum)[2][narrow_keys], const Words *q, const char *const *rows,
                              std::int64_t steps, LinePrefetch &ahead, const RepeatPrefetch &again, std::int64_t row) {
    for (std::int64_t line = 0; line < steps; line += 4) {
        ahead.fetch<narrow_keys>();
        again.fetch<narrow_keys>(row, line * 16);
        for (std::int64_t step = line; step < least(line + 4, steps); ++step) {
            const char *const query = reinterpret_cast<const char *>(q + step);
            const NarrowWords low = load<NarrowWords>(query), high = load<NarrowWords>(query + 32);
            FUSION_UNROLL for (int k = 0; k < narrow_keys; ++k) {
                const NarrowWords words = repeat_narrow(rows[k] + step * 16);
                sum[0][k] = F::dot(sum[0][k], low, words);
                sum[1][k] = F::dot(sum[1][k], high, words);
            }
        }
    }
}

template <class F>
__attribute__((noinline)) void score_four(const DecodeWork<F> &w, const RowBlock &b, const DecodeTile &t,
                                          const LinePrefetch &ahead) {
    const Words *q = w.query(b.row);
    const std::int64_t steps = w.sizes.key_words / 4, rope_steps = w.sizes.rope_words / 4;
    LinePrefetch next = ahead, none;
    for (std::int64_t from = 0; from < t.count; from += lanes) {
        const RepeatPrefetch again = repeat_for(w, b, t, ahead, from);
        widen_keys(w, b, t, from);
        for (std::int64_t key = from; key < from + lanes; key += narrow_keys) {
            NarrowFloats sum[2][narrow_keys] = {};
            add_narrow<F>(sum, q, w.s.key_rows + key, steps, next, again, key - from);
            if (rope_steps) add_narrow<F>(sum, q + steps, w.s.rope_rows + key, rope_steps, none, {}, 0);
            FUSION_UNROLL for (int pair = 0; pair < 2; ++pair) {
                FUSION_UNROLL for (int k = 0; k < narrow_keys; k += 4) {
                    const NarrowFloats x = add_quads(sum[pair] + k);
                    float *const to = w.s.scores + 2 * pair * decode_tile + key + k;
                    store(to, __builtin_shufflevector(x, x, 0, 1, 2, 3));
                    store(to + decode_tile, __builtin_shufflevector(x, x, 4, 5, 6, 7));
                }
            }
        }
    }
}
constexpr int wide_keys = 4;  // whose sums are gathered together

// Three or four rows of floats, each in a vector of its own: no word is repeated. F::together keys meet a row's words
// while they are in a register: of float32 one, which is read from end to end, with requests evenly between its lines,
// since in that order memory answers fastest; more where products take longer than that. Steps: 0 or how many.
template <class F, int Steps>
FUSION_INLINE void add_wide(Floats (&sum)[lanes], const Words *q, const char *const *rows, std::int64_t steps,
                            LinePrefetch &ahead, const RepeatPrefetch &again, std::int64_t row) {
    constexpr int together = F::together, met = F::widened ? 2 : 1;  // met: lines of a key for each line of the cache
    FUSION_UNROLL for (int k = 0; k < wide_keys; k += together) {
        const char *key[together], *next[together], *soon[together];
        FUSION_UNROLL for (int j = 0; j < together; ++j) {
            key[j] = rows[k + j];
            next[j] = ahead.any() ? ahead.take(steps / met) : key[j];
            soon[j] = again.rows ? again.rows[row + k + j] : next[j];
            __asm__("" : "+r"(key[j]), "+r"(q));  // gcc would compute all addresses before, and keep them in memory
        }
        const auto add = [&](std::int64_t step) __attribute__((always_inline)) {
            Words words[together];
            FUSION_UNROLL for (int j = 0; j < together; ++j) {
                if (step % met == 0) fetch_line(next[j], step / met * 64), fetch_line(soon[j], step / met * 64);
                words[j] = load<Words>(key[j] + step * 64);
            }
            FUSION_UNROLL for (int i = 0; i < 4; ++i) {
                const Words query = load<Words>(q + 4 * step + i);
                FUSION_UNROLL for (int j = 0; j < together; ++j) {
                    sum[4 * i + k + j] = F::dot(sum[4 * i + k + j], query, words[j]);
                }
            }
        };
        if constexpr (Steps > 0) {
            FUSION_UNROLL for (int step = 0; step < Steps; ++step) add(step);
        } else {
            for (std::int64_t step = 0; step < steps; ++step) add(step);
        }
    }
}

template <class F, int Steps>
__attribute__((noinline)) void score_wide(const DecodeWork<F> &w, const RowBlock &b, const DecodeTile &t,
                                          const LinePrefetch &ahead) {
    const Words *const q = w.query(b.row);
    const std::int64_t steps = w.sizes.key_words / lanes, rope_steps = w.sizes.rope_words / lanes;
    LinePrefetch next = ahead, none;
    for (std::int64_t from = 0; from < t.count; from += lanes) {
        const RepeatPrefetch again = repeat_for(w, b, t, ahead, from);
        widen_keys(w, b, t, from);
        for (std::int64_t key = from; key < from + lanes; key += wide_keys) {
            Floats sum[lanes] = {};  // [row][key]
            add_wide<F, Steps>(sum, q, w.s.key_rows + key, Steps ? Steps : steps, next, again, key - from);
            if (rope_steps) add_wide<F, 0>(sum, q + 4 * steps, w.s.rope_rows + key, rope_steps, none, {}, 0);
            store_quads(w.s.scores + key, decode_tile, sums_of(sum));
        }
    }
}
FUSION_INLINE void fetch_four(const char *const *rows, std::int64_t byte) {
    FUSION_UNROLL for (int i = 0; i < 4; ++i) fetch_line(rows[i], byte);
}

// 32 bytes of four keys.
template <class F>
FUSION_INLINE void add_pairs(Ints (&sum)[2][F::digits][4], const char *const (&row)[4], std::int64_t byte,
                             const Words *&digits) {
    constexpr int keys = F::digits == 2 ? 1 : 4;  // that meet a vector of digits while it is in a register
    FUSION_UNROLL for (int from = 0; from < 4; from += keys) {
        Words part[keys][F::parts];
        FUSION_UNROLL for (int k = 0; k < keys; ++k) F::split_repeated(row[from + k] + byte, part[k]);
        FUSION_UNROLL for (int at = 0; at < 2 * F::parts * F::digits; ++at) {
            const Words digit = load<Words>(digits + at);
            Ints *const to = sum[at / (F::parts * F::digits)][at % F::digits] + from;
            FUSION_UNROLL for (int k = 0; k < keys; ++k) {
                to[k] = F::added(to[k], part[k][at / F::digits % F::parts], digit);
            }
        }
    }
    digits += 2 * F::parts * F::digits;
}

// Three or four rows of integers, a pair of them in a vector. Sums of four keys are gathered among the products of the
// next four, for which the processor would otherwise wait.
template <class F, bool Fetches>
__attribute__((noinline)) void score_pairs(const DecodeWork<F> &w, const RowBlock &b, const DecodeTile &t,
                                           const LinePrefetch &ahead) {
    const std::int64_t bytes = w.sizes.key_words * 4, slot = w.slot(b.row), count = t.count;
    const char *const *rows = w.s.key_rows, *const *upcoming = rows + again_keys<F>;
    LinePrefetch next = ahead;
    const Words *const q = w.query(b.row);
    const Ints *const start = w.start(b.row);
    float *const scores = w.s.scores, *to_scores = scores;
    Floats scale, plus;
    FUSION_UNROLL for (int lane = 0; lane < lanes; ++lane) {
        scale[lane] = w.s.row_scale[slot + lane / 4], plus[lane] = w.s.row_offset[slot + lane / 4];
    }
    Ints sum[2][4] = {};  // of the four keys before
    for (std::int64_t key = 0; key < count; key += 4, rows += 4) {
        if (Fetches && key == count - again_keys<F>) upcoming = w.s.value_rows;
        const char *const row[4] = {rows[0], rows[1], rows[2], rows[3]};
        const Words *digits = q;
        Ints digit[2][F::digits][4];
        FUSION_UNROLL for (int at = 0; at < 2 * F::digits; ++at) {
            FUSION_UNROLL for (int k = 0; k < 4; ++k) digit[at / F::digits][at % F::digits][k] = load<Ints>(start + at);
        }
        if (Fetches) next.fetch<4>(), fetch_four(upcoming, 0);
        add_pairs<F>(digit, row, 0, digits);
        store_quads(to_scores, decode_tile, __builtin_convertvector(F::gather_pairs(sum), Floats) * scale + plus);
        to_scores = scores + key;
        std::int64_t byte = 32;
        for (; byte + 32 < bytes; byte += 64) {
            add_pairs<F>(digit, row, byte, digits);
            if (Fetches) next.fetch<4>(), fetch_four(upcoming, byte + 32);
            add_pairs<F>(digit, row, byte + 32, digits);
        }
        if (byte < bytes) add_pairs<F>(digit, row, byte, digits);
        FUSION_UNROLL for (int i = 0; i < 8; ++i) sum[i / 4][i % 4] = F::joined(&digit[i / 4][0][i % 4], 4);
        if (Fetches) upcoming += 4;
    }
    store_quads(to_scores, decode_tile, __builtin_convertvector(F::gather_pairs(sum), Floats) * scale + plus);
}
#endif

template <class F, int P>
__attribute__((noinline)) void score_rows(const DecodeWork<F> &w, const RowBlock &b, const DecodeTile &t,
                                          const LinePrefetch &ahead) {
    constexpr int rows = lanes / P;
    const Words *q = w.query(b.row);
    const std::int64_t steps = w.sizes.key_words / P, rope_steps = w.sizes.rope_words / P;
    LinePrefetch next = ahead, none;
    for (std::int64_t key = 0; key < t.count; key += lanes) {
        const RepeatPrefetch again = repeat_for(w, b, t, ahead, key);
        widen_keys(w, b, t, key);
        if constexpr (F::integer) {
            Ints sum[lanes];
            add_digits<F, P>(sum, q, w.start(b.row), w.s.key_rows + key, steps, next, again);
            gather_keys<P, rows>(sum);
            FUSION_UNROLL for (int i = 0; i < rows;
                               ++i) {  // from sums of whole numbers to the products that they stand for
                const std::int64_t slot = w.slot(b.row + i);
                const Floats scale = all(w.s.row_scale[slot]), plus = all(w.s.row_offset[slot]);
                store(w.s.scores + i * decode_tile + key, __builtin_convertvector(sum[i], Floats) * scale + plus);
            }
        } else {
            Floats sum[lanes] = {};
            add_products<F, P>(sum, q, w.s.key_rows + key, steps, next, again);
            if (rope_steps) add_products<F, P>(sum, q + steps, w.s.rope_rows + key, rope_steps, none, {});
            gather_keys<P, rows>(sum);
            FUSION_UNROLL for (int i = 0; i < rows; ++i) store(w.s.scores + i * decode_tile + key, sum[i]);
        }
    }
}

template <class F>
void score_block(const DecodeWork<F> &w, const RowBlock &b, const DecodeTile &t, const LinePrefetch &ahead) {
    switch (b.phases) {
        case 1: return score_rows<F, 1>(w, b, t, ahead);
        case 2: return score_rows<F, 2>(w, b, t, ahead);
#if defined(__AVX512F__)
        case 4:
            if constexpr (!F::integer) return score_four(w, b, t, ahead);
            else return score_rows<F, 4>(w, b, t, ahead);
#else
        case 4: return score_rows<F, 4>(w, b, t, ahead);
#endif
        case 8:
#if defined(__AVX512F__)
            if constexpr (F::integer) {
                if (b.vectors == 2)
                    return ahead.any() ? score_pairs<F, true>(w, b, t, ahead) : score_pairs<F, false>(w, b, t, ahead);
            }
#endif
            if constexpr (lanes >= 8) return score_rows<F, 8>(w, b, t, ahead);
            break;
        case 16:
#if defined(__AVX512F__)
            if constexpr (F::depth == 1 && !F::integer) {
                if (b.vectors == 4) {
                    return w.sizes.key_words == 8 * lanes   ? score_wide<F, 8>(w, b, t, ahead)
                           : w.sizes.key_words == 4 * lanes ? score_wide<F, 4>(w, b, t, ahead)
                                                            : score_wide<F, 0>(w, b, t, ahead);
                }
            }
#endif
            if constexpr (lanes >= 16) return score_rows<F, 16>(w, b, t, ahead);
            break;
    }
}

#if defined(__AVX512F__)
// Two blocks of rows, whose lanes are all rows, meet the keys together: a word of a key is repeated once for both. Sums
// have the order that score_rows() gives them. The second block's scores lie behind the first one's.
template <class F>
__attribute__((noinline)) void score_both(const DecodeWork<F> &w, const RowBlock &b, const DecodeTile &t,
                                          const LinePrefetch &ahead) {
    constexpr int half = lanes / 2;
    const Words *const first = w.query(b.row), *const second = w.query(b.row + lanes);
    const std::int64_t ends[2] = {w.sizes.key_words, w.sizes.key_words + w.sizes.rope_words};
    LinePrefetch next = ahead;
    for (std::int64_t key = 0; key < t.count; key += lanes) {
        RepeatPrefetch again = repeat_for(w, b, t, ahead, key);
        widen_keys(w, b, t, key);
        Floats sums[2][lanes];
        for (int from = 0; from < lanes; from += half) {
            Floats sum[2][half] = {};
            std::int64_t word = 0;
            for (int part = 0; part < 2; ++part) {
                const char *const *rows = (part ? w.s.rope_rows : w.s.key_rows) + key + from;
                const std::int64_t begin = word;
                for (; word < ends[part]; ++word) {
                    const Words one = load<Words>(first + word), other = load<Words>(second + word);
                    if (!part) follow<1, half>(next, word), again.follow<1>(word);
                    FUSION_UNROLL for (int i = 0; i < half; ++i) {
                        const Words repeated = repeat<1>(rows[i] + (word - begin) * 4);
                        sum[0][i] = F::dot(sum[0][i], one, repeated);
                        sum[1][i] = F::dot(sum[1][i], other, repeated);
                    }
                }
            }
            again = {};
            FUSION_UNROLL for (int i = 0; i < half; ++i) sums[0][from + i] = sum[0][i], sums[1][from + i] = sum[1][i];
        }
        for (int block = 0; block < 2; ++block) {
            Floats sum[lanes];
            FUSION_UNROLL for (int i = 0; i < lanes; ++i) sum[i] = sums[block][i];
            gather_keys<1, lanes>(sum);
            float *const to = w.s.scores + block * lanes * decode_tile + key;
            FUSION_UNROLL for (int i = 0; i < lanes; ++i) store(to + i * decode_tile, sum[i]);
        }
    }
}
#endif

// Scores of a block of rows; true: and of the next block, behind them.
template <class F>
bool score_blocks(const DecodeWork<F> &w, const RowBlock &b, const DecodeTile &t, const LinePrefetch &ahead) {
#if defined(__AVX512F__)
    if constexpr (!F::integer) {
        if (b.phases == 1 && b.row + lanes < w.rows() && w.block(b.row + lanes).phases == 1) {
            score_both(w, b, t, ahead);
            return true;
        }
    }
#endif
    score_block(w, b, t, ahead);
    return false;
}

}  // namespace decode
}  // namespace
}  // namespace fusion
