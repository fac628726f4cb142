/* Draws tokens from rows of logits.

   Probabilities are integers in units of 2^-40 of the most likely token's probability, as in
   worker/sampling/on_cpu.py. Sums therefore do not depend on their order, and a row's tokens do not
   depend on other rows. */

#include <stdlib.h>

#include "arguments.h"
#include "element_types.h"

#define GROUP 16 /* logits per group; groups with a small maximum are skipped */
#define WEIGHT_OF_MAX 1099511627776.0f /* 2^40 */
#define RANDOM_BITS 24                 /* equals RANDOM_BITS of worker/sampling/on_cpu.py */
#define FIRST_CANDIDATES 256

/* Maps floats to unsigned integers that sort in the same order; -0 counts as 0. */
static inline uint32_t ascending(float x) {
    uint32_t bits;
    x += 0.0f;
    memcpy(&bits, &x, 4);
    if (bits == 0x80000000u) bits = 0;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/* Returns a token's key. The most likely token has the smallest key; ties are broken by id. */
static inline uint64_t key_of(float x, uint32_t id) {
    return (uint64_t)~ascending(x) << 32 | id;
}

static int by_key(const void *a, const void *b) {
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* Returns the k-th largest value, counting from 0 (Hoare 1961, FIND). Reorders `values`. */
static float kth_largest(float *values, int64_t count, int64_t k) {
    int64_t low = 0, high = count - 1;
    while (low < high) {
        const float pivot = values[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (values[i] > pivot) i++;
            while (values[j] < pivot) j--;
            if (i <= j) {
                const float value = values[i];
                values[i++] = values[j];
                values[j--] = value;
            }
        }
        if (k <= j) high = j;
        else if (k >= i) low = i;
        else break;
    }
    return values[k];
}

typedef struct {
    float *maxima;    /* [vocab / GROUP + 1] */
    float *sorted;    /* a copy of the maxima, to be reordered */
    int64_t *weights; /* [vocab] */
    uint64_t *keys;   /* [vocab + 1] */
    float *row;       /* [vocab], a row of bfloat16 logits as floats */
} scratch;

/* Returns the largest of `count` adjacent logits, none of which is NaN. */
static inline float largest_of(const float *x, int64_t count) {
    float tops[GROUP / 4];
    for (int j = 0; j < GROUP / 4; j++) tops[j] = -INFINITY;
    if (count == GROUP)
        for (int i = 0; i < GROUP; i += GROUP / 4)
            for (int j = 0; j < GROUP / 4; j++) tops[j] = x[i + j] > tops[j] ? x[i + j] : tops[j];
    else
        for (int64_t i = 0; i < count; i++) tops[0] = x[i] > tops[0] ? x[i] : tops[0];
    for (int half = GROUP / 8; half; half /= 2)
        for (int j = 0; j < half; j++) tops[j] = tops[half + j] > tops[j] ? tops[half + j] : tops[j];
    return tops[0];
}

/* Finds the keys of the `size` most likely tokens, in order. At least `size` tokens reach the
   `size`-th largest of the groups' maxima, so only tokens that reach this value are sorted. */
static void most_likely(const float *x, int64_t vocab, int64_t size, const scratch *s) {
    const int64_t groups = (vocab + GROUP - 1) / GROUP;
    float least = -INFINITY;
    if (size < groups) {
        for (int64_t g = 0; g < groups; g++) {
            const int64_t left = vocab - g * GROUP;
            s->maxima[g] = largest_of(x + g * GROUP, left < GROUP ? left : GROUP);
        }
        memcpy(s->sorted, s->maxima, groups * sizeof(float));
        least = kth_largest(s->sorted, groups, size - 1);
    }
    int64_t count = 0;
    for (int64_t g = 0; g < groups; g++) {
        if (size < groups && s->maxima[g] < least) continue;
        const int64_t end = (g + 1) * GROUP < vocab ? (g + 1) * GROUP : vocab;
        for (int64_t i = g * GROUP; i < end; i++) {
            s->keys[count] = key_of(x[i], (uint32_t)i);
            count += x[i] >= least;
        }
    }
    qsort(s->keys, count, sizeof(uint64_t), by_key);
}

static inline int64_t weight(float x, float top, float temperature, float min_p) {
    const float relative = exp_negative((x - top) / temperature);
    return relative < min_p ? 0 : (int64_t)(relative * WEIGHT_OF_MAX);
}

/* Returns floor(total * bits / 2^RANDOM_BITS). */
static inline int64_t target(int64_t total, int64_t bits) {
    return (int64_t)((unsigned __int128)total * (uint64_t)bits >> RANDOM_BITS);
}

/* Computes the weights of the whole vocabulary, and returns their sum. */
static int64_t weigh_all(
    const draw_args *a, int64_t d, const float *x, float top, const scratch *s) {
    const float temperature = a->temperature[d], min_p = a->min_p[d];
    const int64_t vocab = a->vocab; /* a copy, because stores might alias a->vocab */
    int64_t *weights = s->weights, total = 0;
    for (int64_t i = 0; i < vocab; i++) {
        weights[i] = weight(x[i], top, temperature, min_p);
        total += weights[i];
    }
    return total;
}

/* Draws from all tokens. */
static void draw_from_all(
    const draw_args *a, int64_t d, const float *x, float top, const scratch *s) {
    const int64_t total = weigh_all(a, d, x, top, s);
    for (int64_t k = a->starts[d]; k < a->starts[d + 1]; k++) {
        const int64_t at = target(total, a->bits[k]);
        int64_t id = 0;
        for (int64_t sum = s->weights[0]; sum <= at; sum += s->weights[id]) id++;
        a->token_ids[k] = id;
    }
}

/* Finds the keys and weights of the tokens that top-k and then top-p keep, most likely first.
   Returns the number of these tokens. Top-p keeps the smallest number of most likely tokens whose
   share of the weight after top-k reaches top_p (Holtzman et al. 2020,
   https://arxiv.org/abs/1904.09751). */
static int64_t keep(const draw_args *a, int64_t d, const float *x, float top, const scratch *s) {
    const int64_t vocab = a->vocab;
    const int limited = a->top_k[d] > 0 && a->top_k[d] < vocab;
    int64_t total = limited ? 0 : weigh_all(a, d, x, top, s);
    int64_t size = limited ? a->top_k[d] : FIRST_CANDIDATES < vocab ? FIRST_CANDIDATES : vocab;
    for (;; size = 8 * size < vocab ? 8 * size : vocab) {
        most_likely(x, vocab, size, s);
        for (int64_t i = 0; i < size; i++)
            s->weights[i] = weight(x[(uint32_t)s->keys[i]], top, a->temperature[d], a->min_p[d]);
        for (int64_t i = 0; limited && i < size; i++) total += s->weights[i];
        const double goal = (double)a->top_p[d] * (double)total;
        int64_t mass = 0;
        for (int64_t i = 0; i < size; i++) {
            mass += s->weights[i];
            if (!((double)mass < goal)) return i + 1;
        }
        if (limited || size == vocab) return size;
    }
}

/* Draws from the tokens that top-k and top-p keep. Like draw_from_all, adds weights in the order of
   ids. */
static void draw_from_kept(
    const draw_args *a, int64_t d, const float *x, float top, const scratch *s) {
    const int64_t count = keep(a, d, x, top, s);
    int64_t total = 0;
    for (int64_t i = 0; i < count; i++) {
        total += s->weights[i];
        s->keys[i] = (uint64_t)(uint32_t)s->keys[i] << 32 | (uint64_t)i;
    }
    qsort(s->keys, count, sizeof(uint64_t), by_key);
    for (int64_t k = a->starts[d]; k < a->starts[d + 1]; k++) {
        const int64_t at = target(total, a->bits[k]);
        int64_t i = 0;
        for (int64_t sum = s->weights[(uint32_t)s->keys[0]]; sum <= at;
             sum += s->weights[(uint32_t)s->keys[i]])
            i++;
        a->token_ids[k] = (int64_t)(s->keys[i] >> 32);
    }
}

/* Returns a row of logits as floats. bfloat16 logits are converted into the scratch memory. */
static const float *row_of(const draw_args *a, int64_t d, const scratch *s) {
    const int64_t start = a->rows[d] * a->row_stride;
    if (!a->is_bf16) return (const float *)a->logits + start;
    const uint16_t *x = (const uint16_t *)a->logits + start;
    float *row = s->row;
    for (int64_t i = 0, vocab = a->vocab; i < vocab; i++) row[i] = from_bf16(x[i]);
    return row;
}

/* Returns 0, or 1 if out of memory. */
int draw(const draw_args *a) {
    const int64_t vocab = a->vocab, groups = (vocab + GROUP - 1) / GROUP;
    int failed = 0;
#pragma omp parallel num_threads(a->num_threads)
    {
        scratch s = {malloc((groups + 1) * sizeof(float)), malloc((groups + 1) * sizeof(float)),
                     malloc(vocab * sizeof(int64_t)), malloc((vocab + 1) * sizeof(uint64_t)),
                     a->is_bf16 ? malloc(vocab * sizeof(float)) : NULL};
        const int all = s.maxima && s.sorted && s.weights && s.keys && (s.row || !a->is_bf16);
        if (!all) failed = 1;
#pragma omp for schedule(dynamic, 1)
        for (int64_t d = 0; d < a->num_distributions; d++) {
            const float top = a->maximum[a->rows[d]];
            const int filtered = (a->top_k[d] > 0 && a->top_k[d] < vocab) || a->top_p[d] < 1.0f;
            if (!all || !isfinite(top)) continue;
            (filtered ? draw_from_kept : draw_from_all)(a, d, row_of(a, d, &s), top, &s);
        }
        free(s.maxima);
        free(s.sorted);
        free(s.weights);
        free(s.keys);
        free(s.row);
    }
    return failed;
}

/* Computes random bits with Philox-4x32-10 (Salmon et al. 2011), like worker/sampling/on_cpu.py. */
void random_bits(const random_args *a) {
    for (int64_t k = 0; k < a->count; k++) {
        uint32_t c0 = (uint32_t)a->stream[k], c1 = (uint32_t)(a->stream[k] >> 32);
        uint32_t c2 = (uint32_t)a->sample_index[k], c3 = (uint32_t)a->position[k];
        uint32_t low_key = (uint32_t)a->seed[k], high_key = (uint32_t)(a->seed[k] >> 32);
        for (int round = 0; round < 10; round++) {
            const uint64_t p = 0xD2511F53ull * c0, q = 0xCD9E8D57ull * c2;
            c0 = (uint32_t)(q >> 32) ^ c1 ^ low_key;
            c1 = (uint32_t)q;
            c2 = (uint32_t)(p >> 32) ^ c3 ^ high_key;
            c3 = (uint32_t)p;
            low_key += 0x9E3779B9u;
            high_key += 0xBB67AE85u;
        }
        a->bits[k] = c0 >> (32 - RANDOM_BITS);
    }
}
