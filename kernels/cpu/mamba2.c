/* Mamba-2 over recurrent states in pool slots (Dao and Gu 2024, https://arxiv.org/abs/2405.21060).

   As in gated_delta.c, the recurrence runs token by token, so that a sequence's bits depend neither
   on how its tokens are divided into steps nor on other sequences.

   The four passes over the step, each split among the threads, with float32 results, are: the
   convolution; time steps and decays; the recurrence; the gated norm. */

#include "recurrent_state.h"

typedef struct {
    paged_states states;
    convolution conv; /* convolves values, B and C; writes to a workspace */
    const void *gate, *dt;                              /* [T, H * P], [T, H] */
    void *out;                                          /* [T, H * P], contiguous */
    const float *decay_rate, *dt_bias, *skip;           /* [H] */
    const float *norm;                                  /* [H * P] or NULL */
    float *steps, *read;                                /* workspace: [T, 2, H], [T, H * P] */
    int64_t gate_stride, dt_stride;                     /* in elements */
    int64_t num_tokens, num_groups, num_heads, state_size, head_width, norm_width;
    int32_t num_threads, gate_first;
    float norm_eps, min_dt, max_dt;
} mamba2_args;

#define MAX_VECTORS 8 /* largest number of vectors of a piece's row that a call to recur computes */

/* Replaces each token's dt in a->steps with the time steps, softplus(dt + dt_bias) clamped to
   [min_dt, max_dt], and stores the token's decays after its time steps. */
static void time_steps(const mamba2_args *a) {
    const int64_t heads = a->num_heads;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < a->num_tokens; t++) {
        float *step = a->steps + 2 * t * heads, *kept = step + heads;
        for (int64_t h = 0; h < heads; h++) {
            const float x = softplus(step[h] + a->dt_bias[h]);
            step[h] = x < a->min_dt ? a->min_dt : x > a->max_dt ? a->max_dt : x;
            kept[h] = expf(-a->decay_rate[h] * step[h]);
        }
    }
}

/* Computes one token for `vectors` vectors of a piece's columns. The rows of the piece are summed
   in order; rows with even and with odd numbers have separate sums. */
INLINE void recur(
    const int vectors, float *piece, int64_t columns, int64_t rows, const float *write,
    const float *read, const float *value, float step, float kept, float skip, float *out) {
    vec even[MAX_VECTORS], odd[MAX_VECTORS], scaled[MAX_VECTORS];
    const vec step_lanes = all_lanes(&step), kept_lanes = all_lanes(&kept);
    for (int v = 0; v < vectors; v++) {
        scaled[v] = load(value + v * LANES) * step_lanes;
        even[v] = odd[v] = (vec){0};
    }
    for (int64_t i = 0; i < rows; i++, piece += columns) {
        const vec b = all_lanes(write + i), c = all_lanes(read + i);
        vec *sums = i % 2 ? odd : even;
        for (int v = 0; v < vectors; v++) {
            const vec x = fma_vec(b, scaled[v], load(piece + v * LANES) * kept_lanes);
            store(piece + v * LANES, x);
            sums[v] = fma_vec(x, c, sums[v]);
        }
    }
    for (int v = 0; v < vectors; v++)
        store(
            out + v * LANES,
            fma_vec(load(value + v * LANES), all_lanes(&skip), even[v] + odd[v]));
}

/* Like recur, for one column. */
static inline void recur_column(
    float *piece, int64_t columns, int64_t rows, const float *write, const float *read, float value,
    float step, float kept, float skip, float *out) {
    float sums[2] = {0};
    for (int64_t i = 0; i < rows; i++) {
        const float x = FMA(write[i], value * step, piece[i * columns] * kept);
        piece[i * columns] = x;
        sums[i % 2] = FMA(x, read[i], sums[i % 2]);
    }
    *out = FMA(value, skip, sums[0] + sums[1]);
}

static void recurrence(const mamba2_args *a) {
    const int64_t rows = a->state_size, columns = a->states.columns;
    const int64_t values = a->num_heads * a->head_width, pieces = values / columns;
    const int64_t per_group = a->num_heads / a->num_groups;
#pragma omp for schedule(dynamic, 4)
    for (int64_t task = 0; task < a->states.num_sequences * pieces; task++) {
        const int64_t sequence = task / pieces, number = task % pieces, column = number * columns;
        const int64_t head = column / a->head_width, group = head / per_group;
        const span s = span_of(&a->states, sequence);
        float *piece = matrix_piece(&a->states, sequence, number, rows);
        for (int64_t t = s.first; t < s.first + s.count; t++) {
            const float *mixed = a->conv.output + t * a->conv.num_channels;
            const float *write = mixed + values + group * rows;
            const float *read = write + a->num_groups * rows, *value = mixed + column;
            const float step = a->steps[2 * t * a->num_heads + head];
            const float kept = a->steps[(2 * t + 1) * a->num_heads + head], skip = a->skip[head];
            float *out = a->read + t * values + column;
            int64_t at = 0;
            for (int64_t left = columns / LANES; left > 0;) {
#define CASE(n)                                                                                     \
    if (left >= n) {                                                                                \
        recur(                                                                                      \
            n, piece + at, columns, rows, write, read, value + at, step, kept, skip, out + at);     \
        at += n * LANES, left -= n;                                                                 \
        continue;                                                                                   \
    }
                CASE(8) CASE(4) CASE(2) CASE(1)
#undef CASE
            }
            for (; at < columns; at++)
                recur_column(
                    piece + at, columns, rows, write, read, value[at], step, kept, skip, out + at);
        }
    }
}

#define ELEMENT float
#define NAME(function) function##_f32
#define LOAD(x) (x)
#define STORE(x) (x)
#include "causal_conv.inc"
#include "mamba2.inc"
#undef ELEMENT
#undef NAME
#undef LOAD
#undef STORE

#define ELEMENT uint16_t
#define NAME(function) function##_bf16
#define LOAD(x) from_bf16(x)
#define STORE(x) to_bf16(x)
#include "causal_conv.inc"
#include "mamba2.inc"
