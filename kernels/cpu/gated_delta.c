/* Gated DeltaNet over recurrent states in pool slots (Yang et al. 2024,
   https://arxiv.org/abs/2412.06464).

   The recurrence runs token by token, not in chunks: a piece of a head's matrix stays in the first
   cache while the tokens of its sequence stream past, so the plain recurrence is near the
   processor's limit. And a row's bits depend neither on how it is cut into steps nor on other rows,
   because each token's arithmetic is the same wherever its sequence was interrupted.

   Four passes over the step, each split over the threads, with float32 between them: the
   convolution; unit queries and keys, and gates; the recurrence; the gated norm. */

#include <math.h>
#include <stdlib.h>

#include "simd.h"

typedef struct {
    const void *qkv, *gate, *decay, *beta; /* [T, channels], [T, Hv * Dv], [T, Hv], [T, Hv] */
    void *out;                             /* [T, Hv * Dv], contiguous */
    const float *conv;                     /* [conv_width, channels] */
    const float *decay_rate, *dt_bias;     /* [Hv] */
    const float *norm;                     /* [Dv] */
    float *mixed, *gates, *read;           /* workspace: [T, channels], [T, 2, Hv], [T, Hv * Dv] */
    float *states;                         /* [slot, elements of a slot] */
    const int32_t *state_tables;           /* [S, table_width] */
    const int32_t *query_starts;           /* [S + 1] */
    const int32_t *context_lens;           /* [S] */
    int64_t qkv_stride, gate_stride, decay_stride, beta_stride; /* in elements */
    int64_t slot_stride, table_width, num_tokens, num_sequences, num_channels, conv_width;
    int64_t num_key_heads, num_heads, key_width, value_width;
    int64_t columns, per_slot, first;      /* place of the state: kernels/gated_delta.py */
    int64_t channels, conv_per_slot, conv_first, conv_slot;
    int32_t num_threads;
    float norm_eps, max_beta;
} gated_delta_args;

#define MAX_VECTORS 8   /* vectors of a piece's row that are computed at a time */
#define CHANNEL_BLOCK 64 /* channels of a task of the convolution */
#define WORTH_A_TEAM 4096 /* elements; below it, waking a thread costs more than it saves */

static inline float sigmoid(float x) {
    const float e = exp_negative(x < 0.0f ? x : -x);
    return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

typedef struct {
    int64_t first, count; /* its tokens in the packed row */
    int is_new;           /* whether it has no state yet */
} span;

static inline span span_of(const gated_delta_args *a, int64_t sequence) {
    const int64_t first = a->query_starts[sequence];
    const int64_t count = a->query_starts[sequence + 1] - first;
    return (span){first, count, a->context_lens[sequence] == count};
}

static inline float *piece_of(
    const gated_delta_args *a, int64_t sequence, int64_t slot, int64_t piece, int64_t per_slot,
    int64_t elements) {
    const int32_t *slots = a->state_tables + sequence * a->table_width + slot;
    return a->states + slots[piece / per_slot] * a->slot_stride + piece % per_slot * elements;
}

static inline float sum_of_squares(const float *x, int64_t width) {
    float sums[16] = {0};
    for (int64_t i = 0; i < width; i++) sums[i % 16] = FMA(x[i], x[i], sums[i % 16]);
    for (int half = 8; half; half /= 2)
        for (int j = 0; j < half; j++) sums[j] += sums[j + half];
    return sums[0];
}

/* 1 / |x|, with transformers' epsilon. */
static inline float inverse_length(const float *x, int64_t width) {
    return 1.0f / sqrtf(sum_of_squares(x, width) + 1e-6f);
}

static void units_and_gates(const gated_delta_args *a) {
    const int64_t heads = a->num_heads, width = a->key_width;
    const float scale = 1.0f / sqrtf((float)width);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < a->num_tokens; t++) {
        float *mixed = a->mixed + t * a->num_channels;
        for (int64_t h = 0; h < 2 * a->num_key_heads; h++) {
            float *x = mixed + h * width;
            const float factor = inverse_length(x, width) * (h < a->num_key_heads ? scale : 1.0f);
            for (int64_t i = 0; i < width; i++) x[i] *= factor;
        }
        float *kept = a->gates + 2 * t * heads, *strength = kept + heads;
        for (int64_t h = 0; h < heads; h++) {
            const float x = kept[h] + a->dt_bias[h];
            const float step = x > 20.0f ? x : log1pf(expf(x)); /* softplus, as torch cuts it off */
            kept[h] = expf(-a->decay_rate[h] * step);
            strength[h] = sigmoid(strength[h]) * a->max_beta;
        }
    }
}

/* One token in `vectors` vectors of columns of a piece: reads the value, writes the output. Sums run
   over the rows of the piece in order, rows of even and of odd number apart. */
INLINE void recur(
    const int vectors, float *piece, int64_t columns, int64_t rows, const float *query,
    const float *key, const float *value, float kept, float strength, float *out) {
    vec even[MAX_VECTORS], odd[MAX_VECTORS], delta[MAX_VECTORS];
    for (int v = 0; v < vectors; v++) even[v] = odd[v] = (vec){0};
    int64_t i = 0;
    for (; i + 2 <= rows; i += 2) {
        const float *row = piece + i * columns;
        const vec k0 = all_lanes(key + i), k1 = all_lanes(key + i + 1);
        for (int v = 0; v < vectors; v++) even[v] = fma_vec(load(row + v * LANES), k0, even[v]);
        row += columns;
        for (int v = 0; v < vectors; v++) odd[v] = fma_vec(load(row + v * LANES), k1, odd[v]);
    }
    if (i < rows)
        for (int v = 0; v < vectors; v++)
            even[v] = fma_vec(load(piece + i * columns + v * LANES), all_lanes(key + i), even[v]);
    const vec kept_lanes = all_lanes(&kept), strength_lanes = all_lanes(&strength);
    for (int v = 0; v < vectors; v++) {
        const vec recalled = (even[v] + odd[v]) * kept_lanes;
        delta[v] = (load(value + v * LANES) - recalled) * strength_lanes;
        even[v] = odd[v] = (vec){0};
    }
    for (i = 0; i + 2 <= rows; i += 2) {
        float *row = piece + i * columns;
        const vec k0 = all_lanes(key + i), q0 = all_lanes(query + i);
        for (int v = 0; v < vectors; v++) {
            const vec x = fma_vec(k0, delta[v], load(row + v * LANES) * kept_lanes);
            store(row + v * LANES, x);
            even[v] = fma_vec(x, q0, even[v]);
        }
        row += columns;
        const vec k1 = all_lanes(key + i + 1), q1 = all_lanes(query + i + 1);
        for (int v = 0; v < vectors; v++) {
            const vec x = fma_vec(k1, delta[v], load(row + v * LANES) * kept_lanes);
            store(row + v * LANES, x);
            odd[v] = fma_vec(x, q1, odd[v]);
        }
    }
    if (i < rows)
        for (int v = 0; v < vectors; v++) {
            float *at = piece + i * columns + v * LANES;
            const vec x = fma_vec(all_lanes(key + i), delta[v], load(at) * kept_lanes);
            store(at, x);
            even[v] = fma_vec(x, all_lanes(query + i), even[v]);
        }
    for (int v = 0; v < vectors; v++) store(out + v * LANES, even[v] + odd[v]);
}

/* The same for one column. */
static inline void recur_column(
    float *piece, int64_t columns, int64_t rows, const float *query, const float *key, float value,
    float kept, float strength, float *out) {
    float sums[2] = {0}, outs[2] = {0};
    for (int64_t i = 0; i < rows; i++) sums[i % 2] = FMA(piece[i * columns], key[i], sums[i % 2]);
    const float delta = (value - (sums[0] + sums[1]) * kept) * strength;
    for (int64_t i = 0; i < rows; i++) {
        const float x = FMA(key[i], delta, piece[i * columns] * kept);
        piece[i * columns] = x;
        outs[i % 2] = FMA(x, query[i], outs[i % 2]);
    }
    *out = outs[0] + outs[1];
}

static inline void recur_row(
    float *piece, int64_t columns, int64_t rows, const float *query, const float *key,
    const float *value, float kept, float strength, float *out) {
    int64_t at = 0;
    for (int64_t left = columns / LANES; left > 0;) {
#define CASE(n)                                                                                   \
    if (left >= n) {                                                                              \
        recur(n, piece + at, columns, rows, query, key, value + at, kept, strength, out + at);    \
        at += n * LANES, left -= n;                                                               \
        continue;                                                                                 \
    }
        CASE(8) CASE(4) CASE(2) CASE(1)
#undef CASE
    }
    for (; at < columns; at++)
        recur_column(
            piece + at, columns, rows, query, key, value[at], kept, strength, out + at);
}

static void recurrence(const gated_delta_args *a) {
    const int64_t rows = a->key_width, columns = a->columns, values = a->num_heads * a->value_width;
    const int64_t pieces = values / columns, per_key = a->num_heads / a->num_key_heads;
    const int64_t keys = a->num_key_heads * rows;
#pragma omp for schedule(dynamic, 4)
    for (int64_t task = 0; task < a->num_sequences * pieces; task++) {
        const int64_t sequence = task / pieces, number = task % pieces, column = number * columns;
        const int64_t head = column / a->value_width, key_head = head / per_key;
        const span s = span_of(a, sequence);
        float *piece
            = piece_of(a, sequence, 0, a->first + number, a->per_slot, rows * columns);
        if (s.is_new) memset(piece, 0, rows * columns * sizeof(float));
        for (int64_t t = s.first; t < s.first + s.count; t++) {
            const float *mixed = a->mixed + t * a->num_channels;
            const float *gates = a->gates + 2 * t * a->num_heads;
            recur_row(
                piece, columns, rows, mixed + key_head * rows, mixed + keys + key_head * rows,
                mixed + 2 * keys + column, gates[head], gates[a->num_heads + head],
                a->read + t * values + column);
        }
    }
}

#define ELEMENT float
#define NAME(function) function##_f32
#define LOAD(x) (x)
#define STORE(x) (x)
#include "gated_delta.inc"
#undef ELEMENT
#undef NAME
#undef LOAD
#undef STORE

#define ELEMENT uint16_t
#define NAME(function) function##_bf16
#define LOAD(x) from_bf16(x)
#define STORE(x) to_bf16(x)
#include "gated_delta.inc"
