/* Gated DeltaNet over recurrent states in pool slots (Yang et al. 2024,
   https://arxiv.org/abs/2412.06464).

   The recurrence runs token by token, not in chunks: a piece of a head's matrix stays in the first
   cache while the tokens of its sequence stream past, so the plain recurrence is near the
   processor's limit. And a row's bits depend neither on how it is cut into steps nor on other rows,
   because each token's arithmetic is the same wherever its sequence was interrupted.

   Four passes over the step, each split over the threads, with float32 between them: the
   convolution; unit queries and keys, and gates; the recurrence; the gated norm. */

#include "recurrent_state.h"

typedef struct {
    paged_states states;
    convolution conv; /* of queries, keys and values; its output is a workspace */
    const void *gate, *decay, *beta;       /* [T, Hv * Dv], [T, Hv], [T, Hv] */
    void *out;                             /* [T, Hv * Dv], contiguous */
    const float *decay_rate, *dt_bias;     /* [Hv] */
    const float *norm;                     /* [Dv] */
    float *gates, *read;                   /* workspace: [T, 2, Hv], [T, Hv * Dv] */
    int64_t gate_stride, decay_stride, beta_stride; /* in elements */
    int64_t num_tokens, num_key_heads, num_heads, key_width, value_width;
    int32_t num_threads;
    float norm_eps, max_beta;
} gated_delta_args;

#define MAX_VECTORS 8 /* vectors of a piece's row that are computed at a time */

/* 1 / |x|, with transformers' epsilon. */
static inline float inverse_length(const float *x, int64_t width) {
    return 1.0f / sqrtf(sum_of_squares(x, width) + 1e-6f);
}

static void units_and_gates(const gated_delta_args *a) {
    const int64_t heads = a->num_heads, width = a->key_width;
    const float scale = 1.0f / sqrtf((float)width);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < a->num_tokens; t++) {
        float *mixed = a->conv.output + t * a->conv.num_channels;
        for (int64_t h = 0; h < 2 * a->num_key_heads; h++) {
            float *x = mixed + h * width;
            const float factor = inverse_length(x, width) * (h < a->num_key_heads ? scale : 1.0f);
            for (int64_t i = 0; i < width; i++) x[i] *= factor;
        }
        float *kept = a->gates + 2 * t * heads, *strength = kept + heads;
        for (int64_t h = 0; h < heads; h++) {
            const float x = kept[h] + a->dt_bias[h];
            kept[h] = expf(-a->decay_rate[h] * softplus(x));
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
    const int64_t rows = a->key_width, columns = a->states.columns;
    const int64_t values = a->num_heads * a->value_width, pieces = values / columns;
    const int64_t per_key = a->num_heads / a->num_key_heads, keys = a->num_key_heads * rows;
#pragma omp for schedule(dynamic, 4)
    for (int64_t task = 0; task < a->states.num_sequences * pieces; task++) {
        const int64_t sequence = task / pieces, number = task % pieces, column = number * columns;
        const int64_t head = column / a->value_width, key_head = head / per_key;
        const span s = span_of(&a->states, sequence);
        float *piece = matrix_piece(&a->states, sequence, number, rows);
        for (int64_t t = s.first; t < s.first + s.count; t++) {
            const float *mixed = a->conv.output + t * a->conv.num_channels;
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
#include "causal_conv.inc"
#include "gated_delta.inc"
#undef ELEMENT
#undef NAME
#undef LOAD
#undef STORE

#define ELEMENT uint16_t
#define NAME(function) function##_bf16
#define LOAD(x) from_bf16(x)
#define STORE(x) to_bf16(x)
#include "causal_conv.inc"
#include "gated_delta.inc"
