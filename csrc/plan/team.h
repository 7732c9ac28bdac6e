// The threads that compute a call together: the one place of the plans that asks for threads, and that waits.
//
// A run can be given up (Ctrl-C). Its threads then begin nothing more and leave; what they wait for may never come, so
// a wait says whether it did. Results of such a run are unspecified.

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

// Asked by the thread that called, a few dozen times a second, in the middle of its work: whether to give the run up.
// One for the process, as its signals are; set before the first run (bind/module.cpp).
inline bool (*asks_to_stop)() = nullptr;

// Thrown by run_team() when the run was given up.
struct Interrupted : std::exception {
    const char *what() const noexcept override { return "fusion_attention: native core: the call was interrupted"; }
};

// How a thread passes the time between two looks at what it waits for. What comes soon is seen soon; after that others
// may have the core, since there may be more threads than cores, or a quota that idle threads use up.
class Backoff {
public:
    Backoff() = default;
    ~Backoff();
    Backoff(const Backoff &) = delete;
    Backoff &operator=(const Backoff &) = delete;

    void pause();

private:
    std::chrono::steady_clock::time_point begun_;
    Alone computed_ = never_computed;  // by this thread, when it began to wait for long

    static constexpr Alone never_computed = Alone(-1);
};

// What each thread of a team knows of it. Every thread calls barrier() and share(), in the same order.
struct Team {
    struct Run;  // what the threads share

    int thread, size;
    Run &run;

    // Whether the run is given up. Asked before anything is begun that takes long.
    bool cancelled() const;

    // The number of the next work item; beyond all numbers once the run is cancelled. What is taken
    // is to be done, or given up where a wait says so: others may wait for it.
    template <class Index> Index take(std::atomic<Index> &next, std::type_identity_t<Index> count = 1) const {
        return cancelled() ? std::numeric_limits<Index>::max() : next.fetch_add(count, std::memory_order_relaxed);
    }

    // Waits until holds(); false: the run is cancelled, and the condition may never hold.
    template <class Condition> bool wait_until(const Condition &holds) const {
        for (Backoff backoff; !holds(); backoff.pause()) {
            if (cancelled()) return false;
        }
        return true;
    }

    // Waits for all threads of the team; false as wait_until().
    bool barrier() const;

    // Calls body(i) for every i < count, each on one thread, in ascending order; returns when all are done.
    template <class Index, class Body> void share(Index count, const Body &body, int at_a_time = 1) const {
        const auto all = static_cast<std::int64_t>(count);
        for (std::int64_t i; (i = next(at_a_time)) < all;) {
            for (const std::int64_t end = std::min(i + at_a_time, all); i < end; ++i) body(static_cast<Index>(i));
        }
        barrier();
    }

private:
    std::int64_t next(int count) const;  // of a share
};

constexpr Alone never_alone = Alone::max();

// Calls work(team) on `size` threads, or as many as there may be, this one among them; on this one alone where threads
// came so late to teams before that they cost more time than they saved. work throws
// nothing.
void run_team(int size, Alone alone, void (*work)(const void *context, const Team &), const void *context);

template <class Work> void run_team(int size, Alone alone, const Work &work) {
    run_team(
        size, alone, [](const void *context, const Team &team) { (*static_cast<const Work *>(context))(team); }, &work);
}

}  // namespace fusion
