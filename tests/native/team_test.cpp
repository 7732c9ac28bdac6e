// What core_test.cpp does not run: teams alone, runs that are given up, memory that is missing, and the plans of
// selections, whose bits any number of threads leaves as they are. Numbers are judged by the Python suite.

#include "core_test.h"
#include "plan/arena.h"
#include "plan/team.h"
#include "selected.h"
#include "system.h"

#include <chrono>
#include <thread>

namespace check {
namespace {

constexpr int sizes[] = {1, 2, 3, 5, 8, 16, 64};

void expect(Report &report, bool holds, const char *what, int threads) {
    if (!holds) report.fail("team of " + std::to_string(threads) + ": " + what);
}

// Three rounds of loops, barriers and waits; every thread sees what the others did before.
void meet(Report &report, int threads) {
    constexpr Long count = 1000;
    std::vector<int> done(count);
    std::atomic<Long> next = 0, sum = 0, chain = 0;
    std::atomic<int> wrong = 0;
    fusion::run_team(threads, fusion::never_alone, [&](const fusion::Team &team) {
        for (int round = 1; round <= 3; ++round) {
            team.distribute(count, [&](Long i) { ++done[i]; }, round);
            for (Long i = team.thread; i < count; i += team.size) wrong += done[i] != round;
            wrong += !team.barrier();
        }
        for (Long i; (i = team.take(next)) < count; sum += i) {  // each waits for the one before it
            wrong += !team.wait_until([&] { return chain.load(std::memory_order_acquire) == i; });
            done[0] = static_cast<int>(i);
            chain.store(i + 1, std::memory_order_release);
        }
    });
    expect(report, !wrong && sum == count * (count - 1) / 2 && done[0] == count - 1, "shares, barriers or waits",
           threads);
}

// Asked to stop, a team ends although items are left, others wait for what never comes, or stand at a barrier.
void give_up(Report &report, int threads) {
    for (int where = 0; where < 3; ++where) {
        static std::atomic<bool> called;
        called = false;
        fusion::asks_to_stop = [] { return called.exchange(true) || true; };
        bool interrupted = false;
        std::atomic<bool> never = false;
        try {
            fusion::run_team(threads, fusion::never_alone, [&](const fusion::Team &team) {
                while (where == 0 && !team.cancelled()) team.distribute(1000, [](int) {});
                if (where == 1) team.wait_until([&] { return never.load(); });
                if (where == 2 && team.thread != team.size - 1) team.barrier();
                while (where == 2 && !team.cancelled()) fusion::Backoff().pause();
            });
        } catch (const fusion::Interrupted &) {
            interrupted = true;
        }
        fusion::asks_to_stop = nullptr;
        expect(report, interrupted && called, "did not give up", threads);
    }
}

double computed() {  // by this thread, in milliseconds
    return std::chrono::duration<double, std::milli>(fusion::system::thread_time()).count();
}

enum class Passing { asleep, computing, waiting };

// Whether a call has a team, whose other thread passes some time.
bool has_team(fusion::Alone alone, int milliseconds, Passing how) {
    bool together = false;
    fusion::run_team(2, alone, [&](const fusion::Team &team) {
        const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds);
        if (team.thread == 0) {
            together = team.size == 2;
        } else if (how == Passing::computing) {
            for (const double until = computed() + milliseconds; computed() < until;) {
            }
        } else if (how == Passing::waiting) {
            team.wait_until([&] { return std::chrono::steady_clock::now() >= end; });
        } else {
            std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
        }
    });
    return together;
}

// What teams cost decides about the next ones.
void weigh(Report &report) {
    using std::chrono::microseconds, std::chrono::milliseconds;
    const auto lose = [](fusion::Experience &by, int times, milliseconds at) {
        while (times-- > 0) by.learn(microseconds(0), milliseconds(4), fusion::Experience::Time(at));
    };
    const auto team = [](const fusion::Experience &by, int small, milliseconds at) {
        return by.recommends_team(microseconds(small), fusion::Experience::Time(at));
    };
    fusion::Experience busy;
    expect(report, team(busy, 1, milliseconds(0)), "the first call has no team", 2);
    lose(busy, 1, milliseconds(0));
    expect(report, !team(busy, 3900, milliseconds(31)) && team(busy, 1, milliseconds(32)), "a first loss", 2);
    expect(report, team(busy, 4000, milliseconds(1)), "a call that saves more than was lost has no team", 2);
    lose(busy, 1, milliseconds(32));
    expect(report, !team(busy, 1, milliseconds(95)) && team(busy, 1, milliseconds(96)), "a second loss", 2);
    for (int at = 100; at < 20000; at += 1000) lose(busy, 1, milliseconds(at));
    lose(busy, 1, milliseconds(20000));
    expect(report, !team(busy, 1, milliseconds(20511)) && team(busy, 1, milliseconds(20512)), "the longest pause", 2);
    fusion::Experience quiet = busy;
    for (int i = 0; i < 200; ++i) quiet.learn(microseconds(90), microseconds(50), {});
    lose(quiet, 1, milliseconds(30000));
    expect(report, team(quiet, 1, milliseconds(30000)), "one loss among many gains", 2);
    lose(quiet, 1, milliseconds(30000));
    expect(report, !team(quiet, 1, milliseconds(30031)) && team(quiet, 1, milliseconds(30032)), "patience stays", 2);
}

// Whether the second call of a thread has a team, after a first whose other thread passed some time.
bool second_has_team(fusion::Alone alone, int milliseconds, Passing how) {
    bool together = false;
    std::thread([&] {
        has_team(alone, milliseconds, how);
        together = has_team(alone, 0, Passing::asleep);
    }).join();
    return together;
}

// A thread that came late and computed nothing is done without, one that computes as long as it is waited for is not.
// Other work may make any call late: one of many has to show it.
void come_late(Report &report) {
    constexpr auto alone = std::chrono::microseconds(1600);
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    const auto ever = [&](Passing how, bool team) {
        bool reached = false;
        while (!reached && std::chrono::steady_clock::now() < end) reached = second_has_team(alone, 2, how) == team;
        return reached;
    };
#if !defined(_WIN32)  // whose thread_time() goes on while a thread sleeps
    expect(report, ever(Passing::asleep, false), "a thread that came late is waited for again", 2);
#endif
    expect(report, ever(Passing::computing, true), "a thread that computes is not waited for", 2);
    expect(report, second_has_team(fusion::never_alone, 2, Passing::asleep), "much work has no team", 2);
}

// A thread that waits inside its work saves nothing, though it looks busy to the system. Of many calls more than half
// have to show it.
void wait_inside(Report &report) {
    constexpr int calls = 21;
    int teams = 0;
    for (int i = 0; i < calls; ++i) teams += second_has_team(std::chrono::microseconds(300), 1, Passing::waiting);
    expect(report, 2 * teams < calls, "a thread that waited counts as one that computed", 2);
}

void lease(Report &report) {
    constexpr std::size_t large = std::size_t{1} << 24, beyond = std::size_t{1} << 60;
    int threads = 16;
    {
        const fusion::Lease some = fusion::lease_for(threads, [&](int n) { return n > 3 ? beyond : large; });
    }
    expect(report, threads == 2, "memory for so many", threads);
    bool refused = false;
    try {
        const fusion::Lease none = fusion::lease_for(threads, [&](int) { return beyond; });
    } catch (const std::bad_alloc &) {
        refused = true;
    }
    expect(report, refused && threads == 1, "memory for not even one thread", threads);
    const auto address = [](std::size_t bytes) {
        return reinterpret_cast<std::uintptr_t>(fusion::Lease(bytes).data());
    };
    const std::uintptr_t retained = address(large);
    expect(report, address(1) == retained && address(large) == retained, "a buffer is not kept", 1);
    for (int i = 0; i < 70; ++i) address(1);
    expect(report, address(1) != retained, "an unneeded buffer is kept", 1);
}

void same_bits(Report &report, const fusion::Built &built, Dtype dtype) {
    for (const Selected kind : {Selected::forward, Selected::backward, Selected::indexer, Selected::indexed_gradient,
                                Selected::list_loss, Selected::tile_loss}) {
        SelectedCall call(dtype, kind);
        const std::vector<unsigned char> want = call.run(built.variant->sparse, 1);
        for (const int threads : sizes) {
            if (call.run(built.variant->sparse, threads) == want) continue;
            report.fail(std::string(built.name) + ", selection " + std::to_string(static_cast<int>(kind)) + ", dtype " +
                        std::to_string(static_cast<int>(dtype)) + ": other bits with " + std::to_string(threads) +
                        " threads");
        }
    }
}

}  // namespace

void test_teams(Report &report) {
    lease(report);
    weigh(report);
    come_late(report);
    wait_inside(report);
    for (const int threads : sizes) {
        meet(report, threads);
        give_up(report, threads);
    }
    for (Dtype dtype : {Dtype::float32, Dtype::bfloat16}) {
        for (const fusion::Built &built : with_own_sparse_part(report, dtype)) same_bits(report, built, dtype);
    }
}

}  // namespace check
