/* Functions for all programs: checked calls, tensors filled from host memory, and the comparison with a formula. */
#ifndef PROGRAM_H
#define PROGRAM_H

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "acl/acl.h"
#include "aclnn/acl_meta.h"

enum { MAX_DIMS = 4, NO_LIMIT = 2147483647 };

/* Exits with the library's error text if a call failed. */
#define CHECK(call) check((call), #call)
static inline void check(int code, const char *call) {
    if (code == ACL_SUCCESS) return;
    const char *why = aclGetRecentErrMsg();
    fprintf(stderr, "%s: code %d: %s\n", call, code, why ? why : "");
    exit(1);
}

/* A tensor and its device memory; a list that has the tensor destroys it. */
typedef struct {
    aclTensor *tensor;
    aclTensorList *list;
    void *address;
    aclDataType type;
    size_t count;
} Buffer;

/* What end() releases: all buffers, and all memory of the host. */
typedef union Block {
    union Block *next;
    double aligned;
} Block;
static Block *blocks;
static Buffer buffers[64];
static size_t buffer_count;

static inline void *allocated(size_t size) {
    Block *made = calloc(1, sizeof *made + size);
    if (!made) {
        fprintf(stderr, "no memory\n");
        exit(1);
    }
    made->next = blocks;
    blocks = made;
    return made + 1;
}

static inline float *floats(size_t count) { return allocated(count * sizeof(float)); }
static inline double *doubles(size_t count) { return allocated(count * sizeof(double)); }

/* begin() and end() are called at the start and the end of every program. */
static inline aclrtStream begin(void) {
    aclrtStream stream = NULL;
    CHECK(aclInit(getenv("ACL_CONFIG"))); /* a JSON file, or null */
    CHECK(aclrtSetDevice(0));
    CHECK(aclrtCreateStream(&stream));
    return stream;
}

static inline void end(aclrtStream stream) {
    for (size_t i = 0; i < buffer_count; i++) {
        const Buffer old = buffers[i];
        CHECK(old.list ? aclDestroyTensorList(old.list) : aclDestroyTensor(old.tensor));
        CHECK(aclrtFree(old.address));
    }
    for (Block *old = blocks, *next; old; old = next) {
        next = old->next;
        free(old);
    }
    CHECK(aclrtDestroyStream(stream));
    CHECK(aclrtResetDevice(0));
    CHECK(aclFinalize());
}

/* Returns the 16 bits of a bfloat16: the upper half of a float, rounded to even. */
static inline uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

static inline float from_bf16(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline Buffer buffer(const void *host, aclDataType type, int dims, const int64_t *sizes) {
    Buffer made = {NULL, NULL, NULL, type, 1};
    for (int i = 0; i < dims; i++) made.count *= (size_t)sizes[i];
    const size_t bytes = made.count * aclDataTypeSize(type);
    CHECK(aclrtMalloc(&made.address, bytes ? bytes : 1, ACL_MEM_MALLOC_HUGE_FIRST));
    if (host) CHECK(aclrtMemcpy(made.address, bytes, host, bytes, ACL_MEMCPY_HOST_TO_DEVICE));
    else CHECK(aclrtMemset(made.address, bytes, 0x7F, bytes)); /* NaN, so that unwritten elements differ */
    made.tensor =
        aclCreateTensor(sizes, (uint64_t)dims, type, NULL, 0, ACL_FORMAT_ND, sizes, (uint64_t)dims, made.address);
    if (!made.tensor || buffer_count == sizeof buffers / sizeof *buffers) check(1, "aclCreateTensor");
    return buffers[buffer_count++] = made;
}

/* Returns a list of one tensor. */
static inline aclTensorList *list_of(Buffer of) {
    const aclTensor *tensors[] = {of.tensor};
    aclTensorList *list = aclCreateTensorList(tensors, 1);
    for (size_t i = 0; i < buffer_count; i++)
        if (buffers[i].tensor == of.tensor) buffers[i].list = list;
    return list;
}

#define SIZES(...) \
    (int)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (int64_t[]) { __VA_ARGS__ }

/* Returns floats as a tensor of another type, and rounds them in place, so that formulas read the same values. */
static inline Buffer rounded(float *values, aclDataType type, int dims, const int64_t *sizes) {
    size_t count = 1;
    for (int i = 0; i < dims; i++) count *= (size_t)sizes[i];
    if (type == ACL_FLOAT) return buffer(values, type, dims, sizes);
    uint16_t *halves = allocated(count * sizeof *halves);
    for (size_t i = 0; i < count; i++) {
        halves[i] = type == ACL_BF16 ? to_bf16(values[i]) : aclFloatToFloat16(values[i]);
        values[i] = type == ACL_BF16 ? from_bf16(halves[i]) : aclFloat16ToFloat(halves[i]);
    }
    return buffer(halves, type, dims, sizes);
}

/* Returns the current elements of a tensor as floats. */
static inline float *contents(Buffer from) {
    const size_t bytes = from.count * aclDataTypeSize(from.type);
    unsigned char *raw = allocated(bytes);
    float *values = floats(from.count);
    CHECK(aclrtMemcpy(raw, bytes, from.address, bytes, ACL_MEMCPY_DEVICE_TO_HOST));
    for (size_t i = 0; i < from.count; i++) {
        uint16_t half;
        if (from.type == ACL_FLOAT) {
            memcpy(values + i, raw + i * sizeof(float), sizeof(float));
        } else {
            memcpy(&half, raw + i * sizeof half, sizeof half);
            values[i] = from.type == ACL_BF16 ? from_bf16(half) : aclFloat16ToFloat(half);
        }
    }
    return values;
}

/* Returns numbers in [-1, 1), the same in every run. */
static inline float *drawn(size_t count, uint64_t seed) {
    float *values = floats(count);
    for (size_t i = 0; i < count; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        values[i] = (float)((double)(seed >> 40) / (double)(1 << 23) - 1.0);
    }
    return values;
}

/* Runs phase 2 with a workspace of the size that phase 1 returned, and waits for its end. */
typedef aclnnStatus (*Phase2)(void *workspace, uint64_t size, aclOpExecutor *executor, aclrtStream stream);
static inline void run(Phase2 operation, uint64_t size, aclOpExecutor *executor, aclrtStream stream) {
    void *workspace = NULL;
    if (size) CHECK(aclrtMalloc(&workspace, size, ACL_MEM_MALLOC_HUGE_FIRST));
    CHECK(operation(workspace, size, executor, stream));
    CHECK(aclrtSynchronizeStream(stream));
    if (workspace) CHECK(aclrtFree(workspace));
}

/* Returns 1 if the norm of the errors, divided by `size`, exceeds four times the spacing of their type's numbers at 1.
 * size: of the terms that a result adds, if they cancel each other; 0: the norm of the formula's numbers. */
static inline int differs_by(const char *name, Buffer got, const double *wanted, double size) {
    const double unit = got.type == ACL_FLOAT ? FLT_EPSILON : got.type == ACL_BF16 ? 1.0 / 128 : 1.0 / 1024;
    float *values = contents(got);
    double error = 0, total = 0;
    for (size_t i = 0; i < got.count; i++) {
        error += (values[i] - wanted[i]) * (values[i] - wanted[i]);
        total += wanted[i] * wanted[i];
    }
    const double share = sqrt(error) / (size > 0 ? size : sqrt(total));
    const int far = !(share <= 4 * unit); /* also for NaN */
    printf("%-14s %zu numbers, %.1e from the formula%s\n", name, got.count, share, far ? ": WRONG" : "");
    return far;
}

static inline int differs(const char *name, Buffer got, const double *wanted) {
    return differs_by(name, got, wanted, 0);
}

#endif
