#include "plan/thread_pool.h"

#include "system.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace fusion {
namespace {

// True if the process is a child of fork(), in which the threads of the pools below do not exist.
std::atomic<bool> forked = false;
[[maybe_unused]] const bool watches_forks =
    (system::after_fork([] { forked.store(true, std::memory_order_relaxed); }), true);

using Work = void (*)(const void *context, int thread, int members);

// The threads of one calling thread, which end after it, as in OpenMP. Nothing waits for their end: Windows ends
// thread-local objects under a lock that an ending thread needs, or when it has already ended all other threads.
class Pool : public std::enable_shared_from_this<Pool> {
public:
    void end() {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            ends_ = true;
        }
        changed_.notify_all();
    }

    void run(int size, Work work, const void *context) {
        if (busy_) return work(context, 0, 1);  // a nested call
        busy_ = true;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            try {
                for (; threads_ < size - 1; ++threads_) {
                    std::thread([self = shared_from_this(), number = threads_ + 1] { self->serve(number); }).detach();
                }
            } catch (const std::system_error &) {  // the system allows no more of them
                size = threads_ + 1;
            }
            work_ = work, context_ = context, members_ = size, working_ = size - 1;
            ++round_;
        }
        changed_.notify_all();
        work(context, 0, size);
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return working_ == 0; });
        busy_ = false;
    }

private:
    void serve(int number) {
        std::unique_lock<std::mutex> lock(mutex_);
        for (std::int64_t served = round_ - 1;;) {
            changed_.wait(lock, [&] { return ends_ || round_ != served; });
            if (ends_) return;
            served = round_;
            if (number >= members_) continue;
            lock.unlock();
            work_(context_, number, members_);
            lock.lock();
            if (--working_ == 0) changed_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    Work work_ = nullptr;
    const void *context_ = nullptr;
    int threads_ = 0, members_ = 0, working_ = 0;
    std::int64_t round_ = 0;
    bool ends_ = false, busy_ = false;
};

void in_pool(int size, Work work, const void *context) {
    struct Owner {
        const std::shared_ptr<Pool> pool = std::make_shared<Pool>();
        ~Owner() {
            if (!forked) pool->end();  // in a child of fork() a thread that does not exist may hold the lock
        }
    };
    static thread_local const Owner owner;
    owner.pool->run(size, work, context);
}

// The OpenMP runtime that torch has loaded, under any file name: a second runtime would create a second pool of
// threads. So the module is linked to no runtime and looks for one when it first needs threads, after torch has been
// imported.
struct OpenMP {
    void (*parallel)(void (*work)(void *), void *context, unsigned threads, unsigned flags) = nullptr;
    int (*max_threads)() = nullptr, (*members)() = nullptr, (*thread)() = nullptr;
    bool exists = false;

    OpenMP() {
#if !defined(FUSION_STD_THREADS)
        // Entry points of libgomp that libomp and libiomp5 have too.
        std::vector<void *> entries(4);
        exists = system::find_openmp(
            {"GOMP_parallel", "omp_get_max_threads", "omp_get_num_threads", "omp_get_thread_num"}, entries);
        if (!exists) return;
        parallel = reinterpret_cast<decltype(parallel)>(entries[0]);
        max_threads = reinterpret_cast<decltype(max_threads)>(entries[1]);
        members = reinterpret_cast<decltype(members)>(entries[2]);
        thread = reinterpret_cast<decltype(thread)>(entries[3]);
#endif
    }
};

// Runs work on `size` threads. A parallel region whose size differs from that of the last one creates or ends threads,
// and torch's regions have omp_get_max_threads() threads; so all regions here have this size too, and surplus threads
// return at once.
void in_region(const OpenMP &runtime, int size, Work work, const void *context) {
    struct Region {
        const OpenMP &runtime;
        int size;
        Work work;
        const void *context;
    } region{runtime, size, work, context};
    region.runtime.parallel(
        [](void *argument) noexcept {
            const Region &r = *static_cast<const Region *>(argument);
            const int members = std::min(r.size, r.runtime.members()), thread = r.runtime.thread();
            if (thread < members) r.work(r.context, thread, members);
        },
        &region, static_cast<unsigned>(std::max(size, runtime.max_threads())), 0);
}

}  // namespace

bool is_forked() { return forked.load(std::memory_order_relaxed); }

void on_threads(int size, Work work, const void *context) {
    if (size == 1 || is_forked()) return work(context, 0, 1);
    static const OpenMP runtime;
    if (runtime.exists) in_region(runtime, size, work, context);
    else in_pool(size, work, context);
}

}  // namespace fusion
