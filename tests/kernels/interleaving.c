/* An OpenMP runtime for tests. Its threads take turns: one runs until it waits at a barrier, then
   the next one runs. If a barrier is missing, the first thread always reads data that the last one
   has not computed yet.

   It defines the functions that code compiled by GCC calls (libgomp/libgomp_g.h). The chunks of a
   loop are assigned to the threads in turn. */

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>

typedef struct {
    int count, turn;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    void (*run)(void *);
    void *data;
} team;

typedef struct {
    team *of;
    int id;
    long at, end, size; /* in a loop: this thread's next chunk begins at `at` */
} member;

static _Thread_local member me;

static void pass(void) {
    pthread_mutex_lock(&me.of->lock);
    me.of->turn = (me.of->turn + 1) % me.of->count;
    pthread_cond_broadcast(&me.of->changed);
    pthread_mutex_unlock(&me.of->lock);
}

static void wait_for_turn(void) {
    pthread_mutex_lock(&me.of->lock);
    while (me.of->turn != me.id) pthread_cond_wait(&me.of->changed, &me.of->lock);
    pthread_mutex_unlock(&me.of->lock);
}

static void *work(void *as) {
    me = *(member *)as;
    wait_for_turn();
    me.of->run(me.of->data);
    pass();
    return NULL;
}

void GOMP_parallel(void (*run)(void *), void *data, unsigned count, unsigned flags) {
    enum { MOST = 16 };
    const member before = me;
    pthread_t threads[MOST];
    member members[MOST];
    team t = {.count = count && count < MOST ? (int)count : 1, .run = run, .data = data};
    (void)flags;
    pthread_mutex_init(&t.lock, NULL);
    pthread_cond_init(&t.changed, NULL);
    for (int i = 0; i < t.count; i++) members[i] = (member){.of = &t, .id = i};
    for (int i = 1; i < t.count; i++)
        if (pthread_create(&threads[i], NULL, work, &members[i])) abort();
    work(&members[0]);
    for (int i = 1; i < t.count; i++) pthread_join(threads[i], NULL);
    me = before;
}

void GOMP_barrier(void) {
    if (!me.of) return;
    pass();
    wait_for_turn();
}

void GOMP_loop_end(void) { GOMP_barrier(); }
void GOMP_loop_end_nowait(void) {}

int omp_get_thread_num(void) { return me.id; }
int omp_get_num_threads(void) { return me.of ? me.of->count : 1; }

static bool next(long *begin, long *end) {
    if (me.at >= me.end) return false;
    *begin = me.at;
    *end = me.at + me.size < me.end ? me.at + me.size : me.end;
    me.at += me.size * me.of->count;
    return true;
}

static bool start(long from, long to, long size, long *begin, long *end) {
    me.size = size > 0 ? size : 1, me.at = from + me.id * me.size, me.end = to;
    return next(begin, end);
}

#define LOOP(kind)                                                                       \
    bool GOMP_loop_nonmonotonic_##kind##_start(                                          \
        long from, long to, long step, long size, long *begin, long *end) {              \
        if (step != 1 || !me.of) abort();                                                \
        return start(from, to, size, begin, end);                                        \
    }                                                                                    \
    bool GOMP_loop_nonmonotonic_##kind##_next(long *begin, long *end) { return next(begin, end); }

LOOP(dynamic)
LOOP(guided)
