// The clock of the schedule test with real threads, which sleep while they would compute: what clock.cpp says is
// checked by it. Built with csrc/plan/team.h. Many more threads than cores wake late, so it tells less the more threads
// there are.

#include "clock.h"

#include <chrono>
#include <thread>

namespace schedule {
namespace {

constexpr double slower = 10;  // tiles then sleep for milliseconds, beside which waking up takes little

double now() {
    const auto since = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<double>(std::chrono::nanoseconds(since).count());
}

}  // namespace

void advance(double ns) {
    thread_local double overslept = 0;
    const double before = now(), wanted = ns * slower - overslept;
    if (wanted > 0) std::this_thread::sleep_for(std::chrono::nanoseconds(static_cast<std::int64_t>(wanted)));
    overslept = now() - before - wanted;
}

double elapsed() { return now() / slower; }

}  // namespace schedule
