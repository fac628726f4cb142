/* Arguments of the kernels. The Python files in this folder declare the same structs for ctypes. */

#ifndef BATCHINFER_ARGUMENTS_H
#define BATCHINFER_ARGUMENTS_H

#include <stdint.h>

enum { VECTORS, TILES }; /* values of `kernel`, as in compiled_library.py */
enum { FLOATS, INT8, GROUPS, FLOAT8 }; /* kinds of packed weights: gemm._KINDS */

typedef struct {
    const void *query; /* [T, Hq, Dk] */
    void *out;         /* [T, Hq, Dv], last two dimensions contiguous */
    const void *keys;  /* [slot, Hkv] blocks with the layout of kv_block_layout.h */
    const void *values;
    const int32_t *block_tables; /* [S, table_width] */
    const int32_t *query_starts; /* [S + 1] */
    const int32_t *context_lens; /* [S] */
    const float *sinks;          /* [Hq] or NULL */
    const int32_t *order;        /* [S] sequence indices; sequences with a common prefix are
                                    adjacent */
    const int32_t *shared_lens;  /* [S] leading tokens that order[i - 1] and order[i] share */
    const int32_t *query_ends;   /* [T] one past the last position that each token sees; or NULL */
    const int32_t *prompt_lens;  /* [S] leading positions that the window does not hide; or NULL */
    int64_t query_token_stride, query_head_stride; /* in elements, like all strides */
    int64_t out_token_stride;
    int64_t key_slot_stride, key_head_stride, value_slot_stride, value_head_stride;
    int64_t table_width;
    int32_t num_sequences, num_heads, num_kv_heads, key_width, value_width, block_size;
    int32_t sliding_window, num_threads, kernel;
    float scale, softcap;
} attention_args;

typedef struct {
    const void *key, *value;                     /* [T, Hkv, Dk], [T, Hkv, Dv] */
    void *keys, *values;                         /* [slot, Hkv] blocks as in kv_block_layout.h */
    const int64_t *slot_mapping;                 /* [T] slot * block_size + offset */
    int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;
    int64_t keys_slot_stride, keys_head_stride, values_slot_stride, values_head_stride;
    int32_t num_tokens, num_kv_heads, key_width, value_width, block_size;
} write_args;

typedef struct {
    const void *x;      /* [rows, width] */
    const void *weight; /* [width] */
    void *out;          /* [rows, width] */
    int64_t num_rows, row_stride, out_row_stride, width;
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
    void *x;          /* [T, heads, width], last two dimensions contiguous; changed in place */
    const void *gate; /* [T, heads, width], last dimension contiguous; NULL: no gate */
    int64_t x_token_stride, gate_token_stride, gate_head_stride;
    int32_t num_tokens, num_heads, width, num_threads;
} sigmoid_mul_args;

typedef struct {
    void *qkv;                   /* [T, Hq * query_head_stride + 2 * Hkv * width] */
    const void *cos, *sin;       /* [T, rotary_width], contiguous */
    const void *q_norm, *k_norm; /* [width] or NULL */
    void *keys, *values;         /* [slot, Hkv] blocks as in kv_block_layout.h */
    const int64_t *slot_mapping; /* [T] slot * block_size + offset; negative: skip the token */
    int64_t token_stride, query_head_stride; /* in elements, like all strides */
    int64_t keys_slot_stride, keys_head_stride, values_slot_stride, values_head_stride;
    int32_t num_tokens, num_heads, num_kv_heads, width, rotary_width, block_size, num_threads;
    float eps, offset;
} rotary_write_args;

typedef struct {
    const void *x;      /* [rows, in] */
    const void *packed; /* written by a pack function */
    const void *bias;   /* [out] or NULL */
    void *out;          /* [rows, out], contiguous */
    int64_t num_rows, row_stride, in_features, out_features;
    int32_t num_threads, adds; /* adds: 1 to add to `out`, 0 to overwrite it */
} gemm_args;

typedef struct {
    const void *weight; /* [out, in], contiguous: floats or codes; GROUPS: unsigned codes */
    const void *scales;   /* for codes: [out] or [out, groups] floats; with `factors`: float8 */
    const float *factors; /* for GROUPS with a table: [out], multiplied by float8 scales; or NULL */
    const uint8_t *zeros; /* for GROUPS: [out, groups]; all 0 with `factors` */
    const int8_t *table;  /* for 4-bit codes: [16] value of each code; NULL: the code itself */
    const int32_t *order; /* for GROUPS: [in] column of x for each packed column; NULL: in order */
    void *packed;         /* output, packed_bytes bytes */
    int64_t in_features, out_features, group; /* group: number of columns that share a scale */
    int32_t num_threads, kernel; /* kernel: VECTORS or TILES */
    int32_t bits; /* for GROUPS: bits per code, 4 or 8 */
} pack_args;

typedef struct {
    const void *logits;  /* [rows, width] */
    float *maximum, *max_logprob; /* [rows] */
    int64_t *argmax;     /* [rows] */
    int64_t num_rows, row_stride, width;
    int32_t num_threads;
} row_stats_args;

typedef struct {
    void *logits;         /* [rows, width] */
    const int32_t *rows;  /* [num_masked] rows to mask, all different */
    const uint32_t *masks; /* [num_masked, words] bit i % 32 of word i / 32: token i is allowed */
    int64_t num_masked, row_stride, width, words;
    int32_t num_threads;
} token_bitmask_args;

typedef struct {
    const void *logits;    /* [R, vocab] */
    const int64_t *rows;   /* [D] index of each distribution's row of logits */
    const float *maximum;  /* [R] largest logit; rows where it is not finite are skipped */
    const float *temperature, *min_p, *top_p; /* [D] */
    const int32_t *top_k;  /* [D] 0 = all */
    const int64_t *starts; /* [D + 1] first sample of each distribution */
    const int64_t *bits;   /* [samples] random integers, uniform in [0, 2^24) */
    int64_t *token_ids;    /* [samples] */
    int64_t num_distributions, row_stride, vocab;
    int32_t num_threads, is_bf16; /* 1: logits are bfloat16; 0: float */
} draw_args;

typedef struct {
    const uint64_t *seed, *stream;         /* [count] */
    const int32_t *sample_index, *position; /* [count] */
    int64_t *bits;                         /* [count] */
    int64_t count;
} random_args;

/* A pre-norm layer: hidden += attention(norm(hidden)), then hidden += mlp(norm(hidden)). */
typedef struct {
    rms_norm_args attention_norm;
    gemm_args qkv;
    rotary_write_args rotary;
    attention_args attention;
    sigmoid_mul_args gate;
    gemm_args o;
    rms_norm_args mlp_norm;
    gemm_args gate_up;
    silu_mul_args silu;
    gemm_args down;
} layer_args;

typedef struct { /* fields of layer_args that depend on the step and are the same for many layers */
    void *hidden; /* [num_tokens, hidden width], contiguous */
    const void *cos, *sin;
    const int64_t *slot_mapping;
    const int32_t *block_tables, *query_starts, *context_lens, *order, *shared_lens;
    const int32_t *query_ends;
    int64_t table_width;
    int32_t num_tokens, num_sequences, num_threads;
} step_args;

typedef struct gemm_rows gemm_rows;           /* defined in gemm_rows.h */
typedef struct attention_plan attention_plan; /* defined in attention_plan.h */

int attend_f32(const attention_args *);
int attend_bf16(const attention_args *);
int attend_f32_e4m3(const attention_args *);
int attend_bf16_e4m3(const attention_args *);
int gemm_f32(const gemm_args *);
int gemm_bf16(const gemm_args *);
void rms_norm_f32(const rms_norm_args *);
void rms_norm_bf16(const rms_norm_args *);
void rotary_write_f32(const rotary_write_args *);
void rotary_write_bf16(const rotary_write_args *);
void silu_mul_f32(const silu_mul_args *);
void silu_mul_bf16(const silu_mul_args *);
void sigmoid_mul_f32(const sigmoid_mul_args *);
void sigmoid_mul_bf16(const sigmoid_mul_args *);

/* Returns the size in bytes of a GEMM's converted rows; 0 if the GEMM converts no rows. */
int64_t gemm_rows_bytes(const gemm_args *);
/* Returns pointers to the converted rows in `memory`, which has gemm_rows_bytes bytes. */
gemm_rows gemm_rows_in(void *memory, const gemm_args *);
void convert_row_f32(const gemm_rows *, const float *x, int64_t row);
void convert_row_bf16(const gemm_rows *, const uint16_t *x, int64_t row);

/* The team functions compute the same as the functions above, but all threads of a team (a parallel
   region) call them. Each thread computes its part, and returns without waiting for other threads.
   With a `gemm_rows` argument, a function also writes its output rows in the form that the next
   GEMM reads. */
void rms_norm_team_f32(const rms_norm_args *, const gemm_rows *);
void rms_norm_team_bf16(const rms_norm_args *, const gemm_rows *);
void silu_mul_team_f32(const silu_mul_args *, const gemm_rows *);
void silu_mul_team_bf16(const silu_mul_args *, const gemm_rows *);
void sigmoid_mul_team_f32(const sigmoid_mul_args *, const gemm_rows *);
void sigmoid_mul_team_bf16(const sigmoid_mul_args *, const gemm_rows *);
void rotary_write_team_f32(const rotary_write_args *);
void rotary_write_team_bf16(const rotary_write_args *);
void convert_rows_f32(const gemm_rows *, const gemm_args *);
void convert_rows_bf16(const gemm_rows *, const gemm_args *);
void gemm_team_f32(const gemm_args *, const gemm_rows *);
void gemm_team_bf16(const gemm_args *, const gemm_rows *);
/* Plans the tasks of a step's attention. Layers of equal shape can share a plan. Returns NULL if
   out of memory. */
attention_plan *attention_plan_of(const attention_args *);
void free_attention_plan(attention_plan *);
/* Returns 0, or 1 if the thread runs out of memory. */
int attend_team_f32(const attention_args *, const attention_plan *);
int attend_team_bf16(const attention_args *, const attention_plan *);

#endif
