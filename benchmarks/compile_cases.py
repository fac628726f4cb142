"""Calls of all kernels at the shapes of real models, for ``compile_report.py``.

Tensors have 16 bits, or 8 bits in cases with ``fp8`` in their names. Cases with ``f32`` in their
names occur when a model is loaded and its modules are compared with fused modules in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from batchinfer.kernels.batch_invariant_attention import batch_invariant_attention
from batchinfer.kernels.block_copy import block_copy
from batchinfer.kernels.experts import (
    ExpertMatrix,
    GatedActivation,
    add_experts,
    multiply_experts,
)
from batchinfer.kernels.fp8 import FP8
from batchinfer.kernels.fp8_blocks import num_blocks, quantize_groups
from batchinfer.kernels.fp8_linear import fp8_linear
from batchinfer.kernels.int4_linear import int4_linear
from batchinfer.kernels.int4_words import WORD_BLOCK, WORDS, Int4Words
from batchinfer.kernels.kv_write import kv_write
from batchinfer.kernels.lora import lora_expand, lora_shrink, num_splits
from batchinfer.kernels.matmul import matmul
from batchinfer.kernels.mla_attention import mla_attention
from batchinfer.kernels.penalties import apply_penalties
from batchinfer.kernels.recurrence import gated_delta, mamba1, mamba2
from batchinfer.kernels.rms_norm import rms_norm
from batchinfer.kernels.rotary_pairs import RotaryPairs
from batchinfer.kernels.rotary_write import rotary_write
from batchinfer.kernels.route import Routing, plan_experts, route
from batchinfer.kernels.row_stats import row_stats
from batchinfer.kernels.sample import sample
from batchinfer.kernels.silu_mul import silu_mul
from batchinfer.kernels.token_bitmask import apply_token_bitmask
from batchinfer.kernels.unpack_block_tables import unpack_block_tables
from tests.kernels.batch_invariant_cases import batch_invariant_arguments
from tests.kernels.cases import (
    AttentionCase,
    CopyCase,
    TablesCase,
    WriteCase,
    attend_paged,
    build_attention,
    build_copy,
    build_tables,
    build_write,
)
from tests.kernels.expert_cases import GPT_OSS
from tests.kernels.mla_cases import MLACase, build_mla, work_lists
from tests.kernels.recurrent_cases import gated_delta_layer, mamba1_layer, mamba2_layer
from tests.kernels.row_cases import (
    RotaryCase,
    RowCase,
    build_rms_norm,
    build_rotary_write,
    build_silu_mul,
)
from tests.kernels.sample_cases import KINDS, Rows, build_edits, build_sample
from tests.kernels.shared_cases import SharedCase, build_shared

_DTYPE = torch.bfloat16
# Upper bound on context lengths, which affects the compiled code. The sequences themselves are
# short.
_MAX_CONTEXT = 4096


@dataclass(frozen=True)
class Case:
    """A call to a kernel's wrapper; ``kernels`` names the launched kernels to compile."""

    name: str
    kernels: tuple[str, ...]
    launch: Callable[[], Any]


def _attention(
    name: str,
    *kernels: str,
    fp8: bool = False,
    dtype: torch.dtype = _DTYPE,
    copies: int = 1,
    **shape: Any,
) -> Case:
    """A step with as many decodes as chunks. `shape` holds further arguments of `AttentionCase`."""

    def launch() -> None:
        case = AttentionCase(name, ((1, 40), (20, 40)) * copies, **shape)
        inputs = build_attention(case, "cpu", dtype, FP8 if fp8 else None)
        attend_paged(**inputs.arguments | {"max_context_len": _MAX_CONTEXT})

    return Case(name, kernels, launch)


def _shared(name: str, *kernels: str, fp8: bool = False, decodes: int = 2, **shape: Any) -> Case:
    """A step of decodes, the first two of which share a piece of their contexts."""

    def launch() -> None:
        attention = AttentionCase(name, ((1, 40),) * decodes, **shape)
        case = SharedCase(attention, tuple(range(decodes)), (0, 32, *[0] * (decodes - 2)))
        inputs = build_shared(case, "cpu", _DTYPE, FP8 if fp8 else None)
        attend_paged(**inputs.arguments | {"max_context_len": _MAX_CONTEXT})

    return Case(name, kernels, launch)


def _batch_invariant(
    name: str, *kernels: str, fp8: bool = False, copies: int = 1, **shape: Any
) -> Case:
    """The same step as in `_attention`, with batch-invariant attention."""

    def launch() -> None:
        case = AttentionCase(name, ((1, 40), (20, 40)) * copies, **shape)
        inputs = build_attention(case, "cpu", _DTYPE, FP8 if fp8 else None)
        batch_invariant_attention(
            **batch_invariant_arguments(inputs.arguments, max_context_len=_MAX_CONTEXT)
        )

    return Case(name, kernels, launch)


def _mla(name: str, *kernels: str, num_heads: int) -> Case:
    """A step with a decode and a chunk over DeepSeek's latents."""

    def launch() -> None:
        case = MLACase(name, ((1, 40), (20, 40)), num_heads, rank=512, rotary=64, num_splits=8)
        arguments = build_mla(case, "cpu", _DTYPE)
        mla_attention(**arguments, **work_lists(case, arguments))

    return Case(name, kernels, launch)


def _rotary(
    name: str,
    heads: int,
    kv_heads: int,
    width: int,
    norms: bool = False,
    fp8: bool = False,
    dtype: torch.dtype = _DTYPE,
    **more: Any,
) -> Case:
    """`more` has further arguments of `RotaryCase`."""

    def launch() -> None:
        case = RotaryCase(name, 16, heads, kv_heads, width, norms=norms, **more)
        rotary_write(**build_rotary_write(case, "cpu", dtype, FP8 if fp8 else None)[1])

    return Case(name, ("_rotary_write_kernel",), launch)


def _kv_write(
    name: str,
    kv_heads: int,
    width: int,
    fp8: bool = False,
    dtype: torch.dtype = _DTYPE,
    block_size: int = 16,
) -> Case:
    def launch() -> None:
        case = WriteCase(name, 4, kv_heads, width, width, block_size)
        arguments = build_write(case, "cpu", dtype, FP8 if fp8 else None)[1]
        contiguous = {part: arguments[part].contiguous() for part in ("key", "value")}
        kv_write(**arguments | contiguous)

    return Case(name, ("_kv_write_kernel",), launch)


def _row_stats(vocabulary: int) -> Case:
    def launch() -> None:
        statistic = torch.zeros(2)
        row_stats(
            torch.zeros(2, vocabulary, dtype=_DTYPE),
            maximum=statistic,
            max_logprob=statistic.clone(),
            argmax=torch.zeros(2, dtype=torch.int64),
        )

    return Case(f"row_stats_{vocabulary}", ("_row_stats_kernel",), launch)


def _rows(kernel: str, width: int, dtype: torch.dtype = _DTYPE, *, centered: bool = False) -> Case:
    name = f"{kernel}_{width}{'_f32' if dtype is torch.float32 else ''}"
    name += "_centered" if centered else ""

    def launch() -> None:
        case = RowCase(name, 4, width, centered=centered)
        if kernel == "rms_norm":
            rms_norm(**build_rms_norm(case, "cpu", dtype))
        else:
            silu_mul(**build_silu_mul(case, "cpu", dtype))

    return Case(name, (f"_{kernel}_kernel",), launch)


def _block_copy(name: str, dtype: torch.dtype) -> Case:
    def launch() -> None:
        block_copy(**build_copy(CopyCase(name, 4, 2**16, 1), "cpu", dtype))

    return Case(name, ("_block_copy_kernel",), launch)


def _lora_shrink(ranks: int, width: int) -> Case:
    def launch() -> None:
        lora_shrink(
            torch.empty(4, width, dtype=_DTYPE),
            torch.empty(2, ranks, width, dtype=_DTYPE),
            *_rows_of_adapters(),
            lowered=torch.empty(num_splits(width), 4, ranks),
        )

    return Case(f"lora_shrink_{ranks}_{width}", ("_lora_shrink_kernel",), launch)


def _lora_expand(width: int, outputs: int) -> Case:
    """Expands the output of `lora_shrink` for rows of `width` elements and adapters of rank 16."""

    def launch() -> None:
        lora_expand(
            torch.empty(num_splits(width), 4, 16),
            torch.empty(2, outputs, 16, dtype=_DTYPE),
            *_rows_of_adapters(),
            out=torch.empty(4, outputs, dtype=_DTYPE),
        )

    return Case(f"lora_expand_{width}_{outputs}", ("_lora_expand_kernel",), launch)


def _rows_of_adapters() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(4, dtype=torch.int64), torch.empty(3, dtype=torch.int32)


def _matmul(name: str, outputs: int, depth: int, adds: bool = False) -> Case:
    def launch() -> None:
        x = torch.zeros(4, depth, dtype=_DTYPE)
        weight = torch.zeros(1, depth, dtype=_DTYPE).expand(outputs, depth)
        matmul(x, weight, out=torch.zeros(4, outputs, dtype=_DTYPE), adds=adds)

    return Case(name, ("_matmul_kernel",), launch)


def _fp8_linears(
    name: str, outputs: int, width: int, *row_numbers: int, adds: bool = False
) -> list[Case]:
    """Linear layers with float8 weights: for each number of rows, a case with float8 rows (`a8`)
    and a case with 16-bit rows (`a16`)."""
    return [
        _fp8_linear(
            f"fp8_{name}_a{8 if rows_too else 16}_{rows}", outputs, width, rows, rows_too, adds
        )
        for rows_too in (True, False)
        for rows in row_numbers
    ]


def _fp8_linear(
    name: str, outputs: int, width: int, rows: int, rows_too: bool = True, adds: bool = False
) -> Case:
    def launch() -> None:
        groups = num_blocks(width)
        fp8_linear(
            torch.empty(rows, width, dtype=FP8 if rows_too else _DTYPE),
            torch.empty(outputs, width, dtype=FP8),
            torch.empty(num_blocks(outputs), groups),
            out=torch.empty(rows, outputs, dtype=_DTYPE),
            x_scales=torch.empty(groups, rows) if rows_too else None,
            adds=adds,
        )

    return Case(name, ("_fp8_linear_kernel",), launch)


def _sum_pieces(outputs: int, adds: bool = False) -> Case:
    linear = _fp8_linear(f"fp8_sum_pieces_{outputs}", outputs, 1024, 1, adds=adds)
    return replace(linear, kernels=("_sum_pieces_kernel",))


def _int4_linears(
    name: str, outputs: int, width: int, *row_numbers: int, adds: bool = False
) -> list[Case]:
    """Linear layers with weights that were quantized when they were loaded, and in a deterministic
    job."""
    return [
        *(
            _int4_linear(f"int4_{name}_{rows}", outputs, width, rows, 64, adds=adds)
            for rows in row_numbers
        ),
        _int4_linear(
            f"int4_{name}_deterministic", outputs, width, 1, 64, adds=adds, batch_invariant=True
        ),
    ]


def _int4_linear(
    name: str,
    outputs: int,
    width: int,
    rows: int,
    group_size: int,
    *,
    e2m1: bool = False,
    dtype: torch.dtype = _DTYPE,
    **options: bool,
) -> Case:
    def launch() -> None:
        blocks = width // WORD_BLOCK
        by_group = torch.empty(width // group_size, 1).expand(-1, outputs)
        weight = Int4Words(
            torch.empty(blocks, 1, WORDS, dtype=torch.int32).expand(-1, outputs, -1),
            by_group.to(dtype) if e2m1 else by_group,
            None if e2m1 else by_group.to(torch.uint8),
            torch.empty(outputs) if group_size == 16 else None,
            None,
            width,
            dtype,
        )
        out = torch.empty(rows, outputs, dtype=dtype)
        int4_linear(torch.empty(rows, width, dtype=dtype), weight, out=out, **options)

    return Case(name, ("_int4_linear_kernel",), launch)


def _quantize_groups(width: int) -> Case:
    def launch() -> None:
        codes, scales = torch.empty(4, width, dtype=FP8), torch.empty(num_blocks(width), 4)
        quantize_groups(torch.empty(4, width, dtype=_DTYPE), codes=codes, scales=scales)

    return Case(f"quantize_groups_{width}", ("_quantize_groups_kernel",), launch)


def _sample(name: str, *kernels: str, edited: bool = False, **programs: bool) -> Case:
    """Draws from two rows. `programs` holds the arguments `draws` and `filters` of `sample`."""

    def launch() -> None:
        logits = Rows(151_936).logits(2, _DTYPE)
        edits = apply_penalties(**build_edits(logits, [{"bias": {1: 1.0}}, {}])) if edited else None
        sample(**build_sample(logits, [*KINDS.values()][:2]), edits=edits, **programs)

    return Case(name, kernels, launch)


def _token_bitmask() -> Case:
    def launch() -> None:
        logits = Rows(151_936).logits(2, _DTYPE)
        rows, masks = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 4748, dtype=torch.int32)
        apply_token_bitmask(logits, rows, masks)

    return Case("apply_token_bitmask", ("_token_bitmask_kernel",), launch)


def _unpack_block_tables() -> Case:
    def launch() -> None:
        unpack_block_tables(
            **build_tables(TablesCase("unpack_block_tables", 1, 2, 128, 4, 2560), "cpu")
        )

    return Case("unpack_block_tables", ("_unpack_block_tables_kernel",), launch)


def _gated_delta(name: str, *kernels: str, **shape: Any) -> Case:
    return Case(name, kernels, lambda: _run_layer(gated_delta, gated_delta_layer, shape))


def _mamba2(name: str, *kernels: str, **shape: int) -> Case:
    return Case(name, kernels, lambda: _run_layer(mamba2, mamba2_layer, shape))


def _mamba1(name: str, **shape: int) -> Case:
    return Case(name, ("_mamba1_kernel",), lambda: _run_layer(mamba1, mamba1_layer, shape))


def _run_layer(kernel: Callable[..., None], layer: Callable[..., Any], shape: Any) -> None:
    middle = layer([1, 3], slot_bytes=2**16, dtype=_DTYPE, **shape)
    middle.in_chunks = True
    middle.run(kernel)


def _experts(
    name: str,
    routing: Routing,
    hidden: int,
    width: int,
    *,
    bias: bool = False,
    activation: GatedActivation | None = None,
    dtype: torch.dtype = _DTYPE,
    logits_dtype: torch.dtype | None = None,
    adds: bool = True,
) -> list[Case]:
    """A mixture of experts, whose gates have `width` outputs.

    Args:
        bias: true for gpt-oss: experts have biases and transposed weights.
        adds: true to add the output to a residual.
    """
    activation = activation or GatedActivation()
    experts, per_token, shared = routing.num_experts, routing.per_token, routing.num_shared
    chosen = torch.zeros(4, per_token, dtype=torch.int32)
    weights = torch.empty(4, per_token)

    def choose() -> None:
        logits = torch.empty(4, experts + routing.gates_shared, dtype=logits_dtype or dtype)
        added = torch.empty(experts) if routing.sigmoid else None
        route(logits, added, routing, experts=chosen, weights=weights)

    def multiply(outputs: int, depth: int, *, gated: bool) -> None:
        shape = (shared * outputs, depth) if gated else (outputs, shared * depth)
        weight = torch.empty(1, *((depth, outputs) if bias else (outputs, depth)), dtype=dtype)
        matrix = ExpertMatrix(
            (weight.mT if bias else weight).expand(experts, -1, -1),
            torch.empty(experts, outputs, dtype=dtype) if bias else None,
            torch.empty(shape, dtype=dtype) if shared else None,
            shared,
        )
        pairs = 4 * per_token
        multiply_experts(
            torch.empty(4 if gated else pairs, depth, dtype=dtype),
            plan_experts(chosen, routing.in_all),
            matrix,
            out=torch.empty(pairs, outputs // 2 if gated else outputs, dtype=dtype),
            activation=activation if gated else None,
        )

    def add() -> None:
        out = torch.empty(4, hidden, dtype=dtype)
        add_experts(torch.empty(4 * per_token, hidden, dtype=dtype), weights, out=out, adds=adds)

    return [
        Case(f"route_{name}", ("_route_kernel",), choose),
        Case(
            f"experts_{name}_gate_up",
            ("_plan_experts_kernel", "_multiply_experts_kernel"),
            lambda: multiply(2 * width, hidden, gated=True),
        ),
        Case(
            f"experts_{name}_down",
            ("_multiply_experts_kernel",),
            lambda: multiply(hidden, width, gated=False),
        ),
        Case(f"add_experts_{name}", ("_add_experts_kernel",), add),
    ]


_DECODE, _CHUNK, _SHARED = "_decode_kernel", "_chunk_kernel", "_shared_kernel"
_SAMPLE, _BATCH_INVARIANT = "_sample_kernel", "_batch_invariant_kernel"
_PLAN_BATCH_INVARIANT = "_plan_batch_invariant_kernel"
_MERGE, _PLAN, _PLAN_CHUNKS = "_merge_kernel", "_plan_kernel", "_plan_chunks_kernel"
_LOADING = _PLAN_CHUNKS, _CHUNK, _DECODE
_MLA_DECODE, _MLA_CHUNK = "_mla_decode_kernel", "_mla_chunk_kernel"
_CONVOLUTION = "_conv_kernel", "_update_kernel"
_MAMBA2_CHUNKS = "_sum_steps_kernel", "_multiply_chunks_kernel", "_chunk_mamba2_kernel"
_DELTA = "_gated_delta_kernel", "_solve_chunks_kernel", "_chunk_gated_delta_kernel"
_D128 = {"num_heads": 32, "num_kv_heads": 8, "key_width": 128}  # Llama-3.1-8B, Qwen3-8B
_D128_G2 = {"num_heads": 16, "num_kv_heads": 8, "key_width": 128}  # Qwen3-0.6B
_D64 = {"num_heads": 32, "num_kv_heads": 8, "key_width": 64}  # Llama-3.2-1B
_D256 = {"num_heads": 16, "num_kv_heads": 8, "key_width": 256}  # Gemma 2 9B
_ROW_NUMBERS = 1, 32, 64, 128, 4096  # linear layers use different tiles for each

CASES = (
    _attention("d128", _PLAN, _DECODE, _MERGE, _PLAN_CHUNKS, _CHUNK, **_D128),
    _attention("d128_fp8", _DECODE, _CHUNK, fp8=True, **_D128),
    _attention("d256", _DECODE, _CHUNK, **_D256),
    # Gemma 2
    _attention(
        "d256_window_cap", _PLAN, _DECODE, _CHUNK,
        sliding_window=1024, softcap=50.0, **_D256,
    ),
    # gpt-oss-20b
    _attention(
        "d64_window_sinks", _DECODE, _CHUNK,
        num_heads=64, num_kv_heads=8, key_width=64, sliding_window=128, sinks=True,
    ),
    _attention("d128_g2", _DECODE, _MERGE, _PLAN_CHUNKS, _CHUNK, **_D128_G2),
    _attention("d128_g2_fp8", _DECODE, _CHUNK, fp8=True, **_D128_G2),
    _attention("d64", _DECODE, _CHUNK, **_D64),
    # Phi-3-mini
    _attention("d96", _DECODE, _CHUNK, num_heads=32, num_kv_heads=32, key_width=96),
    # DeepSeek-V2-Lite
    _attention(
        "d192_128", _DECODE, _CHUNK,
        num_heads=16, num_kv_heads=16, key_width=192, value_width=128,
    ),
    # No real model: padded widths and all attention features
    _attention(
        "d80_40_all", _PLAN, _DECODE, _MERGE, _CHUNK,
        num_heads=8, num_kv_heads=1, key_width=80, value_width=40,
        sliding_window=700, softcap=3.0, sinks=True,
    ),
    _attention("d64_fp8", _DECODE, _CHUNK, fp8=True, **_D64),
    # gpt-oss's shape without window and sinks
    _attention("d64_g8", _DECODE, num_heads=64, num_kv_heads=8, key_width=64),
    _attention("d64_g8_fp8", _DECODE, fp8=True, num_heads=64, num_kv_heads=8, key_width=64),
    _attention("d256_fp8", _DECODE, _CHUNK, fp8=True, **_D256),
    # Phi-3-mini, and the narrowest heads: padded widths
    _attention("d96_fp8", _DECODE, _CHUNK, fp8=True, num_heads=32, num_kv_heads=32, key_width=96),
    _attention("d16_fp8", _DECODE, _CHUNK, fp8=True, num_heads=8, num_kv_heads=1, key_width=16),
    _shared("shared_d128", _PLAN, _SHARED, **_D128),
    _shared("shared_d128_g2", _SHARED, **_D128_G2),
    # More than 64 sequences
    _shared("many_shared_d128", _PLAN, decodes=66, **_D128),
    _attention("many_d128", _PLAN, _PLAN_CHUNKS, copies=33, **_D128),
    _attention("many_d128_g2", _PLAN_CHUNKS, copies=33, **_D128_G2),
    _shared("shared_d256", _SHARED, **_D256),
    _shared(
        "shared_d192_128", _SHARED,
        num_heads=16, num_kv_heads=16, key_width=192, value_width=128,
    ),
    _shared("shared_d64_cap_sinks", _SHARED, **_D64, softcap=3.0, sinks=True),
    _shared("shared_d128_fp8", _SHARED, fp8=True, **_D128),
    _shared("shared_d128_g2_fp8", _SHARED, fp8=True, **_D128_G2),
    _shared("shared_d256_fp8", _SHARED, fp8=True, **_D256),
    _batch_invariant(
        "batch_invariant_d128", _PLAN_BATCH_INVARIANT, _BATCH_INVARIANT, _MERGE, **_D128
    ),
    _batch_invariant(
        "batch_invariant_d128_g2", _PLAN_BATCH_INVARIANT, _BATCH_INVARIANT, _MERGE, **_D128_G2
    ),
    _batch_invariant("many_batch_invariant_d128_g2", _PLAN_BATCH_INVARIANT, copies=33, **_D128_G2),
    _batch_invariant("batch_invariant_d64", _BATCH_INVARIANT, **_D64),
    _batch_invariant(
        "batch_invariant_d256_window_cap", _BATCH_INVARIANT,
        sliding_window=1024, softcap=50.0, **_D256,
    ),
    _batch_invariant(
        "batch_invariant_d64_window_sinks", _BATCH_INVARIANT,
        sliding_window=128, sinks=True, **_D64,
    ),
    _batch_invariant(
        "batch_invariant_d192_128", _BATCH_INVARIANT,
        num_heads=16, num_kv_heads=16, key_width=192, value_width=128,
    ),
    _batch_invariant("batch_invariant_d128_fp8", _BATCH_INVARIANT, fp8=True, **_D128),
    # DeepSeek-V3, GLM-4.7-Flash, DeepSeek-V2-Lite
    _mla("mla_128", _MLA_DECODE, _MLA_CHUNK, _MERGE, num_heads=128),
    _mla("mla_20", _MLA_DECODE, _MLA_CHUNK, num_heads=20),
    _mla("mla_16", _MLA_DECODE, num_heads=16),
    _rotary("rotary_d128", 32, 8, 128),
    _rotary("rotary_d128_norms", 32, 8, 128, norms=True),
    _rotary("rotary_d128_norms_g2", 16, 8, 128, norms=True),
    _rotary("rotary_d128_fp8", 32, 8, 128, fp8=True),
    _rotary("rotary_d128_norms_g2_fp8", 16, 8, 128, norms=True, fp8=True),
    # gpt-oss-20b, Command R, OLMo 2 7B
    _rotary("rotary_d64_halves", 64, 8, 64, pairs=RotaryPairs(by_pair=True, halves=True)),
    _rotary("rotary_d128_adjacent", 64, 8, 128, pairs=RotaryPairs(adjacent=True)),
    _rotary("rotary_d128_norms_rows", 32, 32, 128, norms=True, norms_rows=True),
    _kv_write("kv_write_d128", 8, 128),
    _kv_write("kv_write_d128_fp8", 8, 128, fp8=True),
    _rows("rms_norm", 1024),
    _rows("rms_norm", 4096),
    _rows("rms_norm", 8192, centered=True),  # Command R
    _rows("silu_mul", 3072),
    _rows("silu_mul", 14336),
    _row_stats(128256),
    _row_stats(151936),
    _sample("sample_greedy", _SAMPLE, draws=False, filters=False),
    _sample("sample_temperature", _SAMPLE, filters=False),
    _sample("sample_filters", _SAMPLE, "_sample_rest_kernel"),
    _sample("sample_edited", _SAMPLE, "_sample_rest_kernel", "_penalties_kernel", edited=True),
    _sample("sample_edited_greedy", _SAMPLE, draws=False, filters=False, edited=True),
    _sample("sample_edited_temperature", _SAMPLE, filters=False, edited=True),
    _token_bitmask(),
    _block_copy("block_copy", _DTYPE),
    _block_copy("block_copy_fp8", FP8),
    _unpack_block_tables(),
    _lora_shrink(16, 4096),
    _lora_expand(4096, 4096),
    # Qwen3-0.6B: the merged q/k/v and gate/up projections have the ranks of all their parts
    *(_lora_shrink(*sizes) for sizes in ((48, 1024), (32, 1024), (16, 2048), (16, 3072))),
    *(_lora_expand(1024, outputs) for outputs in (1024, 2048, 3072)),
    *(_lora_expand(width, 1024) for width in (2048, 3072)),
    # Llama-3.1-8B's gate and up, its o_proj; the head of Qwen3-0.6B
    _matmul("matmul_28672_4096", 28672, 4096),
    _matmul("matmul_4096_4096_adds", 4096, 4096, adds=True),
    _matmul("matmul_151936_1024", 151_936, 1024),
    # Qwen3-0.6B's q/k/v, its o_proj, its gate and up, its down_proj
    _matmul("matmul_4096_1024", 4096, 1024),
    _matmul("matmul_1024_2048_adds", 1024, 2048, adds=True),
    _matmul("matmul_6144_1024", 6144, 1024),
    _matmul("matmul_1024_3072_adds", 1024, 3072, adds=True),
    *(_quantize_groups(width) for width in (1024, 2048, 3072, 4096)),
    # Qwen3-0.6B
    *_fp8_linears("0.6b_qkv", 4096, 1024, *_ROW_NUMBERS),
    *_fp8_linears("0.6b_o", 1024, 2048, *_ROW_NUMBERS, adds=True),
    *_fp8_linears("0.6b_gate_up", 6144, 1024, *_ROW_NUMBERS),
    *_fp8_linears("0.6b_down", 1024, 3072, *_ROW_NUMBERS, adds=True),
    *_fp8_linears("8b_gate_up", 28672, 4096, 1, 64, 256, 4096),  # Llama-3.1-8B
    *_fp8_linears("v3_o", 7168, 16384, 1, 64, 256, 4096),  # DeepSeek-V3
    *_fp8_linears("v3_kv_a", 576, 7168, 64),  # DeepSeek-V3: a last block of 64 rows
    *_int4_linears("0.6b_qkv", 4096, 1024, *_ROW_NUMBERS),
    *_int4_linears("0.6b_o", 1024, 2048, *_ROW_NUMBERS, adds=True),
    *_int4_linears("0.6b_gate_up", 6144, 1024, *_ROW_NUMBERS),
    *_int4_linears("0.6b_down", 1024, 3072, *_ROW_NUMBERS, adds=True),
    # Llama-3.1-8B in AWQ or GPTQ, MXFP4 and NVFP4
    *(
        _int4_linear(f"{kind}_8b_gate_up_{rows}", 28672, 4096, rows, group_size, e2m1=e2m1)
        for kind, group_size, e2m1 in (
            ("int4_g128", 128, False), ("int4_g32", 32, False),
            ("mxfp4", 32, True), ("nvfp4", 16, True),
        )
        for rows in (1, 64, 4096)
    ),
    *(
        _int4_linear(
            f"{kind}_f16_8b_gate_up_1", 28672, 4096, 1, group_size, e2m1=e2m1, dtype=torch.float16
        )
        for kind, group_size, e2m1 in (("int4_g128", 128, False), ("nvfp4", 16, True))
    ),
    _sum_pieces(1024, adds=True),
    _sum_pieces(4096),
    _sum_pieces(6144),
    # Comparisons when Qwen3-0.6B and Llama-3.1-8B are loaded
    _attention("d128_g2_f32", _CHUNK, dtype=torch.float32, **_D128_G2),
    _attention("d128_g2_b8_f32", *_LOADING, dtype=torch.float32, block_size=8, **_D128_G2),
    _attention("d128_f32", _CHUNK, dtype=torch.float32, **_D128),
    _attention("d128_b8_f32", *_LOADING, dtype=torch.float32, block_size=8, **_D128),
    _kv_write("kv_write_d128_f32", 8, 128, dtype=torch.float32),
    _kv_write("kv_write_d128_b8_f32", 8, 128, dtype=torch.float32, block_size=8),
    _rotary("rotary_d128_norms_g2_f32", 16, 8, 128, norms=True, dtype=torch.float32),
    _rotary("rotary_d128_f32", 32, 8, 128, dtype=torch.float32),
    _rows("rms_norm", 1024, torch.float32),
    _rows("rms_norm", 4096, torch.float32),
    _rows("silu_mul", 3072, torch.float32),
    _rows("silu_mul", 14336, torch.float32),
    # Qwen3.6-35B-A3B and Qwen3-Next; Nemotron 3 Nano, whose norms span 8 heads
    _gated_delta(
        "gated_delta_128", *_CONVOLUTION, *_DELTA, "_gated_norm_kernel",
        key_heads=16, value_heads=32, key_width=128, value_width=128,
    ),
    _mamba2(
        "mamba2_128", *_CONVOLUTION, "_mamba2_kernel", *_MAMBA2_CHUNKS, "_gated_norm_kernel",
        groups=8, heads=64, width=64, state_size=128,
    ),
    # Kimi Linear; Jamba
    _gated_delta(
        "kimi_delta_128", *_DELTA, "_gated_norm_kernel",
        key_heads=32, value_heads=32, key_width=128, value_width=128, by_row=True,
    ),
    _mamba1("mamba1_16", channels=8192, state_size=16),
    *_experts("qwen3_30b", Routing(128, 8), 2048, 768),
    # Comparisons when Qwen3-30B is loaded
    *_experts("qwen3_30b_f32", Routing(128, 8), 2048, 768, dtype=torch.float32, adds=False),
    *_experts("qwen3_30b_writes", Routing(128, 8), 2048, 768, adds=False)[-1:],
    *_experts("qwen3_30b_adds_f32", Routing(128, 8), 2048, 768, dtype=torch.float32)[-1:],
    *_experts("mixtral_8x7b", Routing(8, 2), 4096, 14336),
    *_experts("gpt_oss_20b", Routing(32, 4), 2880, 2880, bias=True, activation=GPT_OSS),
    *_experts(
        "qwen3_next_80b", Routing(512, 10, num_shared=1, gates_shared=True), 2048, 512
    ),
    *_experts(
        "v3",
        Routing(
            256, 8, sigmoid=True, scale=2.5, num_groups=8, top_groups=4, group_sum=2, num_shared=1
        ),
        7168, 2048,
        logits_dtype=torch.float32,
    ),
)  # fmt: skip
