// The operating system's permission to use tile registers (AMX), whose state it saves for each thread.

#pragma once

#include <string>

namespace fusion {

// Requests the permission, once, for the process and its children; returns "" if granted, else the reason. The request
// should precede the creation of threads: the system refuses it if a thread's signal stack is too small for tiles.
const std::string &tile_refusal();

// The reason that belongs to an error number of the system.
std::string tile_refusal_of(int error);

// Saves the tile configuration of this thread and restores it at the end of its scope, so that code in between may
// change it. Contents of tiles are not saved.
class KeptTiles {
public:
    KeptTiles();
    ~KeptTiles();
    KeptTiles(const KeptTiles &) = delete;
    KeptTiles &operator=(const KeptTiles &) = delete;

private:
    [[maybe_unused]] alignas(64) unsigned char config_[64] = {};
};

}  // namespace fusion
