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

#include "arguments.h"
#include "vectors.h"

#define PIECE 64
#define TASK_ROWS 192
#define AT_ONCE 16 /* positions between prefetches of values */

#include "attend_plan.h"

#define ELEMENT float
#define NAME attend_f32
#define LOAD(x) (x)
#define STORE(x) (x)
#define WIDE(from) wide_f32(from)
#define TAKEN "attend_plain.inc"
#define AS_THEY_LIE 1
#include "attend.inc"
#undef ELEMENT
#undef NAME
#undef LOAD
#undef STORE
#undef WIDE
#undef TAKEN
#undef AS_THEY_LIE

#define ELEMENT uint16_t
#define NAME attend_bf16
#define LOAD(x) from_bf16(x)
#define STORE(x) to_bf16(x)
#define WIDE(from) wide_bf16(from)
#if defined(__AVX512BF16__)
#define TAKEN "attend_pairs.inc"
#else
#define TAKEN "attend_plain.inc"
#endif
#define AS_THEY_LIE 0
#include "attend.inc"
#undef ELEMENT
#undef NAME
#undef LOAD
#undef STORE
#undef WIDE
#undef TAKEN
#undef AS_THEY_LIE

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
