// Scratch memory that outlives a call: the last returned buffer is kept for the next taker.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace fusion {

// Tests set this: every lease then begins with NaN in all its bytes, whatever type they are read as, so that a kernel
// which reads what it has not written cannot pass by luck; and the process ends where one writes behind its lease.
inline std::atomic<bool> poisons_leases = false;

class Lease {  // of at least `bytes`, aligned to cache lines; contents undefined
public:
    explicit Lease(std::size_t bytes)
        : asked_(bytes), guard_(poisons_leases.load(std::memory_order_relaxed) ? 4096 : 0) {
        take(bytes + guard_);
        if (guard_) std::memset(data_, 0xff, bytes + guard_);
    }
    ~Lease() {
        for (std::size_t i = 0; i < guard_; ++i) {
            if (data_[asked_ + i] != static_cast<char>(0xff)) std::abort();
        }
        {
            const std::lock_guard<std::mutex> lock(kept().mutex);
            if (bytes_ > kept().bytes) {
                std::swap(data_, kept().data);
                std::swap(bytes_, kept().bytes);
            }
        }
        std::free(data_);
    }
    Lease(const Lease &) = delete;
    Lease &operator=(const Lease &) = delete;

    char *data() const { return data_; }

private:
    struct Kept {
        std::mutex mutex;
        char *data = nullptr;
        std::size_t bytes = 0;
    };
    static Kept &kept() {
        static Kept *const one = new Kept;  // never destroyed: a thread may still run when the process ends
        return *one;
    }

    void take(std::size_t bytes) {
        {
            const std::lock_guard<std::mutex> lock(kept().mutex);
            std::swap(data_, kept().data);
            std::swap(bytes_, kept().bytes);
        }
        if (bytes_ >= bytes) return;
        std::free(data_);
        // Large buffers begin where huge pages do: panels are read in long streams.
        constexpr std::size_t huge = std::size_t{2} << 20;
        const std::size_t alignment = bytes >= huge / 2 ? huge : 64;
        bytes_ = (bytes + alignment - 1) / alignment * alignment;
        data_ = static_cast<char *>(std::aligned_alloc(alignment, bytes_));
        if (!data_) throw std::bad_alloc();
#if defined(__linux__)
        if (alignment == huge) madvise(data_, bytes_, MADV_HUGEPAGE);  // a wish: no matter if it fails
#endif
    }

    const std::size_t asked_, guard_;
    char *data_ = nullptr;
    std::size_t bytes_ = 0;
};

}  // namespace fusion
