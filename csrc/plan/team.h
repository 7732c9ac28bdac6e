// The team of threads that computes a call: all plans create threads and wait for them through it.
//
// A run can be cancelled (Ctrl-C). Its threads then begin no more work and return; a wait returns false, because its
// condition may never become true. Results of a cancelled run are unspecified.

#pragma once

#include "plan/experience.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <limits>
#include <type_traits>

namespace fusion {

// Returns true if the run is to be cancelled. The calling thread calls it a few dozen times a second during its work.
// There is one for the process, like signals; it is set before the first run (bind/module.cpp).
inline bool (*asks_to_stop)() = nullptr;

// Thrown by run_team() when the run was cancelled.
struct Interrupted : std::exception {
    const char *what() const noexcept override { return "fusion_attention: native core: the call was interrupted"; }
};

// Pauses of a thread between two checks of the condition that it waits for: first short ones, then it gives up the
// core, because there may be more threads than cores, or a CPU quota that waiting threads would use up.
class Backoff {
public:
    Backoff() = default;
    ~Backoff();
    Backoff(const Backoff &) = delete;
    Backoff &operator=(const Backoff &) = delete;

    void pause();

private:
    std::chrono::steady_clock::time_point begun_;
    Alone computed_ = never_computed;  // CPU time of this thread at the start of a long wait

    static constexpr Alone never_computed = Alone(-1);
};

// The interface of a team for one of its threads. Every thread calls barrier() and distribute() in the same order.
struct Team {
    struct Run;  // shared state

    int thread, size;
    Run &run;

    // True if the run is cancelled; checked before long work.
    bool cancelled() const;

    // Takes `count` work items and returns the first; beyond all items once the run is cancelled. An item that is taken
    // must be computed, or abandoned if a wait returns false, because other threads may wait for it.
    template <class Index> Index take(std::atomic<Index> &next, std::type_identity_t<Index> count = 1) const {
        return cancelled() ? std::numeric_limits<Index>::max() : next.fetch_add(count, std::memory_order_relaxed);
    }

    // Waits until holds() is true; returns false if the run is cancelled.
    template <class Condition> bool wait_until(const Condition &holds) const {
        for (Backoff backoff; !holds(); backoff.pause()) {
            if (cancelled()) return false;
        }
        return true;
    }

    // Waits for all threads of the team; returns false if the run is cancelled.
    bool barrier() const;

    // Calls body(i) for every i < count, each on one thread, in ascending order; returns when all are done.
    template <class Index, class Body> void distribute(Index count, const Body &body, int at_a_time = 1) const {
        const auto all = static_cast<std::int64_t>(count);
        for (std::int64_t i; (i = next(at_a_time)) < all;) {
            for (const std::int64_t end = std::min(i + at_a_time, all); i < end; ++i) body(static_cast<Index>(i));
        }
        barrier();
    }

private:
    std::int64_t next(int count) const;  // next index of distribute()
};

constexpr Alone never_alone = Alone::max();

// Calls work(team) on `size` threads, or as many as the system allows, including the calling one; on the calling thread
// only if recent teams started so late that they cost more time than they saved. work must not throw.
void run_team(int size, Alone alone, void (*work)(const void *context, const Team &), const void *context);

template <class Work> void run_team(int size, Alone alone, const Work &work) {
    run_team(
        size, alone, [](const void *context, const Team &team) { (*static_cast<const Work *>(context))(team); }, &work);
}

}  // namespace fusion
