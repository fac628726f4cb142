/* What a layer does to each token on its own, for CPUs, compiled on first use by native.py.

   A row's bits depend on that row alone: sums run in an order that its width decides, and no loop
   crosses from one row into the next. Arithmetic is in float32, rounded once at the end. */

#include "elements.h"

#define MAX_HEAD_WIDTH 1024 /* native.MAX_HEAD_WIDTH */
#define LANES 32            /* running sums of one row */
#define WORTH_A_THREAD 16384 /* elements; below it, waking a thread costs more than it saves */

typedef struct {
    const void *x;      /* [rows, width] */
    const void *weight; /* [width] */
    void *out;          /* [rows, width], contiguous */
    int64_t num_rows, row_stride, width;
    int32_t num_threads;
    float eps, offset;
} rms_norm_args;

typedef struct {
    const void *gate_up; /* [rows, 2 * width] */
    void *out;           /* [rows, width] */
    int64_t num_rows, row_stride, out_row_stride, width;
    int32_t num_threads;
} silu_mul_args;

typedef struct {
    void *qkv;                   /* [T, (Hq + 2 * Hkv) * width] */
    const void *cos, *sin;       /* [T, rotary_width], contiguous */
    const void *q_norm, *k_norm; /* [width] or NULL */
    void *keys, *values;         /* [slot, Hkv, block_size, width] */
    const int64_t *slot_mapping; /* [T] slot * block_size + offset; negative: skip the token */
    int64_t token_stride;        /* in elements, as all strides here */
    int64_t keys_slot_stride, keys_head_stride, values_slot_stride, values_head_stride;
    int32_t num_tokens, num_heads, num_kv_heads, width, rotary_width, block_size, num_threads;
    float eps, offset;
} rotary_write_args;

#define ELEMENT float
#define NAME(function) function##_f32
#define LOAD(x) (x)
#define STORE(x) (x)
#include "row_ops.inc"
#undef ELEMENT
#undef NAME
#undef LOAD
#undef STORE

#define ELEMENT uint16_t
#define NAME(function) function##_bf16
#define LOAD(x) from_bf16(x)
#define STORE(x) to_bf16(x)
#include "row_ops.inc"
