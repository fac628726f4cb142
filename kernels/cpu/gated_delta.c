/* Gated DeltaNet over recurrent states in pool slots (Yang et al. 2024,
   https://arxiv.org/abs/2412.06464), and Kimi Delta Attention (Kimi Team 2025,
   https://arxiv.org/abs/2510.26692), in which each row of a head's matrix has its own decay.

   The recurrence runs token by token, not in chunks. Columns of a head's matrix stay in the L1
   cache while the sequence's tokens are computed, and each token reads and writes the columns once.
   A token's arithmetic is always the same, so a sequence's bits depend neither on how its tokens
   are divided into steps nor on other sequences.

   The four passes over the step, each split among the threads, with float32 results, are: the
   convolution; unit queries and keys, and gates; the recurrence; the gated norm. */

#include "gated_delta.h"

/* Largest number of vectors of a piece's row that a call to recur computes. With one token, most of
   the time is spent reading the state from memory, which is fastest by whole rows. With more
   tokens, the state is in the cache, and the sums should stay in registers: each vector takes 5
   registers, and AVX2 has 16. */
#define MAX_VECTORS 8
#define MOST_VECTORS_OF_SPAN (LANES == 8 ? 2 : 4)

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

/* A piece of a head's matrix, and the location of its inputs and outputs in the workspace. */
typedef struct {
    float *rows; /* [key width, columns] */
    int64_t head, key_head, column; /* number of the piece's first column among all heads' columns */
} matrix;

/* One token's inputs for a piece. */
typedef struct {
    const float *query, *key; /* [rows] */
    const float *recalling;   /* [rows]: the key, multiplied by the decay if each row has its own */
    const float *value;       /* [columns] */
    const float *kept;        /* decay of each row, or one decay for all rows */
    float strength;
} token_inputs;

INLINE token_inputs inputs_of(
    const gated_delta_args *a, const int by_row, const matrix *m, int64_t t) {
    const int64_t width = a->key_width, at = t * a->num_heads + m->head;
    const float *mixed = a->conv.output + t * a->conv.num_channels;
    const float *key = mixed + (a->num_key_heads + m->key_head) * width;
    return (token_inputs){
        .query = mixed + m->key_head * width,
        .key = key,
        .recalling = by_row ? a->decayed_keys + at * width : key,
        .value = mixed + 2 * a->num_key_heads * width + m->column,
        .kept = a->kept + at * a->decay_width,
        .strength = a->strength[at],
    };
}

/* Sums over the rows of a matrix, for adjacent columns that fill vectors. Rows are summed in order;
   rows with even and with odd numbers have separate sums, which shortens the chains of dependent
   additions. */
typedef struct {
    vec of[2][MAX_VECTORS];
} row_sums;

INLINE void add_row(const int vectors, const vec *row, const float *factor, vec *sums) {
    const vec f = all_lanes(factor);
    for (int v = 0; v < vectors; v++) sums[v] = fma_vec(row[v], f, sums[v]);
}

INLINE void load_row(const int vectors, const float *from, vec *row) {
    for (int v = 0; v < vectors; v++) row[v] = load(from + v * LANES);
}

/* Adds the value that a token's key recalls from the matrix to `recalled`. */
INLINE void recall(
    const int vectors, const float *at, int64_t columns, int64_t rows, const float *recalling,
    row_sums *recalled) {
    vec row[MAX_VECTORS];
    int64_t i = 0;
    for (; i + 2 <= rows; i += 2)
        for (int odd = 0; odd < 2; odd++) {
            load_row(vectors, at + (i + odd) * columns, row);
            add_row(vectors, row, recalling + i + odd, recalled->of[odd]);
        }
    if (i == rows) return;
    load_row(vectors, at + i * columns, row);
    add_row(vectors, row, recalling + i, recalled->of[0]);
}

/* Decays row i of the matrix, adds the token's update to the row, and adds the row's products to
   two sums: the value that the token's query reads, and, unless `next` is NULL, the value that the
   next token's key recalls. */
INLINE void write_row(
    const int vectors, float *at, vec kept, int64_t i, const token_inputs *token,
    const token_inputs *next, const vec *delta, vec *read, vec *recalled) {
    const vec key = all_lanes(token->key + i);
    vec row[MAX_VECTORS];
    for (int v = 0; v < vectors; v++) {
        row[v] = fma_vec(key, delta[v], load(at + v * LANES) * kept);
        store(at + v * LANES, row[v]);
    }
    add_row(vectors, row, token->query + i, read);
    if (next != NULL) add_row(vectors, row, next->recalling + i, recalled);
}

INLINE void write_rows(
    const int vectors, const int by_row, float *at, int64_t columns, int64_t rows,
    const token_inputs *token, const token_inputs *next, const vec *delta, row_sums *read,
    row_sums *recalled) {
    const vec decay = all_lanes(token->kept);
#define ROW(i, odd)                                                                          \
    write_row(                                                                               \
        vectors, at + (i) * columns, by_row ? all_lanes(token->kept + (i)) : decay, i, token, \
        next, delta, read->of[odd], recalled->of[odd])
    int64_t i = 0;
    for (; i + 2 <= rows; i += 2) {
        ROW(i, 0);
        ROW(i + 1, 1);
    }
    if (i < rows) ROW(i, 0);
#undef ROW
}

/* Computes a sequence's tokens for adjacent columns of a piece, which begin at column `column` and
   fill `vectors` vectors. Reads and writes the columns once for each token. */
INLINE void recur(
    const int vectors, const int by_row, const gated_delta_args *a, const matrix *m, span s,
    int64_t column) {
    const int64_t rows = a->key_width, columns = a->states.columns;
    float *at = m->rows + column, *out = a->read + m->column + column;
    token_inputs token = inputs_of(a, by_row, m, s.first);
    row_sums recalled = {0};
    recall(vectors, at, columns, rows, token.recalling, &recalled);
    for (int64_t t = s.first; t < s.first + s.count; t++) {
        const vec kept = all_lanes(token.kept), strength = all_lanes(&token.strength);
        vec delta[MAX_VECTORS];
        for (int v = 0; v < vectors; v++) {
            const vec sum = recalled.of[0][v] + recalled.of[1][v];
            const vec value = load(token.value + column + v * LANES);
            delta[v] = (value - (by_row ? sum : sum * kept)) * strength;
        }
        row_sums read = {0};
        recalled = (row_sums){0};
        if (t + 1 < s.first + s.count) {
            const token_inputs next = inputs_of(a, by_row, m, t + 1);
            write_rows(vectors, by_row, at, columns, rows, &token, &next, delta, &read, &recalled);
            token = next;
        } else
            write_rows(vectors, by_row, at, columns, rows, &token, NULL, delta, &read, &recalled);
        float *to = out + t * a->num_heads * a->value_width;
        for (int v = 0; v < vectors; v++) store(to + v * LANES, read.of[0][v] + read.of[1][v]);
    }
}

/* Like recur, for one column. */
INLINE void recur_column(
    const int by_row, const gated_delta_args *a, const matrix *m, span s, int64_t column) {
    const int64_t rows = a->key_width, columns = a->states.columns;
    float *at = m->rows + column, *out = a->read + m->column + column;
    for (int64_t t = s.first; t < s.first + s.count; t++) {
        const token_inputs token = inputs_of(a, by_row, m, t);
        float sums[2] = {0}, outs[2] = {0};
        for (int64_t i = 0; i < rows; i++)
            sums[i % 2] = FMA(at[i * columns], token.recalling[i], sums[i % 2]);
        const float recalled = (sums[0] + sums[1]) * (by_row ? 1.0f : token.kept[0]);
        const float delta = (token.value[column] - recalled) * token.strength;
        for (int64_t i = 0; i < rows; i++) {
            const float x = FMA(token.key[i], delta, at[i * columns] * token.kept[by_row ? i : 0]);
            at[i * columns] = x;
            outs[i % 2] = FMA(x, token.query[i], outs[i % 2]);
        }
        out[t * a->num_heads * a->value_width] = outs[0] + outs[1];
    }
}

INLINE void recur_all_columns(
    const int by_row, const gated_delta_args *a, const matrix *m, span s) {
    const int64_t columns = a->states.columns;
    const int64_t most = s.count == 1 ? MAX_VECTORS : MOST_VECTORS_OF_SPAN;
    int64_t at = 0;
    for (int64_t left = columns / LANES; left > 0;) {
#define CASE(n)                        \
    if (n <= most && n <= left) {      \
        recur(n, by_row, a, m, s, at); \
        at += n * LANES, left -= n;    \
        continue;                      \
    }
        CASE(8) CASE(4) CASE(2) CASE(1)
#undef CASE
    }
    for (; at < columns; at++) recur_column(by_row, a, m, s, at);
}

INLINE void recurrence(const gated_delta_args *a, const int by_row) {
    const int64_t columns = a->states.columns, pieces = a->num_heads * a->value_width / columns;
    const int64_t per_key = a->num_heads / a->num_key_heads;
#pragma omp for schedule(dynamic, 4)
    for (int64_t task = 0; task < a->states.num_sequences * pieces; task++) {
        const int64_t sequence = task / pieces, number = task % pieces, column = number * columns;
        const int64_t head = column / a->value_width;
        const matrix m = {
            .rows = matrix_piece(&a->states, sequence, number, a->key_width),
            .head = head,
            .key_head = head / per_key,
            .column = column,
        };
        const span s = span_of(&a->states, sequence);
        if (s.count > 0) recur_all_columns(by_row, a, &m, s);
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
