#include "clock.h"

#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <vector>

namespace schedule {
namespace {

constexpr std::size_t stack_bytes = std::size_t{256} << 10;

enum class State { ready, waits, at_barrier, ended };

struct Fiber {
    double clock = 0;
    State state = State::ready;
    const std::function<bool()> *holds = nullptr;  // of one that waits
    std::size_t loops = 0;                         // that it has opened
    std::unique_ptr<char[]> stack;
    ucontext_t context = {};
};

class Fibers {
public:
    Fibers(int size, const std::function<void(int)> &body, double start) : body_(body), fibers_(size) {
        for (Fiber &fiber : fibers_) {
            fiber.clock = start;
            fiber.stack.reset(new char[stack_bytes]);  // not set to 0: untouched pages cost nothing
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.get();
            fiber.context.uc_stack.ss_size = stack_bytes;
            fiber.context.uc_link = &scheduler_;
        }
    }

    // Returns when the last one ends. The least clock goes first, among equals the first thread: every run is the same.
    double run(void (*entry)()) {
        for (Fiber &fiber : fibers_) makecontext(&fiber.context, entry, 0);
        while (Fiber *const first = earliest()) {  // again whenever one has ended
            running_ = first;
            swapcontext(&scheduler_, &first->context);
        }
        double last = 0;
        for (const Fiber &fiber : fibers_) {
            last = std::max(last, fiber.clock);
            if (fiber.state == State::ended) continue;
            std::fprintf(stderr, "schedule: thread %td waits for ever\n", &fiber - fibers_.data());
            std::abort();
        }
        return last;
    }

    void start() {
        body_(static_cast<int>(running_ - fibers_.data()));
        running_->state = State::ended;
        wake();
    }

    void advance(double ns) {
        wake();
        running_->clock += ns;
        give_way();
    }

    void wait(const std::function<bool()> &holds) {
        running_->state = State::waits;
        running_->holds = &holds;
        ++waiting_;
        wake();
        give_way();
    }

    void barrier() {
        running_->state = State::at_barrier;
        wake();
        const auto there = [](const Fiber &fiber) { return fiber.state == State::at_barrier; };
        if (std::all_of(fibers_.begin(), fibers_.end(), there)) {
            for (Fiber &fiber : fibers_) {
                fiber.clock = running_->clock;  // who comes last has the latest
                fiber.state = State::ready;
            }
        }
        give_way();
    }

    std::int64_t &open_loop() {
        if (running_->loops == loops_.size()) loops_.push_back(0);
        return loops_[running_->loops++];
    }

private:
    Fiber *earliest() {
        Fiber *first = nullptr;
        for (Fiber &fiber : fibers_) {
            if (fiber.state == State::ready && (!first || fiber.clock < first->clock)) first = &fiber;
        }
        return first;
    }

    void give_way() {
        Fiber *const from = running_, *const to = earliest();
        if (to == from) return;
        if (to) running_ = to;
        swapcontext(&from->context, to ? &to->context : &scheduler_);
    }

    // Those go on whose condition holds by now: the running fiber has made it so since it last advanced.
    void wake() {
        if (!waiting_) return;
        for (Fiber &fiber : fibers_) {
            if (fiber.state != State::waits || !(*fiber.holds)()) continue;
            --waiting_;
            fiber.state = State::ready;
            fiber.clock = std::max(fiber.clock, running_->clock);
        }
    }

    const std::function<void(int)> &body_;
    std::vector<Fiber> fibers_;
    std::deque<std::int64_t> loops_;
    Fiber *running_ = nullptr;
    int waiting_ = 0;
    ucontext_t scheduler_ = {};
};

// Kernels and waits are plain functions that the plans call: they find the fibers only here. One run at a time.
Fibers *running = nullptr;
double clock_now = 0;

}  // namespace

void advance(double ns) {
    if (running) running->advance(ns);
    else clock_now += ns;
}

double elapsed() { return clock_now; }

void run_fibers(int size, const std::function<void(int)> &body) {
    Fibers fibers(size, body, clock_now);
    running = &fibers;
    clock_now = fibers.run([] { running->start(); });
    running = nullptr;
}

void wait(const std::function<bool()> &holds) { running->wait(holds); }
void barrier() { running->barrier(); }
std::int64_t &open_loop() { return running->open_loop(); }

}  // namespace schedule
