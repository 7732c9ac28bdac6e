// Where a team's threads come from: OpenMP's, which are torch's as well, so that no core has two threads of two pools;
// or, with FUSION_STD_THREADS, the standard library's: ThreadSanitizer understands those, and they need no OpenMP.
// OpenMP's runtime is found when threads are first needed; without one on_threads() throws, before any work is done.

#pragma once

namespace fusion {

// Calls work(thread, members) once on each of `size` threads, or of as many as there may be, the calling thread (0)
// among them; returns when all are done. In a child of fork(), which has none of its parent's threads, on this one
// alone. No thread is created or ended for another size than the last.
void on_threads(int size, void (*work)(const void *context, int thread, int members), const void *context);

bool is_forked();                  // whether this process is such a child
inline bool told_of_fork = false;  // whether its user knows; read and written under Python's lock

template <class Work> void on_threads(int size, const Work &work) {
    on_threads(
        size,
        [](const void *context, int thread, int members) { (*static_cast<const Work *>(context))(thread, members); },
        &work);
}

}  // namespace fusion
