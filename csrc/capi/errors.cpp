#include "capi/errors.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>

#include "acl/acl.h"
#include "capi/runtime.h"

namespace fusion::capi {
namespace {

// Per thread: the text that aclGetRecentErrMsg() returns next, and the text that it returned last. Programs may call it
// at exit from destructors, after their thread's texts were destroyed.
thread_local bool texts_ended = false;
struct Messages {
    ~Messages() { texts_ended = true; }
    std::string next, last;
};
thread_local Messages messages;

std::string hexadecimal(std::uintptr_t number) {
    char text[2 + 2 * sizeof number + 1];
    std::snprintf(text, sizeof text, "0x%zx", static_cast<std::size_t>(number));
    return text;
}

// Returns "program+0x1a2b", an argument for addr2line; with the function's name if it is exported.
std::string place_of(const void *caller) {
    Dl_info info;
    if (caller == nullptr || dladdr(caller, &info) == 0 || info.dli_fname == nullptr) return "";
    const std::string path = info.dli_fname;
    const auto base = reinterpret_cast<std::uintptr_t>(info.dli_fbase);
    // The byte before the return address belongs to the call.
    const std::string at = hexadecimal(reinterpret_cast<std::uintptr_t>(caller) - base - 1);
    const std::string in = info.dli_sname == nullptr ? "" : std::string(" in ") + info.dli_sname;
    return path.substr(path.rfind('/') + 1) + "+" + at + in;
}

}  // namespace

std::string in_brackets(const CallSite &site) {
    if (site.number == 0) return "";
    const std::string at = place_of(site.caller);
    return " (" + site.name + ", call " + std::to_string(site.number) + (at.empty() ? "" : ", " + at) + ")";
}

Call::Call(const Caller &caller) noexcept
    : name(caller.name), caller(caller.address), number(checked() ? next_call() : 0) {}

int Call::fail(int code, const std::string &text) const noexcept {
    const std::string message = std::string(name) + ": " + text;
    note(message);
    if (number != 0) capi::report(*this, message + " (" + std::to_string(code) + ")");
    return code;
}

void Call::report(const std::string &text) const noexcept {
    const std::string message = std::string(name) + ": " + text;
    note(message);
    capi::report(*this, message);
}

void note(const std::string &text) noexcept {
    if (!texts_ended) messages.next = text;
}

// Returns null where no call failed, as CANN does.
FUSION_C const char *aclGetRecentErrMsg() {
    if (texts_ended) return nullptr;
    messages.last.swap(messages.next);
    messages.next.clear();
    return messages.last.empty() ? nullptr : messages.last.c_str();
}

void report(const Call &call, const std::string &text) noexcept {
    const std::string at = place_of(call.caller);
    // One write, so that lines of several threads do not mix; the program controls the buffer of stderr.
    std::fprintf(stderr, "fusion_attention: checked: %s [call %llu%s%s]\n", text.c_str(),
                 static_cast<unsigned long long>(call.number), at.empty() ? "" : ", ", at.c_str());
    if (aborts()) std::abort();
}

}  // namespace fusion::capi
