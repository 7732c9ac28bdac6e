// Whether a team is worth its price. Beside busy cores a thread may come milliseconds after all work is done, and its
// caller waits for it: a region of OpenMP ends when all its threads have been there. Of short calls one thread then
// makes the most.

#pragma once

#include <algorithm>
#include <chrono>

namespace fusion {

// How long one thread would take for what a team is to do, about.
using Alone = std::chrono::duration<double, std::micro>;

// What teams brought their caller lately.
class Experience {
public:
    using Time = std::chrono::steady_clock::time_point;

    static constexpr Alone longest_loss = std::chrono::milliseconds(10);  // longer calls always have a team

    bool recommends_team(Alone alone, Time now) const { return alone >= lost_ || now >= until_; }

    // Of a team: what its other threads computed, and how long the caller waited for them to begin and to end.
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
    // One loss among many gains says little of the next call; of a busy machine the second one says enough.
    static constexpr Alone most_credit = std::chrono::milliseconds(5);
    // Threads that have slept come later than those that just worked: the first team after a pause tells too little.
    static constexpr Alone first_credit = std::chrono::microseconds(200);
    // So many times as long as it lost, no team is tried: where cores stay busy, trying costs a hundredth of the time.
    static constexpr int least_patience = 8, most_patience = 128;

    Alone credit_ = first_credit, lost_ = Alone(0);
    Time until_;
    int patience_ = least_patience;
};

}  // namespace fusion
