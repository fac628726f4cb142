/* Included by cpu_driver.c: encoder layers compared with plain loops in double. */

#include "encoder_arguments.h"

int encoder_layers_f32(const encoder_args *);
int encoder_layers_bf16(const encoder_args *);

enum { NUM_HEADS = 2, HEAD = 18, WIDTH = 36, INNER = 50, NUM_TOKENS = 24 };

typedef struct {
    array weight, bias, packed;
    int in, outs;
} linear;

static linear make_linear(int is_bf16, int in, int outs) {
    linear l = {make(is_bf16, (size_t)in * outs, 1), make(is_bf16, outs, 1), {0}, in, outs};
    for (size_t i = 0; i < l.weight.count; i++) put(l.weight, i, get(l.weight, i) / 4);
    l.packed = packed_of(l.weight, VECTORS, FLOATS, (coded){0}, in, outs);
    return l;
}

static gemm_args product_of(linear l, int adds) {
    return (gemm_args){.packed = l.packed.at, .bias = l.bias.at, .in_features = l.in,
                       .out_features = l.outs, .adds = adds};
}

static void times(linear l, const double *x, double *out, int adds) {
    for (int t = 0; t < NUM_TOKENS; t++)
        for (int n = 0; n < l.outs; n++) {
            double sum = get(l.bias, n) + (adds ? out[t * l.outs + n] : 0.0);
            for (int k = 0; k < l.in; k++) sum += x[t * l.in + k] * get(l.weight, (size_t)n * l.in + k);
            out[t * l.outs + n] = sum;
        }
}

static void normed(array weight, array bias, double *x) {
    for (int t = 0; t < NUM_TOKENS; t++, x += WIDTH) {
        double mean = 0.0, square = 0.0;
        for (int i = 0; i < WIDTH; i++) mean += x[i] / WIDTH;
        for (int i = 0; i < WIDTH; i++) square += (x[i] - mean) * (x[i] - mean) / WIDTH;
        for (int i = 0; i < WIDTH; i++)
            x[i] = (x[i] - mean) / sqrt(square + 1e-5) * get(weight, i) + get(bias, i);
    }
}

static void attended(const double *qkv, const int64_t *starts, int count, double *out) {
    for (int s = 0; s < count; s++)
        for (int64_t t = starts[s]; t < starts[s + 1]; t++)
            for (int h = 0; h < NUM_HEADS; h++) {
                double weights[NUM_TOKENS], total = 0.0, *to = out + t * WIDTH + h * HEAD;
                for (int64_t p = starts[s]; p < starts[s + 1]; p++) {
                    double score = 0.0;
                    for (int d = 0; d < HEAD; d++)
                        score += qkv[t * 3 * WIDTH + h * HEAD + d]
                                 * qkv[p * 3 * WIDTH + WIDTH + h * HEAD + d];
                    total += weights[p] = exp(score / 4);
                }
                for (int d = 0; d < HEAD; d++) to[d] = 0.0;
                for (int64_t p = starts[s]; p < starts[s + 1]; p++)
                    for (int d = 0; d < HEAD; d++)
                        to[d] += weights[p] / total * qkv[p * 3 * WIDTH + 2 * WIDTH + h * HEAD + d];
            }
}

static void check_encoder(int is_bf16) {
    const int64_t starts[] = {0, 17, 18, NUM_TOKENS};
    const linear qkv = make_linear(is_bf16, WIDTH, 3 * WIDTH), o = make_linear(is_bf16, WIDTH, WIDTH);
    const linear up = make_linear(is_bf16, WIDTH, INNER), down = make_linear(is_bf16, INNER, WIDTH);
    array hidden = make(is_bf16, NUM_TOKENS * WIDTH, 1), room = make(is_bf16, NUM_TOKENS * 3 * WIDTH, 0);
    array scales = make(is_bf16, WIDTH, 1), shifts = make(is_bf16, WIDTH, 1);
    const layer_norm_args norm = {scales.at, shifts.at, 1e-5f};
    const encoder_layer_args layer = {product_of(qkv, 0), product_of(o, 1), norm,
                                      product_of(up, 0), product_of(down, 1), norm};
    const encoder_args a = {.layers = &layer, .hidden = hidden.at, .qkv = room.at, .starts = starts,
                            .num_layers = 1, .num_sequences = 3, .num_heads = NUM_HEADS,
                            .head_width = HEAD, .num_threads = 1, .activation = GELU, .scale = 0.25f};
    static double x[NUM_TOKENS * WIDTH], projected[NUM_TOKENS * 3 * WIDTH], seen[NUM_TOKENS * WIDTH];
    static double inner[NUM_TOKENS * INNER];
    for (int i = 0; i < NUM_TOKENS * WIDTH; i++) x[i] = get(hidden, i);
    times(qkv, x, projected, 0);
    attended(projected, starts, 3, seen);
    times(o, seen, x, 1);
    normed(scales, shifts, x);
    times(up, x, inner, 0);
    for (int i = 0; i < NUM_TOKENS * INNER; i++) inner[i] *= 0.5 * (1.0 + erf(inner[i] * sqrt(0.5)));
    times(down, inner, x, 1);
    normed(scales, shifts, x);
    expect(!(is_bf16 ? encoder_layers_bf16 : encoder_layers_f32)(&a), "memory", is_bf16, NUM_TOKENS);
    double off = 0.0, size = 0.0;
    for (int i = 0; i < NUM_TOKENS * WIDTH; i++)
        off += (get(hidden, i) - x[i]) * (get(hidden, i) - x[i]), size += x[i] * x[i];
    expect(sqrt(off / size) < (is_bf16 ? 0.02 : 1e-5), "encoder layers", is_bf16, NUM_TOKENS);
    printf("encoder %s off by %.1e\n", is_bf16 ? "bf16" : "f32", sqrt(off / size));
}
