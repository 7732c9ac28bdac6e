#include "plan/team.h"

#include "plan/thread_pool.h"
#include "system.h"
#include "amx_permission.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>

#if defined(__SSE__)
#include <immintrin.h>
#endif

namespace fusion {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;

// Interval at which the calling thread checks for interruption; with the longest items of work a run stops in 50 ms.
constexpr auto between_questions = milliseconds(20);
// Durations of waiting by spinning, then by yielding, and of the longest sleep. With more threads than cores, a
// spinning thread would occupy the core of the thread that it waits for.
constexpr auto spinning = microseconds(2), yielding = microseconds(1000), longest_nap = microseconds(2000);

void relax() {
#if defined(__SSE__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");  // as long as x86's pause; `yield` does nothing on most cores
#endif
}

// Per calling thread, because OpenMP keeps the threads of a team for one calling thread.
thread_local Experience experience;

// Time that this thread spent waiting inside its work: wall-clock time, and CPU time of the wait loops.
struct Waits {
    Alone passed = Alone(0), computed = Alone(0);
};
thread_local Waits waits;

}  // namespace

// The state that the threads of a team share. Counters that all threads write are in separate cache lines.
struct Team::Run {
    alignas(64) std::atomic<std::int64_t> next = 0;  // next index of distribute(); every barrier resets it
    alignas(64) std::atomic<int> arrived = 0;        // threads at the next barrier
    std::atomic<int> left = 0;                       // finished threads, without the calling one
    std::atomic<std::int64_t> saved = 0;             // nanoseconds that those computed
    alignas(64) std::atomic<unsigned> barriers = 0;  // number of passed barriers
    std::atomic<bool> cancelled = false;
    Clock::time_point checked;  // last check for interruption
};

void Backoff::pause() {
    const Clock::time_point now = Clock::now();
    if (begun_ == Clock::time_point{}) begun_ = now;
    const auto waited = now - begun_;
    if (waited < spinning) {
        for (int i = 0; i < 8; ++i) relax();
        return;
    }
    if (computed_ == never_computed) computed_ = system::thread_time();
    if (waited < yielding) {
        std::this_thread::yield();
    } else {  // a small fraction of the time waited so far
        std::this_thread::sleep_for(std::min<Clock::duration>(waited / 16, longest_nap));
    }
}

Backoff::~Backoff() {
    if (computed_ == never_computed) return;
    waits.passed += Clock::now() - begun_;
    waits.computed += system::thread_time() - computed_;
}

bool Team::cancelled() const {
    if (thread == 0 && asks_to_stop && !run.cancelled.load(std::memory_order_relaxed)) {
        const Clock::time_point now = Clock::now();
        if (run.checked == Clock::time_point{}) run.checked = now;
        if (now - run.checked >= between_questions) {
            const KeptTiles tiles;  // a kernel is waiting, and signal handlers may use tiles
            if (asks_to_stop()) run.cancelled.store(true, std::memory_order_relaxed);
            run.checked = Clock::now();
        }
    }
    return run.cancelled.load(std::memory_order_relaxed);
}

// The last thread to arrive opens the barrier. No thread arrives after the run is cancelled, so it never opens early.
bool Team::barrier() const {
    if (cancelled()) return false;
    if (size == 1) {
        run.next.store(0, std::memory_order_relaxed);
        return true;
    }
    const unsigned passed = run.barriers.load(std::memory_order_relaxed);
    if (run.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 < size) {
        return wait_until([&] { return run.barriers.load(std::memory_order_acquire) != passed; });
    }
    run.arrived.store(0, std::memory_order_relaxed);
    run.next.store(0, std::memory_order_relaxed);
    run.barriers.store(passed + 1, std::memory_order_release);
    return true;
}

std::int64_t Team::next(int count) const { return take(run.next, count); }

// True if FUSION_ATTENTION_TEAM=always: measurements then always use teams, whatever recent calls showed.
static bool always_teams() {
    const char *const setting = std::getenv("FUSION_ATTENTION_TEAM");
    if (!setting || !*setting) return false;
    if (std::string_view(setting) == "always") return true;
    throw std::invalid_argument("FUSION_ATTENTION_TEAM: expected 'always' or nothing, got '" + std::string(setting) +
                                "'");
}

void run_team(int size, Alone alone, void (*work)(const void *context, const Team &), const void *context) {
    static const bool always = always_teams();
    const bool little = !always && alone < Experience::longest_loss;
    const Clock::time_point begun = Clock::now();
    if (little && !experience.recommends_team(alone, begun)) size = 1;
    Team::Run run;
    Alone work_time;  // CPU time of this thread's work, without waits
    on_threads(size, [&](int thread, int members) {
        const Team team{thread, members, run};
        if (thread == 0) {
            const Clock::time_point at = Clock::now();
            const Alone before = waits.passed;
            work(context, team);
            work_time = Clock::now() - at - (waits.passed - before);
            // The calling thread waits here, where it can be interrupted, and not at the end of the parallel region.
            team.wait_until([&] { return run.left.load(std::memory_order_acquire) == members - 1; });
        } else {
            const Alone before = little ? Alone(system::thread_time() - waits.computed) : Alone(0);
            work(context, team);
            if (little) {
                const Alone saved = system::thread_time() - waits.computed - before;
                run.saved.fetch_add(std::chrono::duration_cast<std::chrono::nanoseconds>(saved).count(),
                                    std::memory_order_relaxed);
            }
            run.left.fetch_add(1, std::memory_order_release);
        }
    });
    if (run.cancelled.load(std::memory_order_relaxed)) throw Interrupted();
    if (!little || size == 1) return;
    const Clock::time_point end = Clock::now();
    experience.learn(std::chrono::nanoseconds(run.saved), end - begun - work_time, end);
}

}  // namespace fusion
