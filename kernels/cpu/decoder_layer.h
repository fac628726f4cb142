/* Code that all kinds of decoder layers share, for a team of threads. */

#ifndef BATCHINFER_DECODER_LAYER_H
#define BATCHINFER_DECODER_LAYER_H

#include "arguments.h"
#include "gemm_rows.h"

#define WAIT _Pragma("omp barrier")

/* Adds the MLP of the normalized hidden state to the hidden state. `x` is the converted rows, in
   the memory `rows`. Begins with a barrier, because the previous GEMM writes the hidden state, and
   ends with a barrier. */
#define RUN_MLP(type, a, x, rows)               \
    WAIT x = gemm_rows_in(rows, &a->gate_up);   \
    rms_norm_team_##type(&a->mlp_norm, &x);     \
    WAIT gemm_team_##type(&a->gate_up, &x);     \
    WAIT x = gemm_rows_in(rows, &a->down);      \
    silu_mul_team_##type(&a->silu, &x);         \
    WAIT gemm_team_##type(&a->down, &x);        \
    WAIT

#endif
