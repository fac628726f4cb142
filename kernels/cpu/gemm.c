/* Matrix products with weights packed once, compiled on first use.

   out = x @ weight^T (+ bias) for few rows x and many: weights are packed in panels of PANEL outputs,
   [panel][k][output], that are read from memory once, each while the one before is computed with.
   At the 16 to 256 rows of a step, reading the weights and multiplying take about as long; a
   product that does one after the other reaches two thirds of one that does both at once.

   A tile of up to TILE_ROWS rows and one panel is kept in registers over all of k (Goto & van de
   Geijn 2008, https://doi.org/10.1145/1356052.1356053). Every output is one chain of fused
   multiply-adds in the order of k, so that a row's bits do not depend on the other rows. */

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-associative-math") /* a chain, also where nothing is fused */
#elif defined(__clang__)
#pragma clang fp reassociate(off)
#endif

#include "arguments.h"
#include "vectors.h"

#define CHUNK 8 /* steps of k between prefetches */
#define LINE 64 /* bytes of a cache line */

/* What a tile asks for while it computes: a share of the panel that comes next. */
typedef struct {
    const char *at, *end;
    int lines; /* per CHUNK steps of k */
} ahead;

#define ELEMENT float
#define NAME(function) function##_f32
#define PER_STEP 1
#define FACTORS 1
#define DOTS 0
#define LOAD_WEIGHTS(factor, w) load(w)
#define BROADCAST(factor, x) all_lanes(x)
#define LOAD(x) (x)
#define STORE(x) (x)
#include "gemm.inc"
#undef ELEMENT
#undef NAME
#undef PER_STEP
#undef FACTORS
#undef DOTS
#undef LOAD_WEIGHTS
#undef BROADCAST
#undef LOAD
#undef STORE

#define ELEMENT uint16_t
#define NAME(function) function##_bf16
#define PER_STEP 2
#define DOTS HAS_PAIRS
#if HAS_PAIRS
#define FACTORS 1
#define LOAD_WEIGHTS(factor, w) load((const float *)(w))
#define BROADCAST(factor, x) all_lanes_of_pair(x)
#else /* the first of each pair, then the second */
#define FACTORS 2
#define LOAD_WEIGHTS(factor, w) widened(factor, load((const float *)(w)))
#define BROADCAST(factor, x) widened(factor, all_lanes_of_pair(x))
#endif
#define LOAD(x) from_bf16(x)
#define STORE(x) to_bf16(x)
#include "gemm.inc"

/* By what products are computed; a name for people. */
const char *gemm_instructions_f32(void) { return VECTORS_NAME; }
const char *gemm_instructions_bf16(void) { return PAIRS_NAME; }

/* Outputs of a panel. */
int gemm_panel(void) { return PANEL; }
