// Makes a module that was linked on a newer system run with glibc 2.28 or later: symbols that got a new version or
// moved to another library since then are bound to the version that every such glibc has. CMakeLists.txt links this
// file into portable builds of the Python module and of the C interface's libraries;
// tests/backends/test_shared_library_dependencies.py and tests/capi/test_runtime.py check the versions of their
// symbols.

#if defined(__x86_64__)
#define FUSION_FIRST_VERSION "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define FUSION_FIRST_VERSION "GLIBC_2.17"
#else
#error "which version did glibc begin with on this processor?"
#endif
#define FUSION_OLD(name, function) __asm__(".symver " #name ", " #function "@" FUSION_FIRST_VERSION)

extern "C" {

// The versions since 2.29 do not set errno; their results are the same.
double fusion_old_exp(double x);
double fusion_old_log2(double x);
FUSION_OLD(fusion_old_exp, exp);
FUSION_OLD(fusion_old_log2, log2);
double exp(double x) noexcept { return fusion_old_exp(x); }
double log2(double x) noexcept { return fusion_old_log2(x); }

// In libc since 2.34; before in libdl, which is linked for them.
void *fusion_old_dlopen(const char *file, int mode);
void *fusion_old_dlsym(void *library, const char *name);
FUSION_OLD(fusion_old_dlopen, dlopen);
FUSION_OLD(fusion_old_dlsym, dlsym);
void *dlopen(const char *file, int mode) noexcept { return fusion_old_dlopen(file, mode); }
void *dlsym(void *library, const char *name) noexcept { return fusion_old_dlsym(library, name); }

// In libdl too; csrc/capi uses them for the path of its own library and for messages of dlopen().
struct Dl_info;
int fusion_old_dladdr(const void *address, Dl_info *info);
char *fusion_old_dlerror();
FUSION_OLD(fusion_old_dladdr, dladdr);
FUSION_OLD(fusion_old_dlerror, dlerror);
int dladdr(const void *address, Dl_info *info) noexcept { return fusion_old_dladdr(address, info); }
char *dlerror() noexcept { return fusion_old_dlerror(); }

// In libc since 2.34; before in libpthread, which is linked for them. Threads of the standard library's begin by them;
// the types are those of a thread's number, of its attributes and of its result.
int fusion_old_pthread_create(unsigned long *thread, const void *how, void *(*work)(void *), void *context);
int fusion_old_pthread_detach(unsigned long thread);
FUSION_OLD(fusion_old_pthread_create, pthread_create);
FUSION_OLD(fusion_old_pthread_detach, pthread_detach);
int pthread_create(unsigned long *thread, const void *how, void *(*work)(void *), void *context) noexcept {
    return fusion_old_pthread_create(thread, how, work, context);
}
int pthread_detach(unsigned long thread) noexcept { return fusion_old_pthread_detach(thread); }

// Exists since 2.32: nonzero if counters of shared pointers need no atomic instructions. Always zero here.
char __libc_single_threaded = 0;  // NOLINT(bugprone-reserved-identifier)
}
