// Measures calls of the C API on one thread. benchmarks/capi.py links it like any program for CANN, and runs it.
// capi_calls start: prints microseconds from aclInit to aclrtMalloc. capi_calls TOKENS TURNS: prints for each turn the
// microseconds of CPU time of phase 1 on new tensors, of phase 1 on unchanged tensors, and of phase 2.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <vector>

#include "acl/acl.h"
#include "aclnnop/aclnn_flash_attention_score.h"

#define CHECK(call)                                                                           \
    do {                                                                                      \
        const int ret = (call);                                                               \
        if (ret != 0) return std::printf("%s: %d %s\n", #call, ret, aclGetRecentErrMsg()), 1; \
    } while (0)

namespace {

double now(clockid_t clock) {
    timespec time;
    clock_gettime(clock, &time);
    return 1e6 * static_cast<double>(time.tv_sec) + 1e-3 * static_cast<double>(time.tv_nsec);
}

aclTensor *tensor(const std::vector<int64_t> &shape, void *memory) {
    std::vector<int64_t> strides(shape.size(), 1);
    for (std::size_t i = shape.size() - 1; i > 0; --i) strides[i - 1] = shape[i] * strides[i];
    return aclCreateTensor(shape.data(), shape.size(), ACL_FLOAT, strides.data(), 0, ACL_FORMAT_ND, shape.data(),
                           shape.size(), memory);
}

// softmax(q k^T / 8) v of 2 heads with head dim 64.
struct Attention {
    explicit Attention(int64_t tokens) : tokens(tokens) {}

    int allocate() {
        const std::size_t bytes = static_cast<std::size_t>(tokens) * 2 * 64 * 4;
        for (void *&place : rows) {
            CHECK(aclrtMalloc(&place, bytes, ACL_MEM_MALLOC_HUGE_FIRST));
            CHECK(aclrtMemset(place, bytes, 0, bytes));
        }
        for (void *&place : statistics) CHECK(aclrtMalloc(&place, bytes, ACL_MEM_MALLOC_HUGE_FIRST));
        return 0;
    }

    void create() {
        for (int i = 0; i < 4; ++i) tensors[i] = tensor({1, tokens, 2, 64}, rows[i]);
        for (int i = 0; i < 2; ++i) tensors[4 + i] = tensor({1, 2, tokens, 8}, statistics[i]);
    }

    void destroy() {
        for (const aclTensor *each : tensors) aclDestroyTensor(each);
    }

    int plan() {
        char layout[] = "BSND";
        return aclnnFlashAttentionScoreGetWorkspaceSize(tensors[0], tensors[1], tensors[2], nullptr, nullptr, nullptr,
                                                        nullptr, nullptr, 0.125, 1.0, 65536, 65536, 2, layout, 0, 0,
                                                        tensors[4], tensors[5], nullptr, tensors[3], &size, &executor);
    }

    int64_t tokens;
    void *rows[4], *statistics[2];
    aclTensor *tensors[6];
    uint64_t size = 0;
    aclOpExecutor *executor = nullptr;
};

int start() {
    const double began = now(CLOCK_MONOTONIC);
    CHECK(aclInit(nullptr));
    CHECK(aclrtSetDevice(0));
    aclrtStream stream;
    CHECK(aclrtCreateStream(&stream));
    void *memory;
    CHECK(aclrtMalloc(&memory, 1 << 20, ACL_MEM_MALLOC_HUGE_FIRST));
    std::printf("%.1f\n", now(CLOCK_MONOTONIC) - began);
    return 0;
}

int calls(int64_t tokens, int turns) {
    constexpr clockid_t clock = CLOCK_THREAD_CPUTIME_ID;
    CHECK(aclInit(nullptr));
    CHECK(aclrtSetDevice(0));
    aclrtStream stream;
    CHECK(aclrtCreateStream(&stream));
    Attention attention(tokens);
    CHECK(attention.allocate());
    const int count = tokens > 256 ? 1 : 200;
    void *workspace = nullptr;
    for (int turn = -1; turn < turns; ++turn) {  // the first one warms up
        double fresh = 0, known = 0;
        for (int i = 0; i < count; ++i) {
            attention.create();
            const double began = now(clock);
            CHECK(attention.plan());
            fresh += now(clock) - began;
            CHECK(aclDestroyAclOpExecutor(attention.executor));
            attention.destroy();
        }
        attention.create();
        for (int i = 0; i < count; ++i) {
            const double began = now(clock);
            CHECK(attention.plan());
            known += now(clock) - began;
            if (i < count - 1) CHECK(aclDestroyAclOpExecutor(attention.executor));
        }
        if (!workspace && attention.size) CHECK(aclrtMalloc(&workspace, attention.size, ACL_MEM_MALLOC_HUGE_FIRST));
        CHECK(aclSetAclOpExecutorRepeatable(attention.executor));
        const double began = now(clock);
        for (int i = 0; i < count; ++i)
            CHECK(aclnnFlashAttentionScore(workspace, attention.size, attention.executor, stream));
        const double run = now(clock) - began;
        CHECK(aclDestroyAclOpExecutor(attention.executor));
        attention.destroy();
        if (turn >= 0) std::printf("%.2f %.2f %.2f\n", fresh / count, known / count, run / count);
    }
    return 0;
}

}  // namespace

int main(int count, char **words) {
    if (count == 2 && std::strcmp(words[1], "start") == 0) return start();
    if (count == 3) return calls(std::atoll(words[1]), std::atoi(words[2]));
    return 2;
}
