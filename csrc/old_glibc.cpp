// Lets a module that was linked on a newer system run wherever glibc is 2.28 or later: what got a new version, or a new
// home, since then is asked for by the version that every such glibc has. Linked into the Python module and the C
// interface's libraries, where CMakeLists.txt makes them portable; tests/backends/test_portable.py and
// tests/capi/test_runtime.py read which versions they ask for.

#if defined(__x86_64__)
#define FUSION_FIRST_VERSION "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define FUSION_FIRST_VERSION "GLIBC_2.17"
#else
#error "which version did glibc begin with on this processor?"
#endif
#define FUSION_OLD(name, function) __asm__(".symver " #name ", " #function "@" FUSION_FIRST_VERSION)

extern "C" {

// Since 2.29 they set no errno any more; the numbers are the same.
double fusion_old_exp(double x);
double fusion_old_log2(double x);
FUSION_OLD(fusion_old_exp, exp);
FUSION_OLD(fusion_old_log2, log2);
double exp(double x) noexcept { return fusion_old_exp(x); }
double log2(double x) noexcept { return fusion_old_log2(x); }

// Since 2.34 in libc itself; before in libdl, which is linked to for them.
void *fusion_old_dlopen(const char *file, int mode);
void *fusion_old_dlsym(void *library, const char *name);
FUSION_OLD(fusion_old_dlopen, dlopen);
FUSION_OLD(fusion_old_dlsym, dlsym);
void *dlopen(const char *file, int mode) noexcept { return fusion_old_dlopen(file, mode); }
void *dlsym(void *library, const char *name) noexcept { return fusion_old_dlsym(library, name); }

// The same; csrc/capi asks where it lies itself, and what dlopen() missed.
struct Dl_info;
int fusion_old_dladdr(const void *address, Dl_info *info);
char *fusion_old_dlerror();
FUSION_OLD(fusion_old_dladdr, dladdr);
FUSION_OLD(fusion_old_dlerror, dlerror);
int dladdr(const void *address, Dl_info *info) noexcept { return fusion_old_dladdr(address, info); }
char *dlerror() noexcept { return fusion_old_dlerror(); }

// There since 2.32: whether counters of shared pointers may do without atomic instructions. Never.
char __libc_single_threaded = 0;  // NOLINT(bugprone-reserved-identifier)
}
