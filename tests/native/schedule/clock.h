// Time of the schedule test: kernels say how long they would have computed. With fibers (clock.cpp) that is added to
// the clock of the thread that computes, and the thread whose clock is least goes on; with real threads (sleeping.cpp)
// they sleep for as long.

#pragma once

#include <cstdint>
#include <functional>

namespace schedule {

// The calling thread has computed for so long.
void advance(double ns);

// What all runs since the program's start took, in ns.
double elapsed();

// What follows is for the fibers' plan/team.h.

// Calls body(thread) on `size` fibers; returns when all have ended. Ends the program with a message where each of those
// that are left waits for another.
void run_fibers(int size, const std::function<void(int)> &body);

// Others go on until `holds`, which each of them may change. It is asked until it says so once; then the calling fiber
// goes on, no earlier than what made it hold.
void wait(const std::function<bool()> &holds);

void barrier();

// The counter of the loop that the fibers share now: each of them opens loops in the same order.
std::int64_t &open_loop();

}  // namespace schedule
