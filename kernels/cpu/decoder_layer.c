/* Whole decoder layers in one call: what their parts cost in Python is a tenth of a decode step. */

#include "arguments.h"

static void of_step(const step_args *s, layer_args *a) {
    a->attention_norm.x = a->mlp_norm.x = a->o.out = a->down.out = s->hidden;
    a->attention_norm.num_rows = a->mlp_norm.num_rows = a->silu.num_rows = s->num_tokens;
    a->qkv.num_rows = a->o.num_rows = a->gate_up.num_rows = a->down.num_rows = s->num_tokens;
    a->rotary.num_tokens = s->num_tokens;
    a->rotary.cos = s->cos, a->rotary.sin = s->sin, a->rotary.slot_mapping = s->slot_mapping;
    attention_args *attention = &a->attention;
    attention->block_tables = s->block_tables, attention->table_width = s->table_width;
    attention->query_starts = s->query_starts, attention->context_lens = s->context_lens;
    attention->order = s->order, attention->shared_lens = s->shared_lens;
    attention->num_sequences = s->num_sequences;
    a->attention_norm.num_threads = a->mlp_norm.num_threads = a->silu.num_threads = s->num_threads;
    a->qkv.num_threads = a->o.num_threads = s->num_threads;
    a->gate_up.num_threads = a->down.num_threads = s->num_threads;
    a->rotary.num_threads = attention->num_threads = s->num_threads;
}

#define DECODER_LAYERS(type)                                                \
    static int run_##type(layer_args *a) {                                  \
        rms_norm_##type(&a->attention_norm);                                \
        if (gemm_##type(&a->qkv)) return 1;                                 \
        rotary_write_##type(&a->rotary);                                    \
        if (attend_##type(&a->attention)) return 1;                         \
        if (gemm_##type(&a->o)) return 1;                                   \
        rms_norm_##type(&a->mlp_norm);                                      \
        if (gemm_##type(&a->gate_up)) return 1;                             \
        silu_mul_##type(&a->silu);                                          \
        if (gemm_##type(&a->down)) return 1;                                \
        return 0;                                                           \
    }                                                                       \
    int decoder_layers_##type(                                              \
        layer_args *layers, const step_args *const *steps, int64_t count) { \
        for (int64_t at = 0; at < count; at++) {                            \
            of_step(steps[at], &layers[at]);                                \
            if (run_##type(&layers[at])) return 1;                          \
        }                                                                   \
        return 0;                                                           \
    }

DECODER_LAYERS(f32)
DECODER_LAYERS(bf16)
