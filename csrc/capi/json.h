// A JSON parser for the configuration files of aclInit().
#pragma once

#include <string>
#include <vector>

namespace fusion::capi {

struct Json {
    enum class Type { null, boolean, number, string, array, object };

    Type type = Type::null;
    bool boolean = false;
    std::string text;  // of a string; of a number as it is written
    struct Member;
    std::vector<Member> members;  // of an object; of an array without names

    // Returns the last member of that name; null if there is none.
    const Json *at(const std::string &name) const;
};

struct Json::Member {
    std::string name;
    Json value;
};

// Throws std::runtime_error with the error and its line.
Json json_of(const std::string &text);

}  // namespace fusion::capi
