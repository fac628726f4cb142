/* Matrix products with weights packed once, for CPUs with AVX-512, compiled on first use.

   out = x @ weight^T (+ bias) for few rows x and many: weights are packed in panels of PANEL outputs,
   [panel][k][output], that are read from memory once, each while the one before is computed with.
   At the 16 to 256 rows of a step, reading the weights and multiplying take about as long; a
   product that does one after the other reaches two thirds of one that does both at once.

   A tile of up to TILE_ROWS rows and one panel is kept in registers over all of k (Goto & van de
   Geijn 2008, https://doi.org/10.1145/1356052.1356053). Every output is one chain of fused
   multiply-adds in the order of k, so that a row's bits do not depend on the other rows. */

#include "arguments.h"
#include "elements.h"

#if defined(__AVX512F__)
#include <immintrin.h>

#define PANEL 32     /* gemm.PANEL */
#define TILE_ROWS 14 /* 28 accumulators, 2 weights, and what is left for x */
#define CHUNK 8      /* steps of k between prefetches */
#define LINE 64      /* bytes of a cache line */

/* What a tile asks for while it computes: a share of the panel that comes next. */
typedef struct {
    const char *at, *end;
    int lines; /* per CHUNK steps of k */
} ahead;

#define ELEMENT float
#define NAME(function) function##_f32
#define PER_STEP 1
#define BROADCAST(x) _mm512_set1_ps(*(x))
#define LOAD_WEIGHTS(w) _mm512_loadu_ps(w)
#define MULTIPLY_ADD(sum, x, w) _mm512_fmadd_ps(x, w, sum)
#define FACTOR __m512
#define LOAD(x) (x)
#define STORE(x) (x)
#include "gemm.inc"
#undef ELEMENT
#undef NAME
#undef PER_STEP
#undef BROADCAST
#undef LOAD_WEIGHTS
#undef MULTIPLY_ADD
#undef FACTOR
#undef LOAD
#undef STORE

#if defined(__AVX512BF16__)
static inline __m512i pair(const uint16_t *x) {
    int32_t two;
    memcpy(&two, x, 4);
    return _mm512_set1_epi32(two);
}

#define ELEMENT uint16_t
#define NAME(function) function##_bf16
#define PER_STEP 2
#define BROADCAST(x) (__m512bh) pair(x)
#define LOAD_WEIGHTS(w) (__m512bh) _mm512_loadu_si512(w)
#define MULTIPLY_ADD(sum, x, w) _mm512_dpbf16_ps(sum, x, w)
#define FACTOR __m512bh
#define LOAD(x) from_bf16(x)
#define STORE(x) to_bf16(x)
#include "gemm.inc"
#endif
#endif
