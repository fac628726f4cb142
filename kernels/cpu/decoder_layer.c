/* Runs whole decoder layers in one call. Calling a layer's operations one by one from Python would
   take a tenth of a decode step's time.

   All threads run the layers together in one parallel region, because one region per operation
   would need twice as many barriers. The thread that computes a row also converts the row to the
   form that the next GEMM reads (gemm_rows.h). */

#include <stdlib.h>

#include "arguments.h"
#include "decoder_layer.h"

typedef struct {
    attention_plan **plans; /* plan of each layer; adjacent layers of equal shape share a plan */
    int64_t count;
    void *rows; /* converted rows of the current GEMM */
} workspace;

static void set_step(const step_args *s, layer_args *a) {
    a->attention_norm.x = a->mlp_norm.x = a->o.out = a->down.out = s->hidden;
    a->attention_norm.num_rows = a->mlp_norm.num_rows = a->silu.num_rows = s->num_tokens;
    a->qkv.num_rows = a->o.num_rows = a->gate_up.num_rows = a->down.num_rows = s->num_tokens;
    a->rotary.num_tokens = a->gate.num_tokens = s->num_tokens;
    a->rotary.cos = s->cos, a->rotary.sin = s->sin, a->rotary.slot_mapping = s->slot_mapping;
    attention_args *attention = &a->attention;
    attention->block_tables = s->block_tables, attention->table_width = s->table_width;
    attention->query_starts = s->query_starts, attention->context_lens = s->context_lens;
    attention->order = s->order, attention->shared_lens = s->shared_lens;
    attention->query_ends = s->query_ends;
    attention->num_sequences = s->num_sequences;
    a->attention_norm.num_threads = a->mlp_norm.num_threads = a->silu.num_threads = s->num_threads;
    a->qkv.num_threads = a->o.num_threads = s->num_threads;
    a->gate_up.num_threads = a->down.num_threads = s->num_threads;
    a->rotary.num_threads = attention->num_threads = a->gate.num_threads = s->num_threads;
}

static int have_equal_plans(const attention_args *a, const attention_args *b) {
    return a->query_starts == b->query_starts && a->context_lens == b->context_lens
           && a->order == b->order && a->shared_lens == b->shared_lens
           && a->query_ends == b->query_ends
           && a->num_heads == b->num_heads && a->num_kv_heads == b->num_kv_heads
           && a->sliding_window == b->sliding_window;
}

static void free_workspace(workspace *w) {
    for (int64_t at = 0; at < w->count; at++)
        if (!at || w->plans[at] != w->plans[at - 1]) free_attention_plan(w->plans[at]);
    free(w->plans);
    free(w->rows);
}

/* Returns 0, or 1 if out of memory. */
static int make_workspace(workspace *w, const layer_args *layers, int64_t count) {
    int64_t bytes = 0;
    *w = (workspace){.plans = calloc(count, sizeof(*w->plans))};
    if (!w->plans) return 1;
    for (int64_t at = 0; at < count; at++) {
        const layer_args *a = &layers[at];
        const gemm_args *gemms[] = {&a->qkv, &a->o, &a->gate_up, &a->down};
        for (int i = 0; i < 4; i++) {
            const int64_t size = gemm_rows_bytes(gemms[i]);
            bytes = size > bytes ? size : bytes;
        }
        const int same = at && have_equal_plans(&a->attention, &layers[at - 1].attention);
        w->plans[at] = same ? w->plans[at - 1] : attention_plan_of(&a->attention);
        w->count = at + 1;
        if (!w->plans[at]) return 1;
    }
    w->rows = bytes ? aligned_alloc(64, bytes) : NULL;
    return bytes && !w->rows;
}

#define DECODER_LAYERS(type)                                                             \
    static int run_##type(const layer_args *a, const attention_plan *plan, void *rows) { \
        gemm_rows x = gemm_rows_in(rows, &a->qkv);                                 \
        rms_norm_team_##type(&a->attention_norm, &x);                                    \
        WAIT gemm_team_##type(&a->qkv, &x);                                              \
        WAIT rotary_write_team_##type(&a->rotary);                                       \
        WAIT const int failed = attend_team_##type(&a->attention, plan);                 \
        WAIT x = gemm_rows_in(rows, &a->o);                                              \
        if (a->gate.gate) {                                                              \
            sigmoid_mul_team_##type(&a->gate, &x);                                       \
            WAIT                                                                         \
        } else if (need_conversion(&x)) {                                                \
            convert_rows_##type(&x, &a->o);                                              \
            WAIT                                                                         \
        }                                                                                \
        gemm_team_##type(&a->o, &x);                                                     \
        RUN_MLP(type, a, x, rows)                                                        \
        return failed;                                                                   \
    }                                                                                    \
    int decoder_layers_##type(                                                           \
        layer_args *layers, const step_args *const *steps, int64_t count) {              \
        workspace w;                                                                          \
        int failed = 0;                                                                  \
        for (int64_t at = 0; at < count; at++) set_step(steps[at], &layers[at]);          \
        if (make_workspace(&w, layers, count)) return free_workspace(&w), 1;                           \
        _Pragma("omp parallel num_threads(steps[0]->num_threads) reduction(|:failed)")   \
        for (int64_t at = 0; at < count; at++)                                           \
            failed |= run_##type(&layers[at], w.plans[at], w.rows);                      \
        free_workspace(&w);                                                                       \
        return failed;                                                                   \
    }

DECODER_LAYERS(f32)
DECODER_LAYERS(bf16)
