// The threads that compute a call together: the one place of the plans that asks for threads, and that waits.

#pragma once

#include "plan/denormals.h"

#include <omp.h>

#include <thread>

namespace fusion {

// What each thread of a team knows of it. Every thread calls barrier() and share(), in the same order.
struct Team {
    int thread, size;

    void barrier() const {
        if (size == 1) return;
#pragma omp barrier
    }

    // Calls body(i) for every i < count, each on one thread, in ascending order; returns when all are done.
    template <class Index, class Body> void share(Index count, const Body &body, int at_a_time = 1) const {
        if (size == 1) {
            for (Index i = 0; i < count; ++i) body(i);
            return;
        }
#pragma omp for schedule(dynamic, at_a_time)
        for (Index i = 0; i < count; ++i) body(i);
    }
};

// Calls work(team) on `size` threads, or as many as there may be, this one among them. Denormals count as zero
// meanwhile.
template <class Work> void run_team(int size, const Work &work) {
    if (size == 1) {
        const FlushDenormals flushed;
        work(Team{0, 1});
        return;
    }
#pragma omp parallel num_threads(size)
    {
        const FlushDenormals flushed;
        work(Team{omp_get_thread_num(), size});
    }
}

// Asks until holds(), `spins` times in a row; then lets others run in between, since cores may be fewer than threads.
template <class Condition> void wait_until(const Condition &holds, int spins = 64) {
    while (!holds()) {
        if (spins > 0) --spins;
        else std::this_thread::yield();
    }
}

}  // namespace fusion
