// csrc/plan/team.h for the schedule test, found before it on the include path: the threads of a plan are fibers of one
// thread, each with a clock of its own (clock.h). The plans are the real ones, unchanged.

#pragma once

#include "clock.h"
#include "plan/experience.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <type_traits>

namespace fusion {

struct Team {
    int thread, size;

    bool cancelled() const { return false; }

    bool barrier() const {
        schedule::barrier();
        return true;
    }

    template <class Index> Index take(std::atomic<Index> &next, std::type_identity_t<Index> count = 1) const {
        return next.fetch_add(count);
    }

    template <class Condition> bool wait_until(const Condition &holds) const {
        if (!holds()) schedule::wait([&] { return holds(); });
        return true;
    }

    template <class Index, class Body> void distribute(Index count, const Body &body, int at_a_time = 1) const {
        const auto all = static_cast<std::int64_t>(count);
        for (std::int64_t &next = schedule::open_loop(); next < all;) {
            const std::int64_t first = next, end = std::min(first + at_a_time, all);
            next = end;
            for (std::int64_t i = first; i < end; ++i) body(static_cast<Index>(i));
        }
        schedule::barrier();
    }
};

constexpr Alone never_alone = Alone::max();

template <class Work> void run_team(int size, Alone, const Work &work) {
    schedule::run_fibers(size, [&](int thread) { work(Team{thread, size}); });
}

}  // namespace fusion
