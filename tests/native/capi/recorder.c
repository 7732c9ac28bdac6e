/* Preloaded before a program of CANN's: keeps what it copies back from the device, and puts other bytes into what it
 * copies there. In the folder RECORDER_FOLDER, in<N> replaces the first bytes of the program's copy number N to the
 * device; out<N> is its copy number N back. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "acl/acl.h"

static int sent, received;

static FILE *opened(const char *name, int number, const char *mode) {
    char path[4096];
    const char *folder = getenv("RECORDER_FOLDER");
    if (folder == NULL) abort();
    snprintf(path, sizeof path, "%s/%s%d", folder, name, number);
    return fopen(path, mode);
}

aclError aclrtMemcpy(void *dst, size_t destMax, const void *src, size_t count, aclrtMemcpyKind kind) {
    aclError (*copy)(void *, size_t, const void *, size_t, aclrtMemcpyKind);
    *(void **)&copy = dlsym(RTLD_NEXT, "aclrtMemcpy");
    if (kind == ACL_MEMCPY_HOST_TO_DEVICE) {
        char *bytes = malloc(count);
        FILE *given = opened("in", sent++, "rb");
        memcpy(bytes, src, count);
        if (given != NULL) {
            if (fread(bytes, 1, count, given) == 0) abort();
            fclose(given);
        }
        const aclError ret = copy(dst, destMax, bytes, count, kind);
        free(bytes);
        return ret;
    }
    const aclError ret = copy(dst, destMax, src, count, kind);
    FILE *taken = opened("out", received++, "wb");
    if (taken == NULL || fwrite(dst, 1, count, taken) != count || fclose(taken) != 0) abort();
    return ret;
}
