/* Calls every kind of function of the C runtime in any order with anything for an argument, from several threads.
 *
 * Nothing here may crash, leak or race: tests/capi/test_sanitized.py builds it, with the libraries' sources, under
 * sanitizers. An answer that is no code of the documentation ends it with 1. Usage: hostile [rounds [seed]] */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "acl/acl.h"
#include "aclnn/aclnn_base.h"

enum { threads = 4, slots = 24, largest = 4096 };

/* What all threads take from and put into: live handles and addresses, ended ones, and what never was one. */
static _Atomic(uintptr_t) pool[slots];
static _Atomic(int) wrong;

typedef struct Draws {
    uint64_t state;
    unsigned char host[largest]; /* the only memory of its own that a thread hands over: the library may write here */
} Draws;

static uint64_t draw(Draws *draws, uint64_t below) {
    draws->state ^= draws->state << 13;
    draws->state ^= draws->state >> 7;
    draws->state ^= draws->state << 17;
    return draws->state % below;
}

static void *any(Draws *draws) {
    static const uint64_t never[] = {0, 1, 256, (uint64_t)0xac << 48, ((uint64_t)0xac << 48) + 4096, ~(uint64_t)0};
    if (draw(draws, 8) == 0) return (void *)(uintptr_t)never[draw(draws, 6)];
    return (void *)(uintptr_t)pool[draw(draws, slots)];
}

static uint64_t size(Draws *draws) {
    static const uint64_t odd[] = {0, 1, largest, (uint64_t)1 << 62, ~(uint64_t)0};
    return draw(draws, 4) == 0 ? odd[draw(draws, 5)] : draw(draws, largest);
}

/* At most what a thread has of its own. */
static uint64_t small(Draws *draws) { return draw(draws, largest); }

static void keep(Draws *draws, const void *made) {
    if (made != NULL) pool[draw(draws, slots)] = (uintptr_t)made;
}

static void check(int code, const char *call) {
    static const int codes[] = {0,      100000, 100001, 100002, 100037, 107000, 107001, 107002, 107006,
                                107007, 107017, 161001, 161002, 207001, 207002, 361001, 561103};
    for (size_t i = 0; i < sizeof codes / sizeof *codes; ++i) {
        if (code == codes[i]) {
            const char *said = aclGetRecentErrMsg();
            if (code == 0 || (said != NULL && strncmp(said, call, strlen(call)) == 0)) return;
        }
    }
    fprintf(stderr, "%s: %d\n", call, code);
    wrong = 1;
}

#define CHECK(NAME, ...) check(NAME(__VA_ARGS__), #NAME)

/* Two copies to one place would be the program's own race. */
static pthread_mutex_t copying = PTHREAD_MUTEX_INITIALIZER;

static void copies(Draws *draws) {
    const uint64_t count = small(draws);
    pthread_mutex_lock(&copying);
    switch (draw(draws, 5)) {
        case 0: CHECK(aclrtMemset, any(draws), size(draws), 7, size(draws)); break;
        case 1: CHECK(aclrtMemcpy, any(draws), size(draws), draws->host, count, ACL_MEMCPY_HOST_TO_DEVICE); break;
        case 2:
            CHECK(aclrtMemcpy, any(draws), size(draws), any(draws), size(draws), ACL_MEMCPY_DEVICE_TO_DEVICE);
            break;
        case 3:
            CHECK(aclrtMemcpyAsync, draws->host, count, any(draws), count, ACL_MEMCPY_DEVICE_TO_HOST, any(draws));
            break;
        default: CHECK(aclrtMemcpy2d, any(draws), size(draws), draws->host, 64, 64, 64, ACL_MEMCPY_HOST_TO_DEVICE);
    }
    pthread_mutex_unlock(&copying);
}

static void memory(Draws *draws) {
    void *made = NULL;
    switch (draw(draws, 5)) {
        case 0: CHECK(aclrtMalloc, &made, size(draws), (aclrtMemMallocPolicy)draw(draws, 7)); break;
        case 1: CHECK(aclrtMallocHost, &made, small(draws)); break;
        case 2: CHECK(aclrtFree, any(draws)); break;
        case 3: CHECK(aclrtFreeHost, any(draws)); break;
        default: {
            size_t free = 0, total = 0;
            CHECK(aclrtGetMemInfo, (aclrtMemAttr)draw(draws, 12), &free, &total);
            if (free > total) wrong = 1;
        }
    }
    keep(draws, made);
}

static void streams(Draws *draws) {
    void *made = NULL;
    float ms = 0;
    switch (draw(draws, 12)) {
        case 0: CHECK(aclrtSetDevice, (int32_t)draw(draws, 10) - 1); break;
        case 1: CHECK(aclrtCreateContext, &made, (int32_t)draw(draws, 9)); break;
        case 2: CHECK(aclrtDestroyContext, any(draws)); break;
        case 3: CHECK(aclrtSetCurrentContext, any(draws)); break;
        case 4: CHECK(aclrtGetCurrentContext, &made); break;
        case 5: CHECK(aclrtCreateStream, &made); break;
        case 6: CHECK(aclrtDestroyStream, any(draws)); break;
        case 7: CHECK(aclrtSynchronizeStream, any(draws)); break;
        case 8: CHECK(aclrtCreateEvent, &made); break;
        case 9: CHECK(aclrtRecordEvent, any(draws), any(draws)); break;
        case 10: CHECK(aclrtEventElapsedTime, &ms, any(draws), any(draws)); break;
        default:
            if (draw(draws, 8) == 0) CHECK(aclrtResetDevice, (int32_t)draw(draws, 8));
    }
    keep(draws, made);
}

static void tensors(Draws *draws) {
    int64_t dims[4], strides[4];
    const void *members[4];
    for (int i = 0; i < 4; ++i) {
        dims[i] = (int64_t)draw(draws, 9) - (draw(draws, 20) == 0);
        strides[i] = draw(draws, 30) == 0 ? (int64_t)1 << 62 : (int64_t)draw(draws, 64);
        members[i] = any(draws);
    }
    const uint64_t rank = draw(draws, 30) == 0 ? size(draws) | 5 : draw(draws, 5);
    const int64_t offset = draw(draws, 20) == 0 ? INT64_MAX : (int64_t)draw(draws, 8);
    void *const data = draw(draws, 4) == 0 ? (void *)((uintptr_t)any(draws) + draw(draws, 64)) : any(draws);
    const int64_t *const given = draw(draws, 3) == 0 ? NULL : strides;
    /* A rank beyond 25 is refused before a dimension is read; the rest have four to read. */
    const uint64_t shown = rank > 4 && rank <= 25 ? 26 : rank;
    switch (draw(draws, 8)) {
        case 0:
        case 1:
            keep(draws, aclCreateTensor(dims, shown, (aclDataType)draw(draws, 42), given, offset, ACL_FORMAT_ND, dims,
                                        draw(draws, 5), data));
            break;
        case 2: keep(draws, aclCreateTensorList((const aclTensor *const *)members, draw(draws, 5))); break;
        case 3: keep(draws, aclCreateIntArray(dims, draw(draws, 5))); break;
        case 4: keep(draws, aclCreateFloatArray((const float *)dims, draw(draws, 9))); break;
        case 5: keep(draws, aclCreateScalar(dims, (aclDataType)draw(draws, 42))); break;
        case 6: keep(draws, aclCreateScalarList((const aclScalar *const *)members, draw(draws, 5))); break;
        default: CHECK(aclInitTensor, any(draws), dims, shown, ACL_INT8, given, offset, ACL_FORMAT_ND, dims, 0, data);
    }
}

static void ask(Draws *draws) {
    int64_t *values = NULL;
    uint64_t count = 0;
    void *address = NULL;
    switch (draw(draws, 9)) {
        case 0: CHECK(aclGetViewShape, any(draws), &values, &count); break;
        case 1: CHECK(aclGetViewStrides, any(draws), &values, &count); break;
        case 2: CHECK(aclGetTensorListSize, any(draws), &count); break;
        case 3: CHECK(aclGetIntArraySize, any(draws), &count); break;
        case 4: CHECK(aclGetRawTensorAddr, any(draws), &address); break;
        case 5: CHECK(aclSetRawTensorAddr, any(draws), any(draws)); break;
        case 6: CHECK(aclSetInputTensorAddr, any(draws), size(draws), any(draws), any(draws)); break;
        case 7: CHECK(aclSetDynamicTensorAddr, any(draws), size(draws), size(draws), any(draws), any(draws)); break;
        default: CHECK(aclSetAclOpExecutorRepeatable, any(draws));
    }
    free(values); /* of new[], which this C program cannot delete[]; both are malloc()'s here */
}

static void destroy(Draws *draws) {
    switch (draw(draws, 8)) {
        case 0: CHECK(aclDestroyTensor, any(draws)); break;
        case 1: CHECK(aclDestroyTensorList, any(draws)); break;
        case 2: CHECK(aclDestroyIntArray, any(draws)); break;
        case 3: CHECK(aclDestroyFloatArray, any(draws)); break;
        case 4: CHECK(aclDestroyScalar, any(draws)); break;
        case 5: CHECK(aclDestroyScalarList, any(draws)); break;
        case 6: CHECK(aclrtDestroyEvent, any(draws)); break;
        default: CHECK(aclDestroyAclOpExecutor, any(draws));
    }
}

static uint64_t rounds = 20000, seed = 1;

static void *work(void *number) {
    Draws *draws = calloc(1, sizeof *draws);
    draws->state = seed * 0x9E3779B97F4A7C15u + (uintptr_t)number + 1;
    static void (*const kinds[])(Draws *) = {memory, copies, streams, tensors, tensors, ask, destroy};
    CHECK(aclrtSetDevice, (int32_t)(uintptr_t)number);
    for (uint64_t i = 0; i < rounds && !wrong; ++i) {
        if ((uintptr_t)number == 0 && i % 2000 == 1999) { /* the others see the runtime end and begin */
            CHECK(aclFinalize);
            CHECK(aclInit, NULL);
            CHECK(aclrtSetDevice, 0);
        }
        kinds[draw(draws, sizeof kinds / sizeof *kinds)](draws);
    }
    free(draws);
    return NULL;
}

int main(int count, char **words) {
    if (count > 1) rounds = strtoull(words[1], NULL, 10);
    if (count > 2) seed = strtoull(words[2], NULL, 10);
    pthread_t all[threads];
    CHECK(aclInit, NULL);
    for (uintptr_t i = 0; i < threads; ++i) pthread_create(&all[i], NULL, work, (void *)i);
    for (int i = 0; i < threads; ++i) pthread_join(all[i], NULL);
    CHECK(aclFinalize);
    return wrong;
}
