// The system's leave to use tile registers (AMX), whose state it keeps for each thread.

#pragma once

#include <string>

namespace fusion {

// Asks for it, once; "" where it is given, else why it is not. For the whole process and its children, and best before
// others make threads: the system refuses where a thread's signal stack has no room for the state of tiles.
const std::string &tile_refusal();

// Why the system answered with an error number.
std::string tile_refusal_of(int error);

// Tiles of this thread stay configured, though not their contents, over code that may use them otherwise.
class KeptTiles {
public:
    KeptTiles();
    ~KeptTiles();
    KeptTiles(const KeptTiles &) = delete;
    KeptTiles &operator=(const KeptTiles &) = delete;

private:
    alignas(64) unsigned char config_[64] = {};
};

}  // namespace fusion
