/* Paged attention and KV write for CPUs, compiled on first use by native.py.

   attend: softmax(scale * q k^T) v over the blocks of a sequence, without gathering them all.
   One task is some tiles and one KV head; a tile is a few neighbouring tokens of one sequence, and
   its rows are the query heads of that KV head for each of its tokens. Scores are taken PIECE
   positions at a time and merged as in online softmax (Milakov & Gimelshein 2018,
   https://arxiv.org/abs/1805.02867); pieces begin at multiples of PIECE. A piece's keys and values
   are taken from their blocks once for all rows that read them: while the tiles of a task read the
   same blocks, as the step says, the rows of all of them (the idea of Hydragen, Juravsky et al.
   2024, https://arxiv.org/abs/2402.05099, and of ChunkAttention, Ye et al. 2024,
   https://arxiv.org/abs/2402.15220; as a row goes on from its own sum, nothing is merged after).

   What a row is summed from, and in which order, depends on its own position alone: not on the
   tile, the task, the step or the thread it is computed in, nor on who shares its blocks. What
   positions hold that a token does not see cannot matter to it. Accumulation is in float32. */

#include <stdlib.h>

#include "vectors.h"

#define PIECE 64
#define TASK_ROWS 192

typedef struct {
    const void *query; /* [T, Hq, Dk] */
    void *out;         /* [T, Hq, Dv], contiguous */
    const void *keys;  /* [slot, Hkv, block_size, Dk] */
    const void *values;
    const int32_t *block_tables; /* [S, table_width] */
    const int32_t *query_starts; /* [S + 1] */
    const int32_t *context_lens; /* [S] */
    const float *sinks;          /* [Hq] or NULL */
    const int32_t *order;        /* [S] sequences, those with a common prefix side by side */
    const int32_t *shared_lens;  /* [S] tokens each in `order` shares with the one before it */
    int64_t query_token_stride, query_head_stride; /* in elements, as all strides here */
    int64_t key_slot_stride, key_head_stride, value_slot_stride, value_head_stride;
    int64_t table_width;
    int32_t num_sequences, num_heads, num_kv_heads, key_width, value_width, block_size;
    int32_t sliding_window, num_threads;
    float scale, softcap;
} attention_args;

typedef struct {
    const void *key, *value;                     /* [T, Hkv, Dk], [T, Hkv, Dv] */
    void *keys, *values;
    const int64_t *slot_mapping;                 /* [T] slot * block_size + offset */
    int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;
    int64_t keys_slot_stride, keys_head_stride, values_slot_stride, values_head_stride;
    int32_t num_tokens, num_kv_heads, key_width, value_width, block_size, element_size;
} write_args;

/* Ask for what is read next: blocks lie apart, and no hardware prefetcher looks past a page.
   Measured 1.2 to 1.4 times the decode speed where the pool is larger than the caches. */
static inline void fetch(const void *start, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch((const char *)start + at, 0, 2);
}

#include "attend_plan.h"

#define ELEMENT float
#define NAME attend_f32
#define LOAD(x) (x)
#define STORE(x) (x)
#define WIDE(from) wide_f32(from)
#include "attend.inc"
#undef ELEMENT
#undef NAME
#undef LOAD
#undef STORE
#undef WIDE

#define ELEMENT uint16_t
#define NAME attend_bf16
#define LOAD(x) from_bf16(x)
#define STORE(x) to_bf16(x)
#define WIDE(from) wide_bf16(from)
#include "attend.inc"
#undef ELEMENT
#undef NAME
#undef LOAD
#undef STORE
#undef WIDE

void write_kv(const write_args *a) {
    const char *key = a->key, *value = a->value;
    char *keys = a->keys, *values = a->values;
    const int64_t size = a->element_size;
    for (int32_t t = 0; t < a->num_tokens; t++) {
        const int64_t slot = a->slot_mapping[t] / a->block_size;
        const int64_t offset = a->slot_mapping[t] % a->block_size;
        if (a->slot_mapping[t] < 0) continue;
        for (int32_t h = 0; h < a->num_kv_heads; h++) {
            memcpy(keys + size * (slot * a->keys_slot_stride + h * a->keys_head_stride
                                  + offset * a->key_width),
                   key + size * (t * a->key_token_stride + h * a->key_head_stride),
                   size * a->key_width);
            memcpy(values + size * (slot * a->values_slot_stride + h * a->values_head_stride
                                    + offset * a->value_width),
                   value + size * (t * a->value_token_stride + h * a->value_head_stride),
                   size * a->value_width);
        }
    }
}
