/* A whole decoder layer in one call: what its parts cost in Python is a tenth of a decode step. */

#include "arguments.h"

#define DECODER_LAYER(type)                                \
    int decoder_layer_##type(const layer_args *a) {        \
        rms_norm_##type(&a->attention_norm);               \
        gemm_##type(&a->qkv);                              \
        rotary_write_##type(&a->rotary);                   \
        if (attend_##type(&a->attention)) return 1;        \
        gemm_##type(&a->o);                                \
        rms_norm_##type(&a->mlp_norm);                     \
        gemm_##type(&a->gate_up);                          \
        silu_mul_##type(&a->silu);                         \
        gemm_##type(&a->down);                             \
        return 0;                                          \
    }

#if defined(__AVX512F__) /* as in gemm.c */
DECODER_LAYER(f32)
#if defined(__AVX512BF16__)
DECODER_LAYER(bf16)
#endif
#endif
