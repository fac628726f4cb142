/* Paged attention and KV write for CPUs, compiled on first use by native.py.

   attend: softmax(scale * q k^T) v over the blocks of a sequence, without gathering them.
   One task is a tile of tokens of one sequence and one KV head: the query heads of that KV head,
   for each token of the tile, are its rows, and share every key and value that is loaded. Scores
   are taken PIECE positions at a time and merged as in online softmax (Milakov & Gimelshein 2018,
   https://arxiv.org/abs/1805.02867); pieces begin at multiples of PIECE.

   What a row is summed from, and in which order, depends on its own position alone: not on the
   tile, the step or the thread it is computed in. What positions hold that a token does not see
   cannot matter to it. Accumulation is in float32. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define PIECE 256
#define TILE_ROWS 16

typedef struct {
    const void *query; /* [T, Hq, Dk] */
    void *out;         /* [T, Hq, Dv], contiguous */
    const void *keys;  /* [slot, Hkv, block_size, Dk] */
    const void *values;
    const int32_t *block_tables; /* [S, table_width] */
    const int32_t *query_starts; /* [S + 1] */
    const int32_t *context_lens; /* [S] */
    const float *sinks;          /* [Hq] or NULL */
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

/* exp for x <= 0, to 2 ulp; NaN stays NaN. Written out so that it vectorises everywhere. */
static inline float exp_negative(float x) {
    x = x < -87.0f ? -87.0f : x;
    float n = rintf(x * 1.44269504f);
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691e-4f;
    p = p * r + 1.3981999e-3f;
    p = p * r + 8.3334519e-3f;
    p = p * r + 4.1665796e-2f;
    p = p * r + 1.6666665e-1f;
    p = p * r + 5.0000001e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits = ((int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    return p * scale;
}

static inline float from_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint16_t to_bf16(float x) { /* to nearest, ties to even; NaN stays NaN */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline const float *widened(const uint16_t *source, float *buffer, int count) {
    for (int i = 0; i < count; i++) buffer[i] = from_bf16(source[i]);
    return buffer;
}

#ifdef __FMA__
#define FMA(a, b, c) __builtin_fmaf(a, b, c) /* unlike a sum, never reordered */
#else
#define FMA(a, b, c) ((a) * (b) + (c))
#endif

#define ELEMENT float
#define NAME attend_f32
#define LOAD(x) (x)
#define STORE(x) (x)
#define ROWS(source, buffer, count) (source)
#include "attend.inc"
#undef ELEMENT
#undef NAME
#undef LOAD
#undef STORE
#undef ROWS

#define ELEMENT uint16_t
#define NAME attend_bf16
#define LOAD(x) from_bf16(x)
#define STORE(x) to_bf16(x)
#define ROWS(source, buffer, count) widened(source, buffer, count)
#include "attend.inc"
#undef ELEMENT
#undef NAME
#undef LOAD
#undef STORE
#undef ROWS

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
