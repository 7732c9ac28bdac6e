#include "capi/allocations.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <map>

#include "capi/runtime.h"

namespace fusion::capi {
namespace {

// The smallest size for huge pages; below, clearing them costs more than they save.
constexpr std::size_t worth_huge_pages = std::size_t{1} << 20;
// In the checked mode, the number of freed allocations whose addresses are not reused.
constexpr std::size_t remembered = 1024;

struct Memory {
    std::mutex mutex;
    std::map<const char *, std::shared_ptr<Allocation>> live;
    std::deque<std::shared_ptr<Allocation>> freed;  // in the checked mode, oldest first
    std::size_t allocated = 0;                      // bytes of the device
};

Memory &memory() {
    static Memory &instance = *new Memory;
    return instance;
}

void *from_system(std::size_t size, bool aligned) {
    // One huge page more than requested, so that the memory can be aligned to one.
    const std::size_t capacity = aligned ? size + huge_page : size;
    void *mapping = mmap(nullptr, capacity, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED) return nullptr;
    if (!aligned) return mapping;
    auto *begin = static_cast<char *>(mapping);
    const std::size_t before = (huge_page - reinterpret_cast<std::uintptr_t>(begin) % huge_page) % huge_page;
    if (before != 0) munmap(begin, before);
    if (before != huge_page) munmap(begin + before + size, huge_page - before);
    madvise(begin + before, size, MADV_HUGEPAGE);
    return begin + before;
}

std::size_t physical() {
    return static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

std::string size_of(const Allocation &of) {
    return std::string(of.host ? "a host" : "an") + " allocation of " + std::to_string(of.requested) + " bytes" +
           in_brackets(of.creation);
}

template <class Map>
std::shared_ptr<Allocation> within(const Map &map, const char *address) {
    auto next = map.upper_bound(address);
    if (next == map.begin()) return nullptr;
    const auto &allocation = std::prev(next)->second;
    return address < allocation->address + std::max<std::size_t>(allocation->granted, 1) ? allocation : nullptr;
}

}  // namespace

Allocation::~Allocation() {
    if (functions != nullptr) {
        functions->release(address);
    } else {
        munmap(address, granted);
    }
}

std::shared_ptr<Allocation> allocation_of(const void *address) noexcept {
    Memory &all = memory();
    const std::lock_guard<std::mutex> lock(all.mutex);
    return within(all.live, static_cast<const char *>(address));
}

std::string described(const void *address) noexcept {
    if (address == nullptr) return "null";
    Memory &all = memory();
    const std::lock_guard<std::mutex> lock(all.mutex);
    const auto *at = static_cast<const char *>(address);
    if (const auto allocation = within(all.live, at)) {
        const std::string from =
            at == allocation->address ? "" : "byte " + std::to_string(at - allocation->address) + " of ";
        return from + size_of(*allocation);
    }
    for (auto entry = all.freed.rbegin(); entry != all.freed.rend(); ++entry) {
        const Allocation &one = **entry;
        if (at >= one.address && at < one.address + one.granted) {
            return size_of(one) + " that was freed" + in_brackets(one.freed);
        }
    }
    char text[64];
    std::snprintf(text, sizeof text, "%p, in no live allocation", address);
    return text;
}

std::shared_ptr<Allocation> allocate(std::size_t requested, std::size_t grain, bool host, const Call &call) {
    if (requested == 0) throw Refusal(invalid_param, "size: expected bytes > 0, got 0");
    const std::string sentence = std::to_string(requested) + " bytes could not be allocated";
    if (requested > SIZE_MAX / 4) throw Refusal(rt_memory_allocation, sentence);
    const DeviceFunctions *functions = host ? nullptr : device_functions();
    const std::size_t granted = (requested + grain - 1) / grain * grain;
    const bool huge = grain == huge_page && requested >= worth_huge_pages;
    void *address = functions != nullptr ? functions->allocate(granted) : from_system(granted, huge);
    if (address == nullptr) {
        const char *why = functions != nullptr ? functions->error() : nullptr;
        throw Refusal(rt_memory_allocation, sentence, (why == nullptr ? "" : std::string(": ") + why));
    }
    auto allocation = std::make_shared<Allocation>(address, requested, granted, host);
    allocation->functions = functions;
    allocation->creation = call.site();
    Memory &all = memory();
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.live[allocation->address] = allocation;
    all.allocated += host ? 0 : granted;
    return allocation;
}

void release(const void *address, bool host, const char *maker, const Call &call) {
    if (address == nullptr) throw Refusal(invalid_param, "expected an address of ", maker, ", got null");
    Memory &all = memory();
    std::shared_ptr<Allocation> allocation;
    {
        const std::lock_guard<std::mutex> lock(all.mutex);
        const auto at = all.live.find(static_cast<const char *>(address));
        if (at != all.live.end() && at->second->host == host) {
            allocation = at->second;
            all.live.erase(at);
            all.allocated -= host ? 0 : allocation->granted;
        }
    }
    if (allocation == nullptr)
        throw Refusal(rt_memory_free, "expected an address of ", maker, ", got ", described(address));
    allocation->alive = false;
    if (call.number == 0 || allocation->functions != nullptr) return;
    // These addresses are not reused for a while, so that a use after free is detected.
    allocation->freed = call.site();
    madvise(allocation->address, allocation->granted, MADV_DONTNEED);
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.freed.push_back(allocation);
    if (all.freed.size() > remembered) all.freed.pop_front();
}

std::size_t held_bytes() noexcept {
    Memory &all = memory();
    const std::lock_guard<std::mutex> lock(all.mutex);
    return all.allocated;
}

std::size_t total_bytes() {
    const DeviceFunctions *functions = device_functions();
    std::size_t total = 0;
    if (functions == nullptr) return physical();
    if (functions->total(&total) != 0) throw Refusal(rt_internal, functions->error());
    return total;
}

void add_allocations(Leaks &leaks) {
    Memory &all = memory();
    const std::lock_guard<std::mutex> lock(all.mutex);
    for (const auto &[address, one] : all.live) {
        leaks.add(
            (one->host ? "a host" : "an") + std::string(" allocation of ") + std::to_string(one->requested) + " bytes",
            one->creation);
    }
}

Allocations take_all() {
    Memory &all = memory();
    Allocations taken;
    const std::lock_guard<std::mutex> lock(all.mutex);
    taken.reserve(all.live.size() + all.freed.size());
    for (const auto &[address, one] : all.live) {
        one->alive = false;
        taken.push_back(one);
    }
    taken.insert(taken.end(), all.freed.begin(), all.freed.end());
    all.live.clear();
    all.freed.clear();
    all.allocated = 0;
    return taken;
}

}  // namespace fusion::capi
