#include "capi/json.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace fusion::capi {
namespace {

class Reader {
public:
    explicit Reader(const std::string &text) : at_(text.data()), end_(at_ + text.size()) {}

    Json document() {
        Json value = read(0);
        skip();
        if (at_ != end_) fail("the end of the file");
        return value;
    }

private:
    // CANN's limit is 10; this is far from the end of the stack.
    static constexpr int deepest = 64;

    [[noreturn]] void fail(const std::string &expected) const {
        const std::string got = at_ == end_ ? "the end of the file" : "'" + std::string(1, *at_) + "'";
        throw std::runtime_error("line " + std::to_string(line_) + ": expected " + expected + ", got " + got);
    }

    void skip() {
        for (; at_ != end_ && std::strchr(" \t\r\n", *at_) != nullptr && *at_ != 0; ++at_) line_ += *at_ == '\n';
    }

    bool take(char wanted) {
        skip();
        if (at_ == end_ || *at_ != wanted) return false;
        ++at_;
        return true;
    }

    void word(const char *wanted) {
        const std::size_t size = std::strlen(wanted);
        if (static_cast<std::size_t>(end_ - at_) < size || std::memcmp(at_, wanted, size) != 0) fail(wanted);
        at_ += size;
    }

    Json read(int depth) {
        if (depth > deepest) fail("fewer brackets within brackets");
        skip();
        Json value;
        const char first = at_ == end_ ? '\0' : *at_;
        if (first == '{') {
            value.type = Json::Type::object;
            members(value, '}', depth);
        } else if (first == '[') {
            value.type = Json::Type::array;
            members(value, ']', depth);
        } else if (first == '"') {
            value.type = Json::Type::string;
            value.text = string();
        } else if (first == 't' || first == 'f') {
            value.type = Json::Type::boolean;
            value.boolean = first == 't';
            word(first == 't' ? "true" : "false");
        } else if (first == 'n') {
            word("null");
        } else {
            value.type = Json::Type::number;
            value.text = number();
        }
        return value;
    }

    void members(Json &value, char closing, int depth) {
        ++at_;
        if (take(closing)) return;
        do {
            std::string name;
            if (closing == '}') {
                skip();
                if (at_ == end_ || *at_ != '"') fail("a name in quotes");
                name = string();
                if (!take(':')) fail("':'");
            }
            value.members.push_back({name, read(depth + 1)});
        } while (take(','));
        if (!take(closing)) fail(std::string("',' or '") + closing + "'");
    }

    std::string string() {
        std::string text;
        for (++at_; at_ != end_ && *at_ != '"'; ++at_) {
            if (static_cast<unsigned char>(*at_) < ' ') fail("no line end within quotes");
            if (*at_ != '\\') {
                text += *at_;
                continue;
            }
            static constexpr char written[] = "\"\\/bfnrt", meant[] = "\"\\/\b\f\n\r\t";
            if (++at_ == end_) break;
            if (*at_ == 'u') {
                text += character();
                continue;
            }
            const char *match = std::strchr(written, *at_);
            if (match == nullptr || *match == 0) fail("a known character after a backslash");
            text += meant[match - written];
        }
        if (at_ == end_) fail("'\"'");
        ++at_;
        return text;
    }

    // Returns the UTF-8 of an escape, \u and four hexadecimal digits, or of a surrogate pair.
    std::string character() {
        unsigned code = unit();
        if (code >= 0xD800 && code < 0xE000) {
            const unsigned high = code;
            const bool follows = high < 0xDC00 && end_ - at_ > 2 && at_[1] == '\\' && at_[2] == 'u';
            if (follows) at_ += 2;
            const unsigned low = follows ? unit() : 0;
            if (low < 0xDC00 || low >= 0xE000) fail("both halves of a surrogate pair");
            code = 0x10000 + ((high & 0x3FF) << 10 | (low & 0x3FF));
        }
        const auto byte = [](unsigned value) { return static_cast<char>(value); };
        const auto later = [&](unsigned shift) { return byte(0x80 | (code >> shift & 63)); };
        if (code < 0x80) return {byte(code)};
        if (code < 0x800) return {byte(0xC0 | code >> 6), later(0)};
        if (code < 0x10000) return {byte(0xE0 | code >> 12), later(6), later(0)};
        return {byte(0xF0 | code >> 18), later(12), later(6), later(0)};
    }

    unsigned unit() {
        unsigned code = 0;
        for (int digit = 0; digit < 4; ++digit) {
            const char *digits = "0123456789abcdefABCDEF";
            if (++at_ == end_) fail("four hexadecimal digits");
            const char *match = std::strchr(digits, *at_);
            if (match == nullptr || *match == 0) fail("a hexadecimal digit");
            const auto value = static_cast<unsigned>(match - digits);
            code = code * 16 + (value < 16 ? value : value - 6);
        }
        return code;
    }

    std::string number() {
        const char *begin = at_;
        while (at_ != end_ && *at_ != 0 && std::strchr("+-.0123456789eE", *at_) != nullptr) ++at_;
        if (at_ == begin || !std::any_of(begin, at_, [](char c) { return c >= '0' && c <= '9'; })) fail("a value");
        return {begin, at_};
    }

    const char *at_, *end_;
    int line_ = 1;
};

}  // namespace

const Json *Json::at(const std::string &name) const {
    const auto member = std::find_if(members.rbegin(), members.rend(), [&](const Member &m) { return m.name == name; });
    return type == Type::object && member != members.rend() ? &member->value : nullptr;
}

Json json_of(const std::string &text) { return Reader(text).document(); }

}  // namespace fusion::capi
