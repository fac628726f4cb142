/* The cores that the threads of a team run on. */

#ifdef __linux__
#define _GNU_SOURCE
#include <sched.h>
#endif

#include <omp.h>
#include <stdint.h>

/* Thread t of the team may run on the cores of masks[t], of `bytes` bytes each, a bit a core.
   `version` names the masks, above 0: threads that have them already, as the runtime keeps them for
   the next team, ask for nothing. The thread that calls comes last, for what it starts would
   inherit its cores, and is to be freed after. */
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
