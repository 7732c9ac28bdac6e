// Decides from recent calls whether a team of threads pays off. On a busy machine a thread may start milliseconds after
// all work is done, and the caller waits for it, because a parallel region of OpenMP ends when all its threads have
// run; one thread is then faster for short calls.

#pragma once

#include <algorithm>
#include <chrono>

namespace fusion {

// Estimated time of one thread for the work of a team, in microseconds.
using Alone = std::chrono::duration<double, std::micro>;

// Gains and losses of recent teams of a calling thread.
class Experience {
public:
    using Time = std::chrono::steady_clock::time_point;

    static constexpr Alone longest_loss = std::chrono::milliseconds(10);  // longer calls always use a team

    bool recommends_team(Alone alone, Time now) const { return alone >= lost_ || now >= until_; }

    // Records a team: the time that its other threads computed, and the time that the caller waited for them.
    void learn(Alone saved, Alone waited, Time now) {
        credit_ = std::min(credit_ + saved - waited, most_credit);
        if (credit_ == most_credit) patience_ = least_patience;
        if (credit_ >= Alone(0)) return;
        lost_ = std::min(waited - saved, longest_loss);
        until_ = now + std::chrono::duration_cast<Time::duration>(lost_ * patience_);
        patience_ = std::min(2 * patience_, most_patience);
        credit_ = first_credit;
    }

private:
    // A single loss among many gains is forgiven; the second one shows a busy machine.
    static constexpr Alone most_credit = std::chrono::milliseconds(5);
    // Threads that slept start later than those that just worked, so the first team after a pause is forgiven this.
    static constexpr Alone first_credit = std::chrono::microseconds(200);
    // After a loss, no team is tried for this many times its duration: on a machine that stays busy, attempts then cost
    // one percent of the time.
    static constexpr int least_patience = 8, most_patience = 128;

    Alone credit_ = first_credit, lost_ = Alone(0);
    Time until_;
    int patience_ = least_patience;
};

}  // namespace fusion
