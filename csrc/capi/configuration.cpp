#include <fcntl.h>
#include <sys/stat.h>

#include <cstdio>
#include <cstdlib>

#include "capi/json.h"
#include "capi/runtime.h"

namespace fusion::capi {
namespace {

constexpr const char *section = "fusion_attention";
constexpr std::size_t largest = 10 << 20;  // bytes; CANN has the same limit

std::string contents(const std::string &path) {
    struct statx about{};  // stat() is another function in every few versions of glibc
    // A pipe or a terminal would wait for ever.
    if (statx(AT_FDCWD, path.c_str(), 0, STATX_TYPE | STATX_SIZE, &about) != 0 || !S_ISREG(about.stx_mode))
        throw Refusal(invalid_file, "configPath: expected a file, got '", path, "'");
    if (about.stx_size > largest)
        throw Refusal(invalid_file_size, "configPath: expected at most 10 MiB, got '", path, "'");
    std::string text(static_cast<std::size_t>(about.stx_size), ' ');
    std::FILE *file = std::fopen(path.c_str(), "rb");
    const std::size_t read = file == nullptr ? 0 : std::fread(text.data(), 1, text.size(), file);
    if (file != nullptr) std::fclose(file);
    if (file == nullptr || read != text.size()) throw Refusal(invalid_file, "configPath: '", path, "' cannot be read");
    return text;
}

// Applies one setting from the file or the environment, which `from` names.
void apply(Configuration &configuration, const std::string &name, const std::string &value, const std::string &from) {
    const auto refuse = [&](int code, const std::string &expected) {
        throw Refusal(code, from, ": expected ", expected, ", got '", value, "'");
    };
    if (name == "device") {
        const bool digits = value.size() > 5 && value.find_first_not_of("0123456789", 5) == std::string::npos;
        if (value != "cpu" && value != "cuda" && (value.rfind("cuda:", 0) != 0 || !digits)) {
            refuse(rt_no_device, "cpu, cuda or cuda:<number>");
        }
        configuration.settings.device = value;
    } else if (name == "backend") {
        configuration.settings.backend = value;  // Python checks it
    } else if (name == "memory") {
        if (value != "host" && value != "torch") refuse(invalid_file_attribute, "host or torch");
        configuration.functions = value == "torch";
    } else if (name == "checked") {
        const bool on = value == "true" || value == "1" || value == "abort";
        if (!on && value != "false" && value != "0") refuse(invalid_file_attribute, "true, false or abort");
        configuration.settings.checked = on;
        configuration.abort = value == "abort";
    } else {
        refuse(invalid_file_attribute, "device, backend, memory or checked");
    }
}

void apply_member(Configuration &configuration, const Json::Member &member, const std::string &where) {
    const Json &value = member.value;
    const bool flag = value.type == Json::Type::boolean;
    if (!flag && value.type != Json::Type::string)
        throw Refusal(invalid_file_attribute, where, member.name, ": expected a text or true");
    const std::string text = flag ? (value.boolean ? "true" : "false") : value.text;
    apply(configuration, member.name, text, where + member.name);
}

void apply_file(Configuration &configuration, const std::string &path) {
    Json file;
    try {
        file = json_of(contents(path));
    } catch (const Refusal &) {
        throw;
    } catch (const std::runtime_error &error) {
        throw Refusal(parse_file, "configPath: '", path, "': ", error.what());
    }
    const std::string shown = "configPath: '" + path + "'";
    if (file.type != Json::Type::object) throw Refusal(parse_file, shown, ": expected {...}");
    const Json *ours = file.at(section);  // other sections are for the chip
    if (ours == nullptr) return;
    if (ours->type != Json::Type::object)
        throw Refusal(invalid_file_attribute, shown, ": ", section, ": expected {...}");
    for (const Json::Member &member : ours->members) apply_member(configuration, member, shown + ": " + section + ".");
}

}  // namespace

Configuration configuration_of(const char *path) {
    Configuration configuration;
    if (path != nullptr && *path != 0)
        apply_file(configuration, path);  // CANN treats "" as no file, and programs pass it
    for (const char *name : {"device", "backend", "memory", "checked"}) {
        std::string variable = "FUSION_ATTENTION_";
        for (const char *letter = name; *letter != 0; ++letter) variable += static_cast<char>(*letter - 32);
        const char *value = std::getenv(variable.c_str());
        if (value != nullptr && *value != 0) apply(configuration, name, value, variable);
    }
    return configuration;
}

}  // namespace fusion::capi
