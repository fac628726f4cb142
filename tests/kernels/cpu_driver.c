/* Tests the C kernels without Python, so that emulators of other processors can run it. It compares
   products and attention of pseudorandom inputs with plain loops in double precision, and checks
   that a row's result is the same alone and together with other rows. The tests of encoder layers
   are in encoder_driver.h.

   Compiled with kernels/cpu/{encoder_layers,gemm,gemm_groups,gemm_int8,paged_attention,row_ops,amx_tiles}.c.
   For each kernel, it prints the name of the instructions that ran, and a hash of the bits of all
   outputs. The exit code is 1 if a check failed. */

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "arguments.h"
#include "element_types.h"

void pack_f32(const pack_args *);
void pack_bf16(const pack_args *);
void write_kv_f32(const write_args *);
void write_kv_bf16(const write_args *);
void pack_int8(const pack_args *);
void pack_groups(const pack_args *);
int64_t packed_bytes_int8(const pack_args *);
int64_t packed_bytes_groups(const pack_args *);
int64_t packed_bytes_f32(const pack_args *);
int64_t packed_bytes_bf16(const pack_args *);
const char *gemm_instructions_f32(int kernel);
const char *gemm_instructions_bf16(int kernel);
const char *gemm_instructions_int8(int kernel);
const char *gemm_instructions_groups(int kernel);
const char *attend_instructions_f32(int kernel);
const char *attend_instructions_bf16(int kernel);

static uint64_t state;
static float scale = 1.0f; /* bound of the random inputs */
static int bits = 4;       /* per code of a GROUPS weight */
static int attend_by;
static int failures;
static uint64_t hash;

/* A number in [-1, 1). xorshift64*: Vigna 2016, https://doi.org/10.1145/2845077. */
static float uniform(void) {
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return (float)((state * 0x2545F4914F6CDD1Dull) >> 40) / 8388608.0f - 1.0f;
}

#define HASH_START 0xcbf29ce484222325ull

static void add_to_hash(const void *bytes, size_t count) { /* FNV-1a */
    for (size_t i = 0; i < count; i++) hash = (hash ^ ((const uint8_t *)bytes)[i]) * 0x100000001b3ull;
}

static void expect(int holds, const char *what, int is_bf16, int rows) {
    if (holds) return;
    failures++;
    printf("WRONG: %s, %s, %d rows\n", what, is_bf16 ? "bf16" : "f32", rows);
}

/* An array of float32 or bfloat16 numbers. */
typedef struct {
    int is_bf16;
    size_t count;
    void *at;
} array;

static float get(array a, size_t i) {
    return a.is_bf16 ? from_bf16(((uint16_t *)a.at)[i]) : ((float *)a.at)[i];
}

static void put(array a, size_t i, float value) {
    if (a.is_bf16) ((uint16_t *)a.at)[i] = to_bf16(value);
    else ((float *)a.at)[i] = value;
}

static array make(int is_bf16, size_t count, int filled) {
    array a = {is_bf16, count, NULL}; /* the exact size, so that a sanitizer sees accesses past the end */
    expect(!posix_memalign(&a.at, 64, count * (is_bf16 ? 2 : 4)), "memory", is_bf16, 0);
    for (size_t i = 0; i < count; i++) put(a, i, filled ? uniform() * scale : 0.0f);
    return a;
}

static void *place(array a, size_t i) { return (char *)a.at + i * (a.is_bf16 ? 2 : 4); }

static int same(array a, size_t at, array b, size_t from, size_t count) {
    return !memcmp(place(a, at), place(b, from), count * (a.is_bf16 ? 2 : 4));
}

#define MOST_ROWS 40

static void multiply_rows(
    array x, array packed, array bias, array out, int first, int rows, int in, int outs, int adds) {
    const gemm_args a = {
        .x = place(x, (size_t)first * in), .packed = packed.at, .bias = bias.at, .out = out.at,
        .num_rows = rows, .row_stride = in, .in_features = in, .out_features = outs,
        .num_threads = 2, .adds = adds};
    expect(!(x.is_bf16 ? gemm_bf16 : gemm_f32)(&a), "memory", x.is_bf16, rows);
}

/* Rounds a row of `a` to int8 as gemm_rows.h expects, and returns its scale. */
static float to_int8(array a, size_t from, int count, int8_t *codes) {
    float most = 0.0f;
    for (int i = 0; i < count; i++) most = fmaxf(most, fabsf(get(a, from + i)));
    const float inverse = 127.0f / most;
    for (int i = 0; i < count; i++) codes[i] = (int8_t)rintf(get(a, from + i) * inverse);
    return most * (1.0f / 127.0f);
}

/* Returns `a` as float32; if `rounded`, each row of `width` numbers is first rounded to int8. */
static array as_floats(array a, int rounded, int width) {
    array floats = {0, a.count, malloc(a.count * sizeof(float))};
    for (size_t i = 0; i < a.count; i++) put(floats, i, get(a, i));
    int8_t *codes = malloc(width);
    for (size_t row = 0; rounded && row < a.count; row += width) {
        const float step = to_int8(a, row, width, codes);
        for (int i = 0; i < width; i++) put(floats, row + i, codes[i] * step);
    }
    free(codes);
    return floats;
}

#define GROUP 32 /* codes that share a scale */

typedef struct {
    uint8_t *codes, *zeros;
    float *scales;
} coded;

/* Returns codes of a weight. INT8: each output's row is rounded. GROUPS: the codes are random, and
   the weight is overwritten with their values. */
static coded coded_of(array weight, int kind, int in) {
    const int groups = (in + GROUP - 1) / GROUP, middle = 1 << (bits - 1);
    const size_t outs = weight.count / in;
    coded c = {malloc(weight.count), malloc(outs * groups), malloc(outs * groups * sizeof(float))};
    for (size_t n = 0; n < outs && kind == INT8; n++)
        c.scales[n] = to_int8(weight, n * in, in, (int8_t *)c.codes + n * in);
    for (size_t i = 0; i < outs * groups && kind == GROUPS; i++)
        c.scales[i] = uniform() / (2 * middle), c.zeros[i] = (uint8_t)(middle + middle * uniform());
    for (size_t i = 0; i < weight.count && kind == GROUPS; i++) {
        const size_t at = i / in * groups + i % in / GROUP;
        c.codes[i] = (uint8_t)(middle + middle * uniform());
        put(weight, i, (c.codes[i] - c.zeros[at]) * c.scales[at]);
    }
    return c;
}

static array packed_of(array weight, int kernel, int kind, coded c, int in, int outs) {
    pack_args p = {.weight = kind ? c.codes : weight.at, .scales = c.scales, .zeros = c.zeros,
                   .in_features = in, .out_features = outs, .group = GROUP, .num_threads = 2,
                   .kernel = kernel, .bits = bits};
    const int bf16 = weight.is_bf16;
    const int64_t bytes = kind == INT8   ? packed_bytes_int8(&p)
                          : kind == GROUPS ? packed_bytes_groups(&p)
                                         : (bf16 ? packed_bytes_bf16 : packed_bytes_f32)(&p);
    array packed = make(bf16, bytes / (bf16 ? 2 : 4), 0);
    p.packed = packed.at;
    (kind == INT8 ? pack_int8 : kind == GROUPS ? pack_groups : bf16 ? pack_bf16 : pack_f32)(&p);
    return packed;
}

static void check_product(int is_bf16, int kernel, int kind, int in, int outs) {
    array x = make(is_bf16, (size_t)MOST_ROWS * in, 1);
    array weight = make(is_bf16 && kind != GROUPS, (size_t)outs * in, 1);
    array bias = make(is_bf16, outs, scale == 1.0f); /* 0 if inputs are tiny: it would hide them */
    array out = make(is_bf16, (size_t)MOST_ROWS * outs, scale == 1.0f);
    array some = make(is_bf16, (size_t)MOST_ROWS * outs, 0), there = make(is_bf16, out.count, 0);
    const coded codes = coded_of(weight, kind, in);
    const array packed = packed_of(weight, kernel, kind, codes, in, outs);
    memcpy(there.at, out.at, out.count * (is_bf16 ? 2 : 4));
    multiply_rows(x, packed, bias, out, 0, MOST_ROWS, in, outs, 1);
    const array rows_of_x = as_floats(x, kind, in), outputs = as_floats(weight, kind == INT8, in);
    int close = 1;
    for (int r = 0; r < MOST_ROWS; r++)
        for (int n = 0; n < outs; n++) {
            double sum = get(bias, n) + get(there, (size_t)r * outs + n), size = 1.0;
            for (int k = 0; k < in; k++) {
                const double term = (double)get(rows_of_x, (size_t)r * in + k)
                                    * get(outputs, (size_t)n * in + k);
                sum += term, size += fabs(term);
            }
            const double off = fabs(get(out, (size_t)r * outs + n) - sum);
            close &= off <= size * 1e-6 + fabs(sum) * (is_bf16 ? 0x1p-8 : 0);
        }
    expect(close, "product", is_bf16, MOST_ROWS);
    add_to_hash(out.at, out.count * (is_bf16 ? 2 : 4));
    multiply_rows(x, packed, bias, out, 0, MOST_ROWS, in, outs, 0);
    add_to_hash(out.at, out.count * (is_bf16 ? 2 : 4));
    /* Add the product to the negative of the output. Because the output was rounded, the low bits
       of the sums remain, so the hash covers them, too. */
    for (size_t i = 0; i < out.count; i++) put(some, i, -get(out, i));
    multiply_rows(x, packed, bias, some, 0, MOST_ROWS, in, outs, 1);
    add_to_hash(some.at, out.count * (is_bf16 ? 2 : 4));
    for (int rows = 1; rows <= MOST_ROWS; rows++)
        for (int first = 0; first + rows <= MOST_ROWS; first += rows) {
            multiply_rows(x, packed, bias, some, first, rows, in, outs, 0);
            expect(same(some, 0, out, (size_t)first * outs, (size_t)rows * outs),
                   "a row of a product depends on others", is_bf16, rows);
        }
    const array all[] = {x, weight, bias, out, some, there, packed, rows_of_x, outputs};
    for (size_t i = 0; i < sizeof(all) / sizeof(*all); i++) free(all[i].at);
    free(codes.codes), free(codes.zeros), free(codes.scales);
}

enum { HEADS = 6, KV_HEADS = 2, TOKENS = 150, TABLE = TOKENS };

/* Computes the attention of the last `count` of the first `end` tokens and writes it to the start
   of `out`. */
static void attend_to(
    array query, array keys, array values, const int32_t *table, int size, int width, int end,
    int count, int window, int32_t prompt, array out) {
    const int32_t starts[] = {0, count}, context = end;
    const attention_args a = {
        .query = place(query, (size_t)(end - count) * HEADS * width), .out = out.at,
        .keys = keys.at, .values = values.at, .block_tables = table, .query_starts = starts,
        .context_lens = &context, .query_token_stride = HEADS * width, .query_head_stride = width,
        .out_token_stride = HEADS * width, .key_slot_stride = KV_HEADS * size * width,
        .key_head_stride = size * width, .value_slot_stride = KV_HEADS * size * width,
        .value_head_stride = size * width, .table_width = TABLE, .num_sequences = 1,
        .num_heads = HEADS, .num_kv_heads = KV_HEADS, .key_width = width, .value_width = width,
        .block_size = size, .sliding_window = window, .prompt_lens = prompt ? &prompt : NULL,
        .num_threads = 2, .kernel = attend_by, .scale = 0.3f};
    expect(!(query.is_bf16 ? attend_bf16 : attend_f32)(&a), "memory", query.is_bf16, count);
}

static int attention_is_close(
    array query, array key, array value, array out, int width, int window, int prompt) {
    int close = 1;
    for (int t = 0; t < TOKENS; t++)
        for (int h = 0; h < HEADS; h++) {
            const size_t row = ((size_t)t * HEADS + h) * width, kv = h / (HEADS / KV_HEADS);
            double weights[TOKENS], sum = 0.0, result[256] = {0};
            for (int p = 0; p <= t; p++) {
                if (window && p >= prompt && p + window <= t) continue;
                double score = 0.0;
                for (int d = 0; d < width; d++)
                    score += (double)get(query, row + d) * get(key, (p * KV_HEADS + kv) * width + d);
                sum += weights[p] = exp(score * 0.3);
                for (int d = 0; d < width; d++)
                    result[d] += weights[p] * get(value, (p * KV_HEADS + kv) * width + d);
            }
            for (int d = 0; d < width; d++)
                close &= fabs(get(out, row + d) - result[d] / sum) <= (out.is_bf16 ? 1.6e-2 : 1e-5);
        }
    return close;
}

static void check_attention(int is_bf16, int size, int width, int window, int prompt) {
    const size_t kv = (size_t)KV_HEADS * width, row = (size_t)HEADS * width;
    const int blocks = (TOKENS + size - 1) / size;
    array query = make(is_bf16, TOKENS * row, 1), key = make(is_bf16, TOKENS * kv, 1);
    array value = make(is_bf16, TOKENS * kv, 1), out = make(is_bf16, TOKENS * row, 0);
    array keys = make(is_bf16, blocks * size * kv, 1), values = make(is_bf16, blocks * size * kv, 1);
    array some = make(is_bf16, TOKENS * row, 0);
    int32_t table[TABLE] = {0};
    int64_t slots[TOKENS];
    for (int b = 0; b < blocks; b++) table[b] = blocks - 1 - b;
    for (int t = 0; t < TOKENS; t++) slots[t] = (int64_t)table[t / size] * size + t % size;
    const write_args w = {
        .key = key.at, .value = value.at, .keys = keys.at, .values = values.at,
        .slot_mapping = slots, .key_token_stride = kv, .key_head_stride = width,
        .value_token_stride = kv, .value_head_stride = width, .keys_slot_stride = kv * size,
        .keys_head_stride = width * size, .values_slot_stride = kv * size,
        .values_head_stride = width * size, .num_tokens = TOKENS, .num_kv_heads = KV_HEADS,
        .key_width = width, .value_width = width, .block_size = size};
    (is_bf16 ? write_kv_bf16 : write_kv_f32)(&w);
    attend_to(query, keys, values, table, size, width, TOKENS, TOKENS, window, prompt, out);
    expect(attention_is_close(query, key, value, out, width, window, prompt), "attention", is_bf16,
           TOKENS);
    add_to_hash(out.at, out.count * (is_bf16 ? 2 : 4));
    const int chunks[] = {1, 7, 32};
    for (int c = 0; c < 3; c++)
        for (int first = 0; first < TOKENS; first += chunks[c]) {
            const int end = first + chunks[c] < TOKENS ? first + chunks[c] : TOKENS;
            attend_to(query, keys, values, table, size, width, end, end - first, window, prompt,
                      some);
            expect(same(some, 0, out, first * row, (end - first) * row),
                   "a token's attention depends on others", is_bf16, chunks[c]);
        }
    const array all[] = {query, key, value, out, keys, values, some};
    for (size_t i = 0; i < sizeof(all) / sizeof(*all); i++) free(all[i].at);
}

static void check_products(int is_bf16, int kernel, int kind, const char *name) {
    const int shapes[][2] = {{2, 1}, {34, 31}, {96, 33}, {130, 70}, {256, 64}};
    const char *kinds[] = {"", "int8 ", bits == 8 ? "int8-groups " : "int4 "};
    if (!name) return;
    state = 1, hash = HASH_START;
    for (size_t i = 0; i < sizeof(shapes) / sizeof(*shapes); i++)
        check_product(is_bf16, kernel, kind, shapes[i][0], shapes[i][1]);
    scale = 0x1p-64f; /* so that products and sums are near the smallest normal numbers */
    check_product(is_bf16, kernel, kind, 96, 40);
    scale = 1.0f;
    printf("product %s%s %016llx %s\n", kinds[kind], is_bf16 ? "bf16" : "f32",
           (unsigned long long)hash, name);
}

#include "encoder_driver.h"

int main(void) {
    const int blocks[][3] = {{16, 64, 0}, {16, 64, 37}, {32, 128, 0}, {48, 80, 50},
                             {16, 24, 0}, {3, 13, 20},  {1, 32, 0}};
    expect(isnan(exp_negative(NAN)) && exp_negative(-INFINITY) < 1e-37f, "exp", 0, 0);
    for (int is_bf16 = 0; is_bf16 < 2; is_bf16++) {
        const char *type = is_bf16 ? "bf16" : "f32";
        for (int kernel = 0; kernel < 2; kernel++) {
            check_products(is_bf16, kernel, FLOATS,
                           (is_bf16 ? gemm_instructions_bf16 : gemm_instructions_f32)(kernel));
            check_products(is_bf16, kernel, INT8, gemm_instructions_int8(kernel));
            for (bits = 4; bits <= 8; bits += 4)
                check_products(is_bf16, kernel, GROUPS, gemm_instructions_groups(kernel));
        }
        for (int kernel = 0; kernel < 2; kernel++) {
            const char *name = (is_bf16 ? attend_instructions_bf16 : attend_instructions_f32)(kernel);
            if (!name) continue;
            attend_by = kernel;
            state = 1, hash = HASH_START;
            for (size_t i = 0; i < sizeof(blocks) / sizeof(*blocks); i++)
                check_attention(is_bf16, blocks[i][0], blocks[i][1], blocks[i][2], 0);
            printf("attention %s %016llx %s\n", type, (unsigned long long)hash, name);
            check_attention(is_bf16, 16, 64, 9, 70);
            check_attention(is_bf16, 3, 13, 5, 64);
        }
        check_encoder(is_bf16);
    }
    return failures != 0;
}
