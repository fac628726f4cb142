/* Recurrent states in pool slots: arguments and addresses that all recurrent kernels share. See
   kernels/recurrent_state.py for the layout. */

#ifndef BATCHINFER_RECURRENT_STATE_H
#define BATCHINFER_RECURRENT_STATE_H

#include <math.h>
#include <stdlib.h>

#include "simd.h"

/* The states of one layer for the packed sequences of a step. */
typedef struct {
    float *slots;                /* [slot, elements of a slot] */
    const int32_t *tables;       /* [S, table_width] */
    const int32_t *query_starts; /* [S + 1] */
    const int32_t *context_lens; /* [S] */
    int64_t slot_stride, table_width, num_sequences;
    int64_t columns, per_slot, first; /* where the matrices are: see StatePlaces */
    int64_t channels, conv_per_slot, conv_first, conv_slot; /* where the convolution's inputs are */
} paged_states;

/* A causal depthwise convolution over all packed tokens. */
typedef struct {
    const void *input;         /* [T, num_channels] */
    const float *weight, *bias; /* [width, num_channels], [num_channels] or NULL */
    float *output;             /* [T, num_channels]; not used with a `gating` */
    int64_t input_stride, num_channels, width;
} convolution;

/* Only for a convolution that is a separate layer: factors of its inputs and outputs, and memory
   for its outputs in the model's element type. */
typedef struct {
    const void *before, *after; /* [T, num_channels], with the stride of the input, or NULL */
    void *output;               /* [T, num_channels], contiguous */
} gating;

#define CHANNEL_BLOCK 256 /* channels per task of a convolution or of Mamba-1's scan */
#define MAX_CONV_WIDTH 16
#define WORTH_A_TEAM 4096 /* with fewer elements, waking threads costs more than it saves */

typedef struct {
    int64_t first, count; /* index and number of the sequence's tokens among the packed tokens */
    int is_new;           /* 1 if the sequence has no state yet */
} span;

static inline span span_of(const paged_states *p, int64_t sequence) {
    const int64_t first = p->query_starts[sequence];
    const int64_t count = p->query_starts[sequence + 1] - first;
    return (span){first, count, p->context_lens[sequence] == count};
}

static inline float *piece_of(
    const paged_states *p, int64_t sequence, int64_t slot, int64_t piece, int64_t per_slot,
    int64_t elements) {
    const int32_t *slots = p->tables + sequence * p->table_width + slot;
    return p->slots + slots[piece / per_slot] * p->slot_stride + piece % per_slot * elements;
}

/* Returns piece `number` of a sequence's matrices, which have `rows` rows. Zeroes the piece if the
   sequence is new. */
static inline float *matrix_piece(
    const paged_states *p, int64_t sequence, int64_t number, int64_t rows) {
    const int64_t elements = rows * p->columns;
    float *piece = piece_of(p, sequence, 0, p->first + number, p->per_slot, elements);
    if (span_of(p, sequence).is_new) memset(piece, 0, elements * sizeof(float));
    return piece;
}

/* Returns log(1 + exp(x)). Computes a series instead of calling logf, so that every compiler can
   vectorize loops over this function. */
static inline float softplus(float x) {
    const float e = exp_negative(x < 0.0f ? x : -x);
    const float s = e / (2.0f + e), z = s * s; /* log(1 + e) = 2 atanh(s), which is a series in s */
    float series = 1.0f / 15.0f;
    series = series * z + 1.0f / 13.0f;
    series = series * z + 1.0f / 11.0f;
    series = series * z + 1.0f / 9.0f;
    series = series * z + 1.0f / 7.0f;
    series = series * z + 1.0f / 5.0f;
    series = series * z + 1.0f / 3.0f;
    series = series * z + 1.0f;
    return (x > 0.0f ? x : 0.0f) + 2.0f * s * series;
}

static inline float sum_of_squares(const float *x, int64_t width) {
    vec vectors[16 / LANES] = {0};
    float sums[16];
    int64_t i = 0;
    for (; i + 16 <= width; i += 16)
        for (int v = 0; v < 16 / LANES; v++) {
            const vec part = load(x + i + v * LANES);
            vectors[v] = fma_vec(part, part, vectors[v]);
        }
    memcpy(sums, vectors, sizeof(sums));
    for (; i < width; i++) sums[i % 16] = FMA(x[i], x[i], sums[i % 16]);
    for (int half = 8; half; half /= 2)
        for (int j = 0; j < half; j++) sums[j] += sums[j + half];
    return sums[0];
}

#endif
