/* What encoder_layers is called with. encoder_layers.py says the same to ctypes. */

#ifndef BATCHINFER_ENCODER_H
#define BATCHINFER_ENCODER_H

#include "arguments.h"

enum { GELU, GELU_TANH, RELU }; /* encoder_layers.ACTIVATIONS */

typedef struct {
    const void *weight, *bias; /* [width] */
    float eps;
} layer_norm_args;

/* A post-norm layer: hidden = norm(hidden + attention(hidden)), then
   hidden = norm(hidden + down(activation(up(hidden)))). */
typedef struct {
    gemm_args qkv; /* to queries, keys and values of all heads, side by side */
    gemm_args o;   /* adds */
    layer_norm_args attention_norm;
    gemm_args up, down; /* down adds */
    layer_norm_args mlp_norm;
} encoder_layer_args;

typedef struct {
    const encoder_layer_args *layers;
    void *hidden;          /* [T, width], contiguous: in and out */
    void *qkv;             /* [T, 3 * heads * head_width], to work in */
    const int64_t *starts; /* [S + 1] first token of each sequence, and T */
    int64_t num_layers, num_sequences;
    int32_t num_heads, head_width, num_threads, activation;
    float scale;
} encoder_args;

#endif
