# For make wheels: GCC's cross compiler. Python's headers are those of the Python that builds, of the same version: beside
# an aarch64 one's only pyconfig.h differs, and there in nothing that an extension module sees.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
