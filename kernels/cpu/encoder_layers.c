/* Runs encoder layers over packed sequences in one call: bidirectional attention within each
   sequence, and the post-norm structure of BERT (Devlin et al. 2018,
   https://arxiv.org/abs/1810.04805).

   A task has a few adjacent sequences, and one thread computes all layers of a task. Threads
   therefore wait for each other only once per step, and activations stay in a core's cache between
   layers. If there are fewer tasks than threads, all threads compute the whole step together, one
   operation after another.

   The terms of a token's sums, and their order, depend only on the token's own sequence, so the
   token's bits do not depend on tasks, threads or other sequences. */

#include <stdlib.h>

#include "panel_prefetch.h"
#include "encoder_arguments.h"
#include "epilogue.h"
#include "small_gemm.h"

#define TASK_ROWS 256      /* rows of the largest task, whose activations nearly fill an L2 cache */
/* Smallest limit for a task's rows. Small tasks at the end of a step let all threads finish at
   about the same time. */
#define LEAST_ROWS 64
#define QUERIES 48         /* queries whose scores are computed at once */
#define CHUNK 64           /* elements that the activation function processes at once */
#define CACHE_PERIOD 4096  /* equals gemm._CACHE_PERIOD */
#define MANY_ROWS 8        /* equals gemm._MANY_ROWS */
#define WORTH_A_THREAD 16384 /* with fewer elements, waking a thread costs more than it saves */

static inline int64_t whole_vectors(int64_t width) { return (width + LANES - 1) / LANES * LANES; }

/* Workspace of a task. */
typedef struct {
    void *attended, *inner; /* [rows, heads * head_width], [rows, inner width] */
    void *apart;            /* padded copies of rows, [rows, largest width + a cache line] */
    float *attention;       /* attention_floats floats for each thread */
} workspace;

/* Returns an upper bound on the number of floats that one head's keys, values, scores, sums and
   queries need. */
static int64_t attention_floats(const encoder_args *a, int64_t length) {
    const int64_t places = whole_vectors(length), width = whole_vectors(a->head_width);
    return 2 * width * places + QUERIES * (places + 2 * width);
}

static float lanes_sum(vec x) {
    for (int half = LANES / 2; half; half /= 2)
        for (int j = 0; j < half; j++) x[j] += x[j + half];
    return x[0];
}

/* Turns a row's scores [places] into weights that are not yet divided by their sum. Returns the
   sum. `places` is `length` rounded up to whole vectors; the additional places get weight 0. */
static __attribute__((noinline)) float weigh(float *s, int64_t length, int64_t places, float scale) {
    float top = -INFINITY;
    for (int64_t p = 0; p < length; p++) top = s[p] > top ? s[p] : top;
    for (int64_t p = 0; p < places; p++) s[p] = exp_negative((s[p] - top) * scale);
    for (int64_t p = length; p < places; p++) s[p] = 0.0f;
    vec sum = {0};
    for (int64_t p = 0; p < places; p += LANES) sum += load(s + p);
    return lanes_sum(sum);
}

/* Returns erf(x) with an error of at most 2e-7, using Eigen's rational approximation
   (Eigen/src/SpecialFunctions, generic_fast_erf_float). */
static inline float erf_of(float x) {
    x = x < -4.0f ? -4.0f : x;
    x = x > 4.0f ? 4.0f : x;
    const float y = x * x;
    float p = -2.72614225801306e-10f;
    p = p * y + 2.77068142495902e-08f;
    p = p * y - 2.10102402082508e-06f;
    p = p * y - 5.69250639462346e-05f;
    p = p * y - 7.34990630326855e-04f;
    p = p * y - 2.95459980854025e-03f;
    p = p * y - 1.60960333262415e-02f;
    float q = -1.45660718464996e-05f;
    q = q * y - 2.13374055278905e-04f;
    q = q * y - 1.68282697438203e-03f;
    q = q * y - 7.37332916720468e-03f;
    q = q * y - 1.42647390514189e-02f;
    return x * p / q;
}

static inline float gelu(float x) { return 0.5f * x * (1.0f + erf_of(x * 0.70710678f)); }

/* Returns x / (1 + exp(-u)). */
static inline float times_sigmoid(float x, float u) {
    const float e = exp_negative(-fabsf(u));
    return x * (u < 0.0f ? e : 1.0f) / (1.0f + e);
}

/* Returns 0.5 x (1 + tanh(u / 2)), which is x / (1 + exp(-u)). */
static inline float gelu_tanh(float x) {
    return times_sigmoid(x, 1.59576912f * (x + 0.044715f * x * x * x));
}

static inline float relu(float x) { return x < 0.0f ? 0.0f : x; }

/* Groups sequences into tasks, with smaller tasks towards the end, and returns the number of tasks.
   Task t has the sequences [firsts[t], firsts[t + 1]). */
static int64_t cut(const encoder_args *a, int64_t *firsts) {
    int64_t count = 0, first = 0;
    while (first < a->num_sequences) {
        const int64_t left = a->starts[a->num_sequences] - a->starts[first];
        int64_t most = left / (2 * a->num_threads), next = first + 1;
        most = most > TASK_ROWS ? TASK_ROWS : most < LEAST_ROWS ? LEAST_ROWS : most;
        while (next < a->num_sequences && a->starts[next + 1] - a->starts[first] <= most) next++;
        firsts[count++] = first;
        first = next;
    }
    firsts[count] = first;
    return count;
}

#define ELEMENT float
#define NAME(function) function##_f32
#define LOAD(x) (x)
#define STORE(x) (x)
#define LOAD_LANES load
#define STORE_LANES store
#define DOTS 0
#include "encoder_layers.inc"
#undef ELEMENT
#undef NAME
#undef LOAD
#undef STORE
#undef LOAD_LANES
#undef STORE_LANES
#undef DOTS

#define ELEMENT uint16_t
#define NAME(function) function##_bf16
#define LOAD(x) from_bf16(x)
#define STORE(x) to_bf16(x)
#define LOAD_LANES load_bf16
#define STORE_LANES store_rounded
#define DOTS HAS_PAIRS
#include "encoder_layers.inc"
