/* Paged attention for CPUs, compiled on first use by compiled_library.py.

   The attend functions compute softmax(scale * q k^T) v over the blocks of a sequence, without
   gathering the blocks first. A task is one KV head and a few tiles. A tile is a few consecutive
   tokens of one sequence; it has a row for each token and each query head of the KV head. Scores
   are computed for PIECE positions at a time, and pieces are merged with an online softmax (Milakov
   & Gimelshein 2018, https://arxiv.org/abs/1805.02867). Pieces begin at multiples of PIECE. A
   piece's keys and values are read once for all rows that attend to them: the rows of a tile, or of
   all tiles of a task as long as these share blocks (the idea of Hydragen, Juravsky et al. 2024,
   https://arxiv.org/abs/2402.05099, and of ChunkAttention, Ye et al. 2024,
   https://arxiv.org/abs/2402.15220). Each row continues its own sum, so no partial results need to
   be merged.

   The terms of a row's sums, and their order, depend only on the row's position, not on its tile,
   task, step or thread, or on sequences that share its blocks. Positions that a token does not see
   never affect the token, even if they hold NaN. Sums are float32. */

#include <stdlib.h>

#include "arguments.h"
#include "kv_block_layout.h"
#include "small_gemm.h"
#include "amx_tiles.h"

#define PIECE 64
#define TASK_ROWS 192
#define AT_ONCE 16 /* positions between prefetches of values */

#include "attention_plan.h"

#define ELEMENT float
#define NAME attend_f32
#define LOAD(x) (x)
#define STORE(x) (x)
#define MULTIPLY_INC "attention_floats.inc"
#include "attention.inc"

/* Attention over a pool of float8 e4m3fn. */
#define STORED uint8_t
#define WIDEN widen_e4m3
#define ELEMENT float
#define NAME attend_f32_e4m3
#define LOAD(x) (x)
#define STORE(x) (x)
#define MULTIPLY_INC "attention_floats.inc"
#include "attention.inc"

#define STORED uint8_t
#define WIDEN widen_e4m3
#define ELEMENT uint16_t
#define NAME attend_bf16_e4m3
#define LOAD(x) from_bf16(x)
#define STORE(x) to_bf16(x)
#define MULTIPLY_INC "attention_floats.inc"
#include "attention.inc"

#if HAS_PAIRS || !HAS_TILES /* otherwise, the pool stores pairs for tiles */
#define ELEMENT uint16_t
#define NAME attend_vectors_bf16
#define LOAD(x) from_bf16(x)
#define STORE(x) to_bf16(x)
#if HAS_PAIRS
#define MULTIPLY_INC "attention_bf16_pairs.inc"
#else
#define MULTIPLY_INC "attention_floats.inc"
#endif
#include "attention.inc"
#endif

#if HAS_TILES
#define ELEMENT uint16_t
#define NAME attend_tiles_bf16
#define LOAD(x) from_bf16(x)
#define STORE(x) to_bf16(x)
#define MULTIPLY_INC "attention_amx.inc"
#include "attention.inc"
#endif

/* Returns the name of a kernel's instruction set; NULL if the kernel does not work on this
   processor. */
const char *attend_instructions_f32(int kernel) { return kernel == VECTORS ? VECTORS_NAME : NULL; }

const char *attend_instructions_e4m3(int kernel) { return kernel == VECTORS ? VECTORS_NAME : NULL; }

const char *attend_instructions_bf16(int kernel) {
    if (kernel == TILES) return tiles_work() ? "AMX" : NULL;
    return kernel == VECTORS && (HAS_PAIRS || !HAS_TILES) ? PAIRS_NAME : NULL;
}

int attend_team_f32(const attention_args *a, const attention_plan *p) {
    return attend_f32_team(a, p);
}

int attend_team_bf16(const attention_args *a, const attention_plan *p) {
#if HAS_TILES
    if (!HAS_PAIRS || a->kernel == TILES) return attend_tiles_bf16_team(a, p);
#endif
#if HAS_PAIRS || !HAS_TILES
    return attend_vectors_bf16_team(a, p);
#endif
}

/* Returns 0, or 1 if out of memory. */
#define ATTEND(name, team)                                                          \
    int name(const attention_args *a) {                                             \
        attention_plan *p = attention_plan_of(a);                                   \
        if (!p) return 1;                                                           \
        int failed = 0;                                                             \
        _Pragma("omp parallel num_threads(a->num_threads) reduction(|:failed)")     \
        failed |= team(a, p);                                                       \
        free_attention_plan(p);                                                     \
        return failed;                                                              \
    }

ATTEND(attend_f32, attend_team_f32)
ATTEND(attend_bf16, attend_team_bf16)
ATTEND(attend_f32_e4m3, attend_f32_e4m3_team)
ATTEND(attend_bf16_e4m3, attend_bf16_e4m3_team)

/* Returns 1 if blocks store 16-bit elements in pairs (kv_block_layout.h), else 0. */
int stores_pairs(void) { return PAIRED(uint16_t); }
