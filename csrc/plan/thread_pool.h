// Source of a team's threads: those of OpenMP, which torch uses too, so that cores do not have threads of two pools;
// where the process has no runtime, or with FUSION_STD_THREADS (for ThreadSanitizer), a pool of std::thread.

#pragma once

namespace fusion {

// Calls work(thread, members) once on each of `size` threads, or of as many as the system allows, including the calling
// thread (0); returns when all have finished. In a child of fork(), which has none of its parent's threads, only the
// calling thread works. A size that differs from the last one neither creates nor ends threads.
void on_threads(int size, void (*work)(const void *context, int thread, int members), const void *context);

bool is_forked();                  // true if this process is a child of fork()
inline bool told_of_fork = false;  // true if the user has been warned; read and written with the GIL held

template <class Work> void on_threads(int size, const Work &work) {
    on_threads(
        size,
        [](const void *context, int thread, int members) { (*static_cast<const Work *>(context))(thread, members); },
        &work);
}

}  // namespace fusion
