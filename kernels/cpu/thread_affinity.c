/* Binds the threads of an OpenMP team to cores. */

#ifdef __linux__
#define _GNU_SOURCE
#include <sched.h>
#endif

#include <omp.h>
#include <stdint.h>

/* Binds thread t of the team to the cores in masks[t], which has `bytes` bytes with a bit for each
   core. `version` (above 0) identifies the masks: a thread that was already bound by a call with
   this version makes no system call. The calling thread is bound last, because threads that it
   starts inherit its cores. The caller must restore its own cores afterwards. */
void bind_team(const uint8_t *masks, int64_t bytes, int32_t num_threads, int32_t version) {
#ifdef __linux__
    static __thread int32_t bound;
#pragma omp parallel num_threads(num_threads)
    {
        const int thread = omp_get_thread_num();
        if (thread && bound != version
            && !sched_setaffinity(0, bytes, (const cpu_set_t *)(masks + thread * bytes)))
            bound = version;
    }
    sched_setaffinity(0, bytes, (const cpu_set_t *)masks);
#else
    (void)masks, (void)bytes, (void)num_threads, (void)version;
#endif
}
