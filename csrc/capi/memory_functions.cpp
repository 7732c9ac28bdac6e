// The C functions for memory: aclrtMalloc(), aclrtMemcpy() and their kin.
#include <algorithm>
#include <cstring>

#include "acl/acl_rt.h"
#include "capi/dtypes.h"
#include "capi/runtime.h"

namespace fusion::capi {
namespace {

enum Copy : int { host_to_host, host_to_device, device_to_host, device_to_device, by_addresses };
constexpr const char *kinds[] = {"ACL_MEMCPY_HOST_TO_HOST", "ACL_MEMCPY_HOST_TO_DEVICE", "ACL_MEMCPY_DEVICE_TO_HOST",
                                 "ACL_MEMCPY_DEVICE_TO_DEVICE", "ACL_MEMCPY_DEFAULT"};
// Newer names of three kinds, which specify buffering and the positions of devices.
constexpr int newer[] = {host_to_device, device_to_device, device_to_device};
// An upper bound of the addresses of a program.
constexpr std::uintptr_t last_address = ~std::uintptr_t{0} >> 8;

std::string bytes(std::size_t count) { return std::to_string(count) + " bytes"; }

// The source or target of a copy: `count` bytes at an address; keeps them allocated during the copy.
struct End {
    std::shared_ptr<Allocation> memory;  // null: memory of the program, whose size is unknown
    char *address = nullptr;
    std::size_t first = 0;  // byte of the allocation

    End(const char *param, const void *at, std::size_t count, const Call &call)
        : memory(allocation_of(at)), address(static_cast<char *>(const_cast<void *>(at))) {
        need_address(at, param);
        if (memory == nullptr) {
            const auto begin = reinterpret_cast<std::uintptr_t>(at);
            if (begin > last_address || count > last_address - begin)
                throw Refusal(rt_invalid_param, "count: ", bytes(count), " do not fit behind ", param);
            return;
        }
        first = static_cast<std::size_t>(address - memory->address);
        const std::string text = std::string(param) + ": " + bytes(count) + " asked of " + described(at);
        if (count > memory->granted - first) throw Refusal(rt_invalid_param, text);
        if (first + count > memory->requested) call.defect(text, ", within the pages that the chip gives");
    }

    bool on_device() const { return memory != nullptr && !memory->host; }
};

// Checks the memory of a copy for its kind before any byte is copied.
void need_kind(int kind, const End &source, const End &target) {
    const int given = (source.on_device() ? 2 : 0) + (target.on_device() ? 1 : 0);
    if (kind == by_addresses || kind == given) return;
    const bool at_source = ((kind ^ given) & 2) != 0;
    const End &end = at_source ? source : target;
    const char *expected = (kind & (at_source ? 2 : 1)) != 0 ? "device" : "host";
    throw Refusal(rt_invalid_param, at_source ? "src" : "dst", ": expected ", expected, " memory, as ", kinds[kind],
                  " says, got ", described(end.address));
}

// Compares the bytes of a copy with the tensor at that address. The most common error is twice or half as many bytes,
// because the host's type differs from the tensor's.
void compare_with_traces(const char *param, const End &end, std::size_t count, const Call &call) {
    const std::lock_guard<std::mutex> lock(end.memory->mutex);
    const auto trace = end.memory->traces.find({end.first, true});
    if (trace == end.memory->traces.end()) return;
    const Trace &last = trace->second;
    if (last.end - last.begin == count || last.end == last.begin || count == 0) return;
    const std::size_t size = last.end - last.begin;
    if (count % size != 0 && size % count != 0) return;
    call.defect(param, ": ", bytes(count), " where a tensor of ", dtype_name(last.dtype), " has ", bytes(size),
                ": the host's type is not the tensor's");
}

void trace_copy(const End &source, const End &target, std::size_t count, const Call &call) {
    if (source.memory != nullptr && source.memory == target.memory &&
        std::max(source.first, target.first) < std::min(source.first, target.first) + count) {
        call.defect("src and dst overlap in ", described(target.memory->address));
    }
    if (target.on_device() && !source.on_device()) {
        compare_with_traces("src", target, count, call);
        const std::lock_guard<std::mutex> lock(target.memory->mutex);
        target.memory->remember({target.first, target.first + count, -1, call.site()});
    }
    if (source.on_device() && !target.on_device()) compare_with_traces("dst", source, count, call);
}

void check_capacity(const char *capacity_name, std::size_t capacity, std::size_t count) {
    if (count <= capacity) return;
    throw Refusal(rt_invalid_param, "count: expected 0 to ", capacity_name, "=", capacity, ", got ", count);
}

int kind_of(int kind) {
    if (kind < 0 || kind > 7) throw Refusal(invalid_param, "kind: expected 0 to 7, got ", kind);
    return kind <= by_addresses ? kind : newer[kind - by_addresses - 1];
}

void move(const End &source, const End &target, std::size_t count) {
    const DeviceFunctions *functions = device_functions();
    const bool device = source.on_device() || target.on_device();
    if (functions == nullptr || !device) {
        std::memmove(target.address, source.address, count);
        return;
    }
    const int kind = (source.on_device() ? 2 : 0) + (target.on_device() ? 1 : 0);
    if (functions->copy(target.address, source.address, count, kind) != 0)
        throw Refusal(rt_internal, functions->error());
}

void copy(const Call &call, void *dst, std::size_t capacity, const void *src, std::size_t count, int kind) {
    kind = kind_of(kind);
    check_capacity("destMax", capacity, count);
    const End target("dst", dst, count, call), source("src", src, count, call);
    need_kind(kind, source, target);
    if (call.number != 0) trace_copy(source, target, count, call);
    if (count != 0) move(source, target, count);
}

struct Plane {
    void *dst;
    std::size_t dst_pitch;
    const void *src;
    std::size_t src_pitch, width, height;
};

void copy_plane(const Call &call, const Plane &of, int kind) {
    kind = kind_of(kind);
    if (of.width > of.dst_pitch || of.width > of.src_pitch)
        throw Refusal(rt_invalid_param, "width: expected 0 to both pitches, got ", of.width);
    std::size_t target_size = 0, source_size = 0;
    const std::size_t rows = of.height == 0 ? 0 : of.height - 1;
    if (__builtin_mul_overflow(rows, of.dst_pitch, &target_size) ||
        __builtin_mul_overflow(rows, of.src_pitch, &source_size) || target_size > SIZE_MAX - of.width ||
        source_size > SIZE_MAX - of.width) {
        throw Refusal(rt_invalid_param, "height: ", of.height, " rows fit in no memory");
    }
    const std::size_t width = of.height == 0 ? 0 : of.width;
    End target("dst", of.dst, target_size + width, call), source("src", of.src, source_size + width, call);
    need_kind(kind, source, target);
    for (std::size_t row = 0; row < of.height && width != 0; ++row) {
        move(source, target, width);
        target.address += of.dst_pitch;
        source.address += of.src_pitch;
    }
}

void set(const Call &call, void *address, std::size_t capacity, int value, std::size_t count) {
    check_capacity("maxCount", capacity, count);
    const End end("devPtr", address, count, call);
    // A write to a wrong address is refused.
    if (end.memory == nullptr) {
        throw Refusal(rt_invalid_param, "devPtr: expected memory of aclrtMalloc() or aclrtMallocHost(), got ",
                      described(address));
    }
    const DeviceFunctions *functions = device_functions();
    if (functions == nullptr || !end.on_device()) {
        std::memset(address, value, count);
    } else if (functions->set(address, value & 255, count) != 0) {
        throw Refusal(rt_internal, functions->error());
    }
    if (call.number == 0) return;
    const std::lock_guard<std::mutex> lock(end.memory->mutex);
    end.memory->remember({end.first, end.first + count, -1, call.site()});
}

void give(const Call &call, void **pointer, const char *param, std::size_t size, std::size_t grain, bool host) {
    need_init();
    need_address(pointer, param);
    if (!host) need_context();
    *pointer = allocate(size, grain, host, call)->address;
}

std::size_t grain_of(int policy) {
    if (policy < 0 || policy > 0x7fff)
        throw Refusal(invalid_param, "policy: expected an aclrtMemMallocPolicy, got ", policy);
    // Every third of the first six policies requests no huge pages; further bits state the memory's purpose.
    const int kind = policy & 0xff;
    return kind == 2 || kind == 5 ? small_page : huge_page;
}

}  // namespace

#define FUSION_MALLOC(NAME)                                                                                   \
    FUSION_C int NAME(void **devPtr, std::size_t size, aclrtMemMallocPolicy policy) {                         \
        return coded([&](const Call &call) { give(call, devPtr, "devPtr", size, grain_of(policy), false); }); \
    }
FUSION_MALLOC(aclrtMalloc)
FUSION_MALLOC(aclrtMallocAlign32)
FUSION_MALLOC(aclrtMallocCached)

FUSION_C int aclrtMallocHost(void **hostPtr, std::size_t size) {
    return coded([&](const Call &call) { give(call, hostPtr, "hostPtr", size, small_page, true); });
}

FUSION_C int aclrtFree(void *devPtr) {
    return initialized([&](const Call &call) { release(devPtr, false, "aclrtMalloc()", call); });
}

FUSION_C int aclrtFreeHost(void *hostPtr) {
    return initialized([&](const Call &call) { release(hostPtr, true, "aclrtMallocHost()", call); });
}

FUSION_C int aclrtMemcpy(void *dst, std::size_t destMax, const void *src, std::size_t count, aclrtMemcpyKind kind) {
    return initialized([&](const Call &call) { copy(call, dst, destMax, src, count, kind); });
}

FUSION_C int aclrtMemcpyAsync(void *dst, std::size_t destMax, const void *src, std::size_t count, aclrtMemcpyKind kind,
                              void *stream) {
    return initialized([&](const Call &call) {
        need_stream(stream);
        copy(call, dst, destMax, src, count, kind);
    });
}

FUSION_C int aclrtMemcpy2d(void *dst, std::size_t dpitch, const void *src, std::size_t spitch, std::size_t width,
                           std::size_t height, aclrtMemcpyKind kind) {
    return initialized([&](const Call &call) { copy_plane(call, {dst, dpitch, src, spitch, width, height}, kind); });
}

FUSION_C int aclrtMemcpy2dAsync(void *dst, std::size_t dpitch, const void *src, std::size_t spitch, std::size_t width,
                                std::size_t height, aclrtMemcpyKind kind, void *stream) {
    return initialized([&](const Call &call) {
        need_stream(stream);
        copy_plane(call, {dst, dpitch, src, spitch, width, height}, kind);
    });
}

FUSION_C int aclrtMemset(void *devPtr, std::size_t maxCount, std::int32_t value, std::size_t count) {
    return initialized([&](const Call &call) { set(call, devPtr, maxCount, value, count); });
}

FUSION_C int aclrtMemsetAsync(void *devPtr, std::size_t maxCount, std::int32_t value, std::size_t count, void *stream) {
    return initialized([&](const Call &call) {
        need_stream(stream);
        set(call, devPtr, maxCount, value, count);
    });
}

// There is no cache between the program and this memory.
FUSION_C int aclrtMemFlush(void *devPtr, std::size_t size) {
    return initialized([&](const Call &call) { const End checked("devPtr", devPtr, size, call); });
}

FUSION_C int aclrtMemInvalidate(void *devPtr, std::size_t size) {
    return initialized([&](const Call &call) { const End checked("devPtr", devPtr, size, call); });
}

FUSION_C int aclrtGetMemInfo(aclrtMemAttr attr, std::size_t *free, std::size_t *total) {
    return initialized([&] {
        need_address(free, "free");
        need_address(total, "total");
        if (attr < 0 || attr > 15) throw Refusal(invalid_param, "attr: expected an aclrtMemAttr, got ", attr);
        need_context();
        const std::size_t all = total_bytes();
        *free = all - std::min(all, held_bytes());
        *total = all;
    });
}

}  // namespace fusion::capi
