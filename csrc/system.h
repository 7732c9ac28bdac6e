// The functions that depend on the operating system. system_linux.cpp, system_macos.cpp and system_windows.cpp each
// define all of them.

#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

namespace fusion::system {

// Memory of `bytes`, a multiple of the alignment (a power of two); null if there is none. Ends with release().
void *allocate(std::size_t alignment, std::size_t bytes);
void release(void *memory);

// CPU time of the calling thread, for differences; where the system counts it too coarsely, time.
std::chrono::nanoseconds thread_time();

std::size_t second_level_cache();  // bytes of a core; 0 where the system does not tell

// Features of an Arm CPU by the names of Linux's /proc/cpuinfo; none on x86, whose cpuid needs no system.
std::vector<std::string> arm_features();

void after_fork(void (*child)());  // calls `child` in every child of fork(), where the system has it

// Looks for the OpenMP runtime that torch has loaded: sets each of `entries` to the function of that name, all of them
// from one library. False if there is no such library.
bool find_openmp(const std::vector<const char *> &names, std::vector<void *> &entries);

}  // namespace fusion::system
