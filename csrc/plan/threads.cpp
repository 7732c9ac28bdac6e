#include "plan/threads.h"

#include <algorithm>
#include <atomic>

#if defined(FUSION_STD_THREADS)
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>
#else
#include <dlfcn.h>
#include <stdexcept>
#endif

#include <pthread.h>

namespace fusion {
namespace {

// True if the process is a child of fork(), in which the threads of the pools below do not exist.
std::atomic<bool> forked = false;
[[maybe_unused]] const int watches_forks =
    pthread_atfork(nullptr, nullptr, [] { forked.store(true, std::memory_order_relaxed); });

using Work = void (*)(const void *context, int thread, int members);

#if defined(FUSION_STD_THREADS)

// The threads of one calling thread, which exist until it ends, as in OpenMP.
class Pool {
public:
    Pool() = default;
    ~Pool() {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            ends_ = true;
        }
        changed_.notify_all();
        for (std::thread &thread : threads_) thread.join();
    }
    Pool(const Pool &) = delete;
    Pool &operator=(const Pool &) = delete;

    void run(int size, Work work, const void *context) {
        if (busy_) return work(context, 0, 1);  // a nested call
        busy_ = true;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            while (static_cast<int>(threads_.size()) < size - 1) {
                const int number = static_cast<int>(threads_.size()) + 1;
                threads_.emplace_back([this, number] { serve(number); });
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
        for (long served = round_ - 1;;) {
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
    std::vector<std::thread> threads_;
    Work work_ = nullptr;
    const void *context_ = nullptr;
    int members_ = 0, working_ = 0;
    long round_ = 0;
    bool ends_ = false, busy_ = false;
};

void in_parallel(int size, Work work, const void *context) {
    struct Owner {
        Pool *const pool = new Pool;
        ~Owner() {
            if (!forked) delete pool;  // a child of fork() would wait for threads that do not exist
        }
    };
    static thread_local const Owner owner;
    owner.pool->run(size, work, context);
}

#else

// Entry points of libgomp that libomp and libiomp5 have too.
struct OpenMP {
    void (*parallel)(void (*work)(void *), void *context, unsigned threads, unsigned flags) = nullptr;
    int (*max_threads)() = nullptr, (*members)() = nullptr, (*thread)() = nullptr;

    bool found_in(void *library) {
        return take(library, "GOMP_parallel", parallel) && take(library, "omp_get_max_threads", max_threads) &&
               take(library, "omp_get_num_threads", members) && take(library, "omp_get_thread_num", thread);
    }

private:
    template <class Entry> static bool take(void *library, const char *name, Entry &entry) {
        entry = reinterpret_cast<Entry>(dlsym(library, name));
        return entry != nullptr;
    }
};

// The OpenMP runtime that torch has loaded, under any file name: a second runtime would create a second pool of
// threads. So the module is linked to no runtime and looks for one when it first needs threads, after torch has been
// imported. Global symbols of the process are searched first, as for torch; the last name is for programs without
// torch.
const OpenMP &openmp() {
    static const OpenMP runtime = [] {
        OpenMP found;
        if (found.found_in(RTLD_DEFAULT)) return found;
        void *const torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
        if (torch && found.found_in(torch)) return found;
        void *const alone = dlopen("libgomp.so.1", RTLD_LAZY);
        if (alone && found.found_in(alone)) return found;
        throw std::runtime_error(
            "fusion_attention: native core: expected an OpenMP runtime (libgomp, libomp or libiomp5), "
            "got none, neither torch's nor the system's libgomp.so.1: install it (libgomp1), or "
            "compute on one thread: torch.set_num_threads(1)");
    }();
    return runtime;
}

// Runs work on `size` threads. A parallel region whose size differs from that of the last one creates or ends threads,
// and torch's regions have omp_get_max_threads() threads; so all regions here have this size too, and surplus threads
// return at once.
void in_parallel(int size, Work work, const void *context) {
    struct Region {
        const OpenMP &runtime;
        int size;
        Work work;
        const void *context;
    } region{openmp(), size, work, context};
    region.runtime.parallel(
        [](void *told) noexcept {
            const Region &r = *static_cast<const Region *>(told);
            const int members = std::min(r.size, r.runtime.members()), thread = r.runtime.thread();
            if (thread < members) r.work(r.context, thread, members);
        },
        &region, static_cast<unsigned>(std::max(size, region.runtime.max_threads())), 0);
}

#endif

}  // namespace

bool is_forked() { return forked.load(std::memory_order_relaxed); }

void on_threads(int size, Work work, const void *context) {
    if (size == 1 || is_forked()) work(context, 0, 1);
    else in_parallel(size, work, context);
}

}  // namespace fusion
