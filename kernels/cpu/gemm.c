/* GEMMs with weights that are packed once.

   out = x @ weight^T (+ bias), for any number of rows of x. Weights are packed in panels of PANEL
   outputs, [panel][k][output]. Each panel is read from memory once: it is prefetched while the
   previous panel is multiplied. For 16 to 256 rows, which are typical of a step, reading the
   weights takes about as long as multiplying. Without prefetching, a GEMM would reach only two
   thirds of the speed.

   The sums of up to TILE_ROWS rows and one panel stay in registers for the whole loop over k (Goto
   & van de Geijn 2008, https://doi.org/10.1145/1356052.1356053). Every output is one chain of fused
   multiply-adds in the order of k, so a row's bits do not depend on other rows. Other files have
   GEMMs of bfloat16 with AMX tiles (gemm_amx.inc), int8 codes (gemm_int8.c), codes with a scale for
   each group of columns (gemm_groups.c) and float8 codes (gemm_float8.inc).

   The header of a packed weight names the kernel that multiplies by it. */

#include "no_reassociation.h" /* keeps the order of sums, even without FMA instructions */

#include <stdlib.h>

#include "panel_prefetch.h"
#include "arguments.h"
#include "gemm_low_bit.h"
#include "epilogue.h"
#include "gemm_rows.h"
#include "amx_tiles.h"
#include "simd.h"

#define CHUNK 8 /* steps of k between prefetches */

#define ELEMENT float
#define FACTOR float /* type of the elements of x */
#define NAME(function) function##_f32
#define PER_STEP 1
#define FACTORS 1
#define DOTS 0
#define HALVES 0
#define LOAD_WEIGHTS(factor, w) load(w)
#define BROADCAST(factor, x) all_lanes(x)
#define LOAD(x) (x)
#define STORE(x) (x)
#define STORE_WIDE(to, x) store(to, x)
#include "gemm.inc"
#include "gemm_float8.inc"
#undef STORE_WIDE
#undef ELEMENT
#undef FACTOR
#undef NAME
#undef PER_STEP
#undef FACTORS
#undef DOTS
#undef HALVES
#undef LOAD_WEIGHTS
#undef BROADCAST
#undef LOAD
#undef STORE

#define ELEMENT uint16_t
#define NAME(function) function##_bf16
#define PER_STEP 2
#define DOTS HAS_PAIRS
#define HALVES !HAS_PAIRS /* bfloat16 rows are multiplied as floats */
#if HAS_PAIRS
#define FACTOR uint16_t
#define FACTORS 1
#define LOAD_WEIGHTS(factor, w) load((const float *)(w))
#define BROADCAST(factor, x) all_lanes_of_four(x)
#else /* multiply the first element of each pair, then the second */
#define FACTOR float
#define FACTORS 2
#define LOAD_WEIGHTS(factor, w) widened(factor, load((const float *)(w)))
#define BROADCAST(factor, x) all_lanes((x) + (factor))
#endif
#define LOAD(x) from_bf16(x)
#define STORE(x) to_bf16(x)
#if HAS_PAIRS
#define STORE_WIDE(to, x) store_rounded(to, x)
#else
#define STORE_WIDE(to, x) store_bf16(to, x)
#endif
#include "gemm.inc"
#include "gemm_float8.inc"

#if HAS_TILES
#include "gemm_amx.inc"
#endif

/* Returns the name of a kernel's instruction set, such as "AMX"; NULL if the kernel does not work
   on this processor. */
const char *gemm_instructions_f32(int kernel) { return kernel == VECTORS ? VECTORS_NAME : NULL; }

const char *gemm_instructions_bf16(int kernel) {
    if (kernel == TILES) return tiles_work() ? "AMX" : NULL;
    return kernel == VECTORS ? PAIRS_NAME : NULL;
}

int64_t packed_bytes_f32(const pack_args *a) { return sizeof(header) + 4 * panels_packed_f32(a); }

int64_t packed_bytes_bf16(const pack_args *a) {
#if HAS_TILES
    if (a->kernel == TILES) return sizeof(header) + 2 * tiles_packed(a);
#endif
    return sizeof(header) + 2 * panels_packed_bf16(a);
}

void pack_f32(const pack_args *a) {
    header *to = a->packed;
    *to = (header){.kernel = a->kernel, .kind = FLOATS};
    panels_pack_f32(a, (float *)(to + 1));
}

void pack_bf16(const pack_args *a) {
    header *to = a->packed;
    *to = (header){.kernel = a->kernel, .kind = FLOATS, .halves = HALVES && a->kernel != TILES};
#if HAS_TILES
    if (a->kernel == TILES) {
        tiles_pack(a, (uint16_t *)(to + 1));
        return;
    }
#endif
    panels_pack_bf16(a, (uint16_t *)(to + 1));
}

void gemm_team_f32(const gemm_args *a, const gemm_rows *x) {
    const header *from = a->packed;
    if (from->kind == INT8) gemm_int8(a, 0, x);
    else if (from->kind == GROUPS) gemm_groups(a, 0, x);
    else if (from->kind == FLOAT8) float8_gemm_f32(a, x, from);
    else panels_gemm_f32(a, x, (const float *)(from + 1));
}

void gemm_team_bf16(const gemm_args *a, const gemm_rows *x) {
    const header *from = a->packed;
    if (from->kind == INT8) gemm_int8(a, 1, x);
    else if (from->kind == GROUPS) gemm_groups(a, 1, x);
    else if (from->kind == FLOAT8) float8_gemm_bf16(a, x, from);
#if HAS_TILES
    else if (from->kernel == TILES) tiles_gemm(a, (const uint16_t *)(from + 1));
#endif
    else panels_gemm_bf16(a, x, (const uint16_t *)(from + 1));
}

/* Returns 1 if one thread should convert all rows before other threads start. For few rows,
   converting in one thread is faster than a barrier. */
static int rows_are_few(const gemm_args *a) { return a->num_rows * a->in_features <= 1 << 14; }

/* gemm_##type returns 0, or 1 if out of memory. If there are few rows, gemm_##type converts them
   with plain calls, outside the parallel region. `omp for` is not allowed there, because the caller
   may be a thread of a team in which each thread runs its own GEMM. */
#define GEMM(type, ELEMENT)                                                                    \
    static void convert_row_at_##type(const gemm_rows *to, const gemm_args *a, int64_t row) {  \
        convert_row_##type(to, (const ELEMENT *)a->x + row * a->row_stride, row);                 \
    }                                                                                          \
    void convert_rows_##type(const gemm_rows *to, const gemm_args *a) {                        \
        if (!need_conversion(to)) return;                                                             \
        _Pragma("omp for schedule(static) nowait")                                             \
        for (int64_t row = 0; row < a->num_rows; row++) convert_row_at_##type(to, a, row);        \
    }                                                                                          \
    int gemm_##type(const gemm_args *a) {                                                      \
        const int64_t bytes = gemm_rows_bytes(a);                                           \
        void *memory = bytes ? aligned_alloc(64, bytes) : NULL;                                \
        if (bytes && !memory) return 1;                                                        \
        const gemm_rows x = memory ? gemm_rows_in(memory, a) : (gemm_rows){0};        \
        const int few = rows_are_few(a);                                                       \
        for (int64_t row = 0; memory && few && row < a->num_rows; row++)                       \
            convert_row_at_##type(&x, a, row);                                                    \
        _Pragma("omp parallel num_threads(a->num_threads)")                                    \
        {                                                                                      \
            if (memory && !few) {                                                              \
                convert_rows_##type(&x, a);                                                       \
                _Pragma("omp barrier")                                                         \
            }                                                                                  \
            gemm_team_##type(a, &x);                                                           \
        }                                                                                      \
        free(memory);                                                                          \
        return 0;                                                                              \
    }

GEMM(f32, float)
GEMM(bf16, uint16_t)
