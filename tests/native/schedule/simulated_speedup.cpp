// How many times faster the plans' schedules are on many threads, on a machine of any size: the plans are the real
// ones, their kernels only take time (kernels.cpp), and threads are fibers with a clock each (clock.cpp), or real
// threads that sleep (sleeping.cpp), by which the clock can be checked. Caches, links between cores and memory's rate
// are not there.
//
//   schedule_test [--json] [THREADS ...] [WORD ...]     words: all must be in "family case"
//
// A speed-up is the time of one thread divided by that of all.

#include "cases.h"
#include "clock.h"

#include <cstdio>
#include <string>
#include <vector>

namespace {

struct Options {
    bool json = false;
    std::vector<int> threads;
    std::vector<std::string> words;

    Options(int count, char **given) {
        for (int i = 1; i < count; ++i) {
            const std::string word = given[i];
            if (word == "--json") json = true;
            else if (word.find_first_not_of("0123456789") == std::string::npos) threads.push_back(std::stoi(word));
            else words.push_back(word);
        }
        if (threads.empty()) threads = {2, 8, 16, 64};
    }

    bool wants(const schedule::Case &one) const {
        for (const std::string &word : words) {
            if ((one.family + " " + one.name).find(word) == std::string::npos) return false;
        }
        return true;
    }
};

double time_of(const schedule::Run &run, int threads) {
    const double before = schedule::elapsed();
    run(threads);
    return schedule::elapsed() - before;
}

}  // namespace

int main(int count, char **given) {
    const Options options(count, given);
    const char *separator = "[\n";
    for (const schedule::Case &one : schedule::cases()) {
        if (!options.wants(one)) continue;
        const schedule::Run run = one.plan();
        const double alone = time_of(run, 1);
        if (!options.json) std::printf("%-12s %-34s %10.3f ms", one.family.c_str(), one.name.c_str(), alone / 1e6);
        for (const int threads : options.threads) {
            const double speed_up = alone / time_of(run, threads);
            if (options.json) {
                std::printf(
                    "%s {\"family\": \"%s\", \"case\": \"%s\", \"threads\": %d, \"ms\": %.4f, \"speedup\": %.3f}",
                    separator, one.family.c_str(), one.name.c_str(), threads, alone / 1e6, speed_up);
                separator = ",\n";
            } else {
                std::printf("  %d: %6.2f", threads, speed_up);
            }
        }
        if (!options.json) std::printf("\n");
        std::fflush(stdout);
    }
    if (options.json) std::printf("\n]\n");
}
