/* Arguments of Gated DeltaNet and Kimi Delta Attention, and functions for a team of threads. */

#ifndef BATCHINFER_GATED_DELTA_H
#define BATCHINFER_GATED_DELTA_H

#include "recurrent_state.h"

typedef struct {
    paged_states states;
    convolution conv; /* of queries, keys and values; its output is a workspace */
    const void *gate, *decay, *beta;       /* [T, Hv * Dv], [T, Hv * decay_width], [T, Hv] */
    void *out;                             /* [T, Hv * Dv] */
    const float *decay_rate, *dt_bias;     /* [Hv], [Hv * decay_width] */
    const float *norm;                     /* [Dv] */
    float *kept, *strength, *read; /* workspace: [T, Hv * decay_width], [T, Hv], [T, Hv * Dv] */
    float *decayed_keys;           /* workspace: [T, Hv * Dk] if each row has its own decay */
    int64_t gate_stride, decay_stride, beta_stride, out_stride; /* in elements */
    int64_t num_tokens, num_key_heads, num_heads, key_width, value_width;
    int64_t decay_width; /* number of decays per head: 1, or Dk */
    int32_t num_threads, with_silu; /* 1: silu(gate) multiplies the output; 0: sigmoid(gate) does */
    float norm_eps, max_beta;
} gated_delta_args;

/* All threads of a parallel region call these functions, which end with a barrier. */
void gated_delta_team_f32(const gated_delta_args *);
void gated_delta_team_bf16(const gated_delta_args *);

#endif
