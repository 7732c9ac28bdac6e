// What core_test.cpp does not run: teams alone, runs that are given up, memory that is missing, and the plans of
// selections, whose bits any number of threads leaves as they are. Numbers are judged by the Python suite.

#include "core_test.h"
#include "plan/arena.h"
#include "plan/team.h"
#include "selected.h"

namespace check {
namespace {

constexpr int sizes[] = {1, 2, 3, 5, 8, 16, 64};

void expect(Report &report, bool holds, const char *what, int threads) {
    if (!holds) report.fail("team of " + std::to_string(threads) + ": " + what);
}

// Three rounds of shares, barriers and waits; every thread sees what the others did before.
void meet(Report &report, int threads) {
    constexpr Long count = 1000;
    std::vector<int> done(count);
    std::atomic<Long> next = 0, sum = 0, chain = 0;
    std::atomic<int> wrong = 0;
    fusion::run_team(threads, [&](const fusion::Team &team) {
        for (int round = 1; round <= 3; ++round) {
            team.share(count, [&](Long i) { ++done[i]; }, round);
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

// Asked to stop, a team ends although pieces are left, others wait for what never comes, or stand at a barrier.
void give_up(Report &report, int threads) {
    for (int where = 0; where < 3; ++where) {
        static std::atomic<bool> asked;
        asked = false;
        fusion::asks_to_stop = [] { return asked.exchange(true) || true; };
        bool interrupted = false;
        std::atomic<bool> never = false;
        try {
            fusion::run_team(threads, [&](const fusion::Team &team) {
                while (where == 0 && !team.cancelled()) team.share(1000, [](int) {});
                if (where == 1) team.wait_until([&] { return never.load(); });
                if (where == 2 && team.thread != team.size - 1) team.barrier();
                while (where == 2 && !team.cancelled()) fusion::Backoff().pause();
            });
        } catch (const fusion::Interrupted &) {
            interrupted = true;
        }
        fusion::asks_to_stop = nullptr;
        expect(report, interrupted && asked, "did not give up", threads);
    }
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
    expect(report, refused && threads == 1, "memory for nobody", threads);
    const auto address = [](std::size_t bytes) {
        return reinterpret_cast<std::uintptr_t>(fusion::Lease(bytes).data());
    };
    const std::uintptr_t kept = address(large);
    expect(report, address(1) == kept && address(large) == kept, "a buffer is not kept", 1);
    for (int i = 0; i < 70; ++i) address(1);
    expect(report, address(1) != kept, "a buffer that nobody needs is kept", 1);
}

void same_bits(Report &report, const fusion::Built &built) {
    for (Dtype dtype : {Dtype::float32, Dtype::bfloat16}) {
        for (const Selected kind : {Selected::forward, Selected::backward, Selected::indexer,
                                    Selected::indexed_gradient, Selected::list_loss, Selected::tile_loss}) {
            SelectedCall call(dtype, kind);
            const std::vector<unsigned char> want = call.run(*built.sparse, 1);
            for (const int threads : sizes) {
                if (call.run(*built.sparse, threads) == want) continue;
                report.fail(std::string(built.name) + ", selection " + std::to_string(static_cast<int>(kind)) +
                            ", dtype " + std::to_string(static_cast<int>(dtype)) + ": other bits with " +
                            std::to_string(threads) + " threads");
            }
        }
    }
}

}  // namespace

void test_teams(Report &report) {
    lease(report);
    for (const int threads : sizes) {
        meet(report, threads);
        give_up(report, threads);
    }
    for (const fusion::Built &built : with_own_sparse_part(report)) same_bits(report, built);
}

}  // namespace check
