// What the libraries leave alone in a program that starts Python by its first operator, and that its threads may call:
// prints one line per finding, and ends with the number of those that are not "ok".
#include <atomic>
#include <clocale>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "acl/acl.h"
#include "aclnnop/aclnn_flash_attention_score.h"

namespace {

int wrong = 0;

void report(const char *what, bool ok) {
    std::printf("%s: %s\n", what, ok ? "ok" : "wrong");
    wrong += !ok;
}

aclTensor *tensor(const std::vector<int64_t> &shape, void *memory) {
    return aclCreateTensor(shape.data(), shape.size(), ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, shape.data(), shape.size(),
                           memory);
}

// One head of 16 equal keys: the mean of equal values is that value, exactly.
bool attention(float value) {
    constexpr int64_t tokens = 16, dims = 16;
    if (aclrtSetDevice(0) != 0) return false;
    void *memory[4];
    std::vector<float> rows(tokens * dims, value), out(tokens * dims, 0.f);
    for (void *&place : memory) {
        if (aclrtMalloc(&place, rows.size() * 4, ACL_MEM_MALLOC_NORMAL_ONLY) != 0) return false;
        if (aclrtMemcpy(place, rows.size() * 4, rows.data(), rows.size() * 4, ACL_MEMCPY_HOST_TO_DEVICE) != 0)
            return false;
    }
    void *statistics[2];
    for (void *&place : statistics)
        if (aclrtMalloc(&place, tokens * 8 * 4, ACL_MEM_MALLOC_NORMAL_ONLY) != 0) return false;
    aclrtMemset(memory[3], rows.size() * 4, 0, rows.size() * 4);
    aclTensor *const q = tensor({1, tokens, 1, dims}, memory[0]), *const k = tensor({1, tokens, 1, dims}, memory[1]);
    aclTensor *const v = tensor({1, tokens, 1, dims}, memory[2]), *const o = tensor({1, tokens, 1, dims}, memory[3]);
    aclTensor *const m = tensor({1, 1, tokens, 8}, statistics[0]), *const s = tensor({1, 1, tokens, 8}, statistics[1]);
    char layout[] = "BSND";
    uint64_t size = 0;
    aclOpExecutor *executor = nullptr;
    int ret =
        aclnnFlashAttentionScoreGetWorkspaceSize(q, k, v, nullptr, nullptr, nullptr, nullptr, nullptr, 0.25, 1.0, 65536,
                                                 65536, 1, layout, 0, 0, m, s, nullptr, o, &size, &executor);
    void *workspace = nullptr;
    if (ret == 0 && size > 0) ret = aclrtMalloc(&workspace, size, ACL_MEM_MALLOC_NORMAL_ONLY);
    if (ret == 0) ret = aclnnFlashAttentionScore(workspace, size, executor, nullptr);
    if (ret == 0) ret = aclrtMemcpy(out.data(), out.size() * 4, memory[3], out.size() * 4, ACL_MEMCPY_DEVICE_TO_HOST);
    if (ret != 0) std::printf("%d %s\n", ret, aclGetRecentErrMsg());
    for (const float each : out)
        if (each != value) return false;
    return ret == 0;
}

std::string handlers() {
    std::string states;
    for (int number = 1; number < NSIG; ++number) {
        struct sigaction action = {};
        if (sigaction(number, nullptr, &action) != 0) continue;
        states += std::to_string(number) + (action.sa_handler == SIG_DFL   ? "d"
                                            : action.sa_handler == SIG_IGN ? "i"
                                                                           : "h");
    }
    return states;
}

}  // namespace

// What programs do last: the libraries have ended by then, or will.
struct Late {
    ~Late() {
        aclrtSetDevice(-1);
        aclGetRecentErrMsg();
    }
};
const Late late;

int main() {
    std::printf("before\n");  // waits in the program's buffer: only the program may write it out
    const std::string signals = handlers(), locale = std::setlocale(LC_ALL, nullptr);
    if (aclInit(nullptr) != 0) return 100;
    std::atomic<int> right = 0;
    std::vector<std::thread> threads;  // the first of them starts Python, whichever it is
    for (int i = 0; i < 4; ++i) threads.emplace_back([&right, i] { right += attention(1.f + static_cast<float>(i)); });
    for (std::thread &thread : threads) thread.join();
    report("threads", right == 4);
    report("after its starter has ended", attention(9.f));
    report("signals", handlers() == signals);
    report("locale", locale == std::setlocale(LC_ALL, nullptr));
    report("finalize", aclFinalize() == 0);
    report("initialised again", aclInit(nullptr) == 0 && attention(3.f) && aclFinalize() == 0);
    return wrong;
}
