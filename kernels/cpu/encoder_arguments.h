/* Arguments of encoder_layers. encoder_layers.py declares the same structs for ctypes. */

#ifndef BATCHINFER_ENCODER_ARGUMENTS_H
#define BATCHINFER_ENCODER_ARGUMENTS_H

#include "arguments.h"

/* in the order of encoder_layers.ACTIVATIONS */
enum { GELU, GELU_TANH, RELU, SILU, QUICK_GELU };

typedef struct {
    void *x; /* [count], contiguous; changed in place */
    int64_t count;
    int32_t activation, num_threads;
} activate_args;

typedef struct {
    const void *weight, *bias; /* [width] */
    float eps;
} layer_norm_args;

/* A post-norm layer: hidden = norm(hidden + attention(hidden)), then
   hidden = norm(hidden + down(activation(up(hidden)))). */
typedef struct {
    gemm_args qkv; /* output: queries, keys and values of all heads, concatenated */
    gemm_args o;   /* adds to hidden */
    layer_norm_args attention_norm;
    gemm_args up, down; /* down adds to hidden */
    layer_norm_args mlp_norm;
} encoder_layer_args;

typedef struct {
    const encoder_layer_args *layers;
    void *hidden;          /* [T, width], contiguous: input and output */
    void *qkv;             /* [T, 3 * heads * head_width], workspace */
    const int64_t *starts; /* [S + 1] first token of each sequence, then T */
    int64_t num_layers, num_sequences;
    int32_t num_heads, head_width, num_threads, activation;
    float scale;
} encoder_args;

#endif
