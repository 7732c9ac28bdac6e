// Scratch memory that outlives a call: the largest returned buffer is cached for the next lease.

#pragma once

#include "system.h"

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

namespace fusion {

// Tests set this to a byte that fills every new lease, so that a kernel that reads memory before writing it gives wrong
// results (0xff is NaN in every floating-point type); the process also aborts if a kernel writes beyond its lease.
inline std::atomic<int> lease_poison = -1;

class Lease {  // a buffer of at least `bytes`, aligned to cache lines; contents undefined
public:
    explicit Lease(std::size_t bytes)
        : requested_(bytes), poison_(lease_poison.load(std::memory_order_relaxed)), guard_(poison_ < 0 ? 0 : 4096),
          buffer_(take(bytes + guard_)) {
        if (guard_) std::memset(data(), poison_, bytes + guard_);
    }
    ~Lease() {
        for (std::size_t i = 0; i < guard_; ++i) {
            if (data()[requested_ + i] != static_cast<char>(poison_)) std::abort();
        }
        give_back(std::move(buffer_));
    }
    Lease(const Lease &) = delete;
    Lease &operator=(const Lease &) = delete;

    char *data() const { return buffer_->data; }

private:
    struct Buffer {
        char *data = nullptr;
        std::size_t bytes = 0;
        int unfit = 0;  // consecutive leases that needed less than half of it

        Buffer() = default;
        ~Buffer() { system::release(data); }
        Buffer(const Buffer &) = delete;
        Buffer &operator=(const Buffer &) = delete;
    };
    using Owner = std::unique_ptr<Buffer>;

    // Exchanges the cached buffer. No lock, because a fork could leave it locked.
    static Owner exchange(Owner other) {
        static std::atomic<Buffer *> spare = nullptr;  // never destroyed: a thread may still run when the process ends
        return Owner(spare.exchange(other.release(), std::memory_order_acq_rel));
    }

    static Owner take(std::size_t bytes) {
        Owner buffer = exchange(nullptr);
        if (!buffer) buffer = std::make_unique<Buffer>();
        buffer->unfit = bytes < buffer->bytes / 2 ? buffer->unfit + 1 : 0;
        if (buffer->bytes < bytes || buffer->unfit > most_unfit) allocate(*buffer, bytes);
        return buffer;
    }

    // Returns a buffer to the cache; if another run has returned one meanwhile, the larger one stays.
    static void give_back(Owner buffer) {
        Owner other = exchange(nullptr);
        if (other && other->bytes > buffer->bytes) std::swap(buffer, other);
        exchange(std::move(buffer));
    }

    static void allocate(Buffer &buffer, std::size_t bytes) {
        system::release(buffer.data);
        buffer.data = nullptr;
        buffer.bytes = 0, buffer.unfit = 0;
        // Large buffers are aligned to huge pages, because panels are read in long streams.
        constexpr std::size_t huge = std::size_t{2} << 20;
        const std::size_t alignment = bytes >= huge / 2 ? huge : 64;
        const std::size_t rounded = (bytes + alignment - 1) / alignment * alignment;
        buffer.data = static_cast<char *>(system::allocate(alignment, rounded));
        if (!buffer.data && rounded) throw std::bad_alloc();
        buffer.bytes = rounded;
    }

    // After this many consecutive leases that need less than half of it, a buffer is freed: the memory of one large
    // call is released in the end, but stays for large calls that alternate with small ones.
    static constexpr int most_unfit = 64;

    const std::size_t requested_;
    const int poison_;
    const std::size_t guard_;
    Owner buffer_;
};

// A lease of bytes_of(threads); if it cannot be allocated, `threads` is halved until it can.
template <class BytesOf> Lease lease_for(int &threads, const BytesOf &bytes_of) {
    for (;; threads /= 2) {
        try {
            return Lease(bytes_of(threads));
        } catch (const std::bad_alloc &) {
            if (threads <= 1) throw;
        }
    }
}

}  // namespace fusion
