/* Gated DeltaNet over recurrent states in pool slots (Yang et al. 2024,
   https://arxiv.org/abs/2412.06464), and Kimi Delta Attention (Kimi Team 2025,
   https://arxiv.org/abs/2510.26692), in which each row of a head's matrix has its own decay.

   The recurrence runs token by token, not in chunks. A piece of a head's matrix stays in the L1
   cache while the tokens of its sequence are computed, so this simple recurrence nearly reaches the
   processor's peak speed. A sequence's bits depend neither on how it is cut into steps nor on other
   sequences, because each token's arithmetic is the same wherever its sequence is cut.

   There are four passes over the step, each split among the threads, with float32 results: the
   convolution; unit queries and keys, and gates; the recurrence; the gated norm. */

#include "gated_delta.h"

#define MAX_VECTORS 8 /* largest number of vectors of a piece's row that a call to recur computes */

/* Returns 1 / |x|, with transformers' epsilon. */
static inline float inverse_length(const float *x, int64_t width) {
    return 1.0f / sqrtf(sum_of_squares(x, width) + 1e-6f);
}

/* Replaces a head's decay inputs with its decays. If each row has its own decay, also stores the
   product of the head's key and the decays in a->decayed_keys. */
static inline void decay_head(const gated_delta_args *a, int64_t t, int64_t head) {
    const int64_t width = a->decay_width, at = t * a->num_heads + head;
    const float rate = a->decay_rate[head], *bias = a->dt_bias + head * width;
    float *kept = a->kept + at * width;
    for (int64_t i = 0; i < width; i++) kept[i] = exp_negative(-rate * softplus(kept[i] + bias[i]));
    if (a->decayed_keys == NULL) return;
    const int64_t key_head = head / (a->num_heads / a->num_key_heads) + a->num_key_heads;
    const float *key = a->conv.output + t * a->conv.num_channels + key_head * width;
    float *decayed = a->decayed_keys + at * width;
    for (int64_t i = 0; i < width; i++) decayed[i] = kept[i] * key[i];
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
        float *strength = a->strength + t * heads;
        for (int64_t h = 0; h < heads; h++) {
            decay_head(a, t, h);
            strength[h] = sigmoid(strength[h]) * a->max_beta;
        }
    }
}

/* One token's inputs for a head's matrix. */
typedef struct {
    const float *query, *key; /* [rows] */
    const float *recalling;   /* [rows]: the key, multiplied by the decay if each row has its own */
    const float *value;       /* [columns] */
    const float *kept;        /* decay of each row, or one decay for all rows */
    float strength;
} token_inputs;

/* Decays a row of a piece, adds the token's update to it, and adds what the query then reads from
   it to `sums`. */
INLINE void write_row(
    const int vectors, float *row, float key, float query, vec kept, const vec *delta, vec *sums) {
    const vec k = all_lanes(&key), q = all_lanes(&query);
    for (int v = 0; v < vectors; v++) {
        const vec x = fma_vec(k, delta[v], load(row + v * LANES) * kept);
        store(row + v * LANES, x);
        sums[v] = fma_vec(x, q, sums[v]);
    }
}

/* Computes one token for adjacent columns of a piece, which begin at column `column` and fill
   `vectors` vectors. The rows of the piece are summed in order; rows with even and with odd numbers
   have separate sums. */
INLINE void recur(
    const int vectors, const int by_row, float *piece, int64_t columns, int64_t rows,
    const token_inputs *token, int64_t column, float *out) {
    const float *query = token->query, *key = token->key, *value = token->value + column;
    const float *recalling = token->recalling, *kept = token->kept;
    vec even[MAX_VECTORS], odd[MAX_VECTORS], delta[MAX_VECTORS];
    for (int v = 0; v < vectors; v++) even[v] = odd[v] = (vec){0};
    piece += column;
    int64_t i = 0;
    for (; i + 2 <= rows; i += 2) {
        const float *row = piece + i * columns;
        const vec k0 = all_lanes(recalling + i), k1 = all_lanes(recalling + i + 1);
        for (int v = 0; v < vectors; v++) even[v] = fma_vec(load(row + v * LANES), k0, even[v]);
        row += columns;
        for (int v = 0; v < vectors; v++) odd[v] = fma_vec(load(row + v * LANES), k1, odd[v]);
    }
    if (i < rows)
        for (int v = 0; v < vectors; v++)
            even[v] = fma_vec(
                load(piece + i * columns + v * LANES), all_lanes(recalling + i), even[v]);
    const vec decay = all_lanes(kept), strength = all_lanes(&token->strength);
    for (int v = 0; v < vectors; v++) {
        const vec sum = even[v] + odd[v], recalled = by_row ? sum : sum * decay;
        delta[v] = (load(value + v * LANES) - recalled) * strength;
        even[v] = odd[v] = (vec){0};
    }
#define ROW(i, sums)                                                                              \
    write_row(                                                                                    \
        vectors, piece + (i) * columns, key[i], query[i], by_row ? all_lanes(kept + (i)) : decay, \
        delta, sums)
    for (i = 0; i + 2 <= rows; i += 2) {
        ROW(i, even);
        ROW(i + 1, odd);
    }
    if (i < rows) ROW(i, even);
#undef ROW
    for (int v = 0; v < vectors; v++) store(out + column + v * LANES, even[v] + odd[v]);
}

/* Does the same as recur for one column. */
INLINE void recur_column(
    const int by_row, float *piece, int64_t columns, int64_t rows, const token_inputs *token,
    int64_t column, float *out) {
    const float *query = token->query, *key = token->key, *kept = token->kept;
    float sums[2] = {0}, outs[2] = {0};
    piece += column;
    for (int64_t i = 0; i < rows; i++)
        sums[i % 2] = FMA(piece[i * columns], token->recalling[i], sums[i % 2]);
    const float recalled = (sums[0] + sums[1]) * (by_row ? 1.0f : kept[0]);
    const float delta = (token->value[column] - recalled) * token->strength;
    for (int64_t i = 0; i < rows; i++) {
        const float x = FMA(key[i], delta, piece[i * columns] * kept[by_row ? i : 0]);
        piece[i * columns] = x;
        outs[i % 2] = FMA(x, query[i], outs[i % 2]);
    }
    out[column] = outs[0] + outs[1];
}

INLINE void recur_all_columns(
    const int by_row, float *piece, int64_t columns, int64_t rows, const token_inputs *token,
    float *out) {
    int64_t at = 0;
    for (int64_t left = columns / LANES; left > 0;) {
#define CASE(n)                                                     \
    if (left >= n) {                                                \
        recur(n, by_row, piece, columns, rows, token, at, out);     \
        at += n * LANES, left -= n;                                 \
        continue;                                                   \
    }
        CASE(8) CASE(4) CASE(2) CASE(1)
#undef CASE
    }
    for (; at < columns; at++) recur_column(by_row, piece, columns, rows, token, at, out);
}

INLINE void recurrence(const gated_delta_args *a, const int by_row) {
    const int64_t rows = a->key_width, columns = a->states.columns, heads = a->num_heads;
    const int64_t values = heads * a->value_width, pieces = values / columns;
    const int64_t per_key = heads / a->num_key_heads, keys = a->num_key_heads * rows;
#pragma omp for schedule(dynamic, 4)
    for (int64_t task = 0; task < a->states.num_sequences * pieces; task++) {
        const int64_t sequence = task / pieces, number = task % pieces, column = number * columns;
        const int64_t head = column / a->value_width, key_head = head / per_key;
        const span s = span_of(&a->states, sequence);
        float *piece = matrix_piece(&a->states, sequence, number, rows);
        for (int64_t t = s.first; t < s.first + s.count; t++) {
            const float *mixed = a->conv.output + t * a->conv.num_channels;
            const float *key = mixed + keys + key_head * rows;
            const token_inputs token = {
                .query = mixed + key_head * rows,
                .key = key,
                .recalling = by_row ? a->decayed_keys + (t * heads + head) * rows : key,
                .value = mixed + 2 * keys + column,
                .kept = a->kept + (t * heads + head) * a->decay_width,
                .strength = a->strength[t * heads + head],
            };
            recur_all_columns(by_row, piece, columns, rows, &token, a->read + t * values + column);
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
