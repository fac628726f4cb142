/* Runs a whole decoder layer with Gated DeltaNet in one call, like decoder_layer.c for attention
   layers. */

#include <stdlib.h>

#include "decoder_layer.h"
#include "gated_delta.h"

/* A pre-norm layer: hidden += mixer(norm(hidden)), then hidden += mlp(norm(hidden)). */
typedef struct {
    rms_norm_args mixer_norm;
    gemm_args in; /* queries, keys and values, gate, decay and beta */
    gated_delta_args delta;
    gemm_args out;
    rms_norm_args mlp_norm;
    gemm_args gate_up;
    silu_mul_args silu;
    gemm_args down;
} delta_layer_args;

typedef struct { /* fields of delta_layer_args that depend on the step, but not on the layer */
    void *hidden; /* [num_tokens, hidden width], contiguous */
    const int32_t *tables, *query_starts, *context_lens;
    int64_t table_width, num_sequences;
    int32_t num_tokens, num_threads;
} delta_step_args;

static void set_step(const delta_step_args *s, delta_layer_args *a) {
    a->mixer_norm.x = a->mlp_norm.x = a->out.out = a->down.out = s->hidden;
    a->mixer_norm.num_rows = a->mlp_norm.num_rows = a->silu.num_rows = s->num_tokens;
    a->in.num_rows = a->out.num_rows = a->gate_up.num_rows = a->down.num_rows = s->num_tokens;
    a->mixer_norm.num_threads = a->mlp_norm.num_threads = a->silu.num_threads = s->num_threads;
    a->in.num_threads = a->out.num_threads = s->num_threads;
    a->gate_up.num_threads = a->down.num_threads = s->num_threads;
    paged_states *states = &a->delta.states;
    states->tables = s->tables, states->table_width = s->table_width;
    states->query_starts = s->query_starts, states->context_lens = s->context_lens;
    states->num_sequences = s->num_sequences;
    a->delta.num_tokens = s->num_tokens, a->delta.num_threads = s->num_threads;
}

/* Returns the size in bytes of the converted rows of the GEMM that needs the most memory. */
static int64_t rows_bytes(const delta_layer_args *a) {
    int64_t bytes = 0;
    const gemm_args *gemms[] = {&a->in, &a->out, &a->gate_up, &a->down};
    for (int i = 0; i < 4; i++) {
        const int64_t size = gemm_rows_bytes(gemms[i]);
        bytes = size > bytes ? size : bytes;
    }
    return bytes;
}

/* delta_layer returns 0, or 1 if out of memory. */
#define DELTA_LAYER(type)                                                          \
    static void run_##type(const delta_layer_args *a, void *rows) {                \
        gemm_rows x = gemm_rows_in(rows, &a->in);                                  \
        rms_norm_team_##type(&a->mixer_norm, &x);                                  \
        WAIT gemm_team_##type(&a->in, &x);                                         \
        WAIT gated_delta_team_##type(&a->delta);                                   \
        x = gemm_rows_in(rows, &a->out);                                           \
        if (need_conversion(&x)) {                                                 \
            convert_rows_##type(&x, &a->out);                                      \
            WAIT                                                                   \
        }                                                                          \
        gemm_team_##type(&a->out, &x);                                             \
        RUN_MLP(type, a, x, rows)                                                  \
    }                                                                              \
    int delta_layer_##type(delta_layer_args *layer, const delta_step_args *step) { \
        set_step(step, layer);                                                     \
        const int64_t bytes = rows_bytes(layer);                                   \
        void *rows = bytes ? aligned_alloc(64, bytes) : NULL;                      \
        if (bytes && !rows) return 1;                                              \
        _Pragma("omp parallel num_threads(step->num_threads)")                     \
        run_##type(layer, rows);                                                   \
        free(rows);                                                                \
        return 0;                                                                  \
    }

DELTA_LAYER(f32)
DELTA_LAYER(bf16)
