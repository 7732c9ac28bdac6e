// A run of pooling (data/pool.h) or of its gradients. Windows are divided by their number only, and every result
// belongs to one window, or is a sum over windows in a fixed order, so results do not depend on the number of threads.
//
// Compiled for the baseline instruction set.

#pragma once

#include "data/pool.h"

#include <vector>

namespace fusion {

struct PoolCall {
    const PoolKernels &kernels;
    PoolProblem problem;
    std::vector<PoolSequence> sequences;

    // Throws std::invalid_argument if sizes do not fit together.
    void check() const;

    // Write out, or dkv, dgate and dbias; throw std::bad_alloc before anything is written.
    void forward(const PoolOperands &operands, int threads) const;
    void backward(PoolOperands operands, int threads) const;
};

}  // namespace fusion
