"""Builds for lesser processors than this one, and with tiles in plain C, equal the references."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from batchinfer.kernels.cpu import compiled_library, decoder_layer, encoder_layers, gemm, row_ops
from batchinfer.kernels.cpu import paged_attention as cpu_attention
from batchinfer.worker.attention.attention import make_backend
from batchinfer.worker.forward import forward
from batchinfer.worker.linear_kernels import linear_kernels
from tests.kernels import cpu_mla, test_cpu_gemm, test_cpu_paged_attention, test_cpu_row_ops
from tests.kernels.cases import AttentionCase
from tests.kernels.cpu_attention_cases import (
    CPU_CASES,
    ODD_CASES,
    TOLERANCE,
    check_attention,
    check_attention_over_fp8,
)
from tests.kernels.cpu_gemm_cases import (
    FLOAT8_CASES,
    check_float8,
    check_low_bit,
    check_many_rows,
    check_product,
    check_rows_do_not_depend_on_each_other,
)
from tests.kernels.encoder_cases import (
    ENCODER_CASES,
    EncoderCase,
    check_bits_of_a_sequence,
    check_encoder_layers,
)
from tests.kernels.low_bit_cases import LOW_BIT_CASES, LowBitCase, build_low_bit
from tests.kernels.mla_cases import MLACase
from tests.kernels.row_cases import ROTARY_CASES, ROW_CASES, RotaryCase, RowCase
from tests.worker.fusion.test_native_layers import Run, fused

_FLAGS = {
    "no_pairs": ("-mno-amx-tile", "-mno-avx512bf16", "-mno-avx512vnni"),
    "lanes_8": ("-mno-amx-tile", "-mno-avx512f", "-mno-avxvnni"),
    "lanes_4": ("-mno-amx-tile", "-mno-avx512f", "-mno-avx2"),
    "plain": ("-mno-amx-tile", "-mno-avx"),  # and with it, no fused multiply-adds
    "tiles": ("-DEMULATE_TILES",),
}

pytestmark = [
    pytest.mark.skipif(compiled_library.load() is None, reason="no C compiler here"),
    pytest.mark.usefixtures("other"),
]
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
pools = pytest.mark.parametrize("fp8", [False, True])


_BUILDS = [
    pytest.param(flags, id=name, marks=[] if name == "lanes_8" else [pytest.mark.long])
    for name, flags in _FLAGS.items()
]


@pytest.fixture(scope="module", params=_BUILDS)
def other(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """The kernels as they are built for processors that have other instructions."""
    flags = " ".join(request.param)
    folder: Path = tmp_path_factory.mktemp("build")
    compiler = folder / "cc"
    compiler.write_text(f'#!/bin/sh\nexec {shutil.which("cc")} "$@" {flags} -O1\n')
    compiler.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", str(compiler))
        patch.setenv("XDG_CACHE_HOME", str(folder))
        built = compiled_library.load.__wrapped__()
        if built is None:
            pytest.skip(f"the compiler does not know {flags}")
        assert request.param == _FLAGS["tiles"] or not built.lies_in_pairs()
        for module in (cpu_attention, gemm, row_ops, decoder_layer, encoder_layers):
            patch.setattr(module, "load", lambda: built)
        linear_kernels.cache_clear()
        yield
    linear_kernels.cache_clear()


@pytest.mark.long
@dtypes
@pytest.mark.parametrize("case", ODD_CASES, ids=str)
def test_attention_over_a_pool_of_float8(case: AttentionCase, dtype: torch.dtype) -> None:
    check_attention_over_fp8(case, dtype)


@dtypes
@pytest.mark.parametrize("case", cpu_mla.CASES[::2], ids=str)
def test_latents_are_attended_to(case: MLACase, dtype: torch.dtype) -> None:
    cpu_mla.check_latents(case, dtype)


def test_every_number_of_float8_is_widened_exactly() -> None:
    test_cpu_paged_attention.test_every_number_of_float8_is_widened_exactly(40)


@dtypes
@pytest.mark.parametrize("case", [*CPU_CASES[::10], ODD_CASES[1]], ids=str)
def test_attention_equals_its_reference(case: AttentionCase, dtype: torch.dtype) -> None:
    check_attention(case, dtype)


@dtypes
@pools
@pytest.mark.parametrize("block_size", [2, 32])
@pytest.mark.parametrize(("window", "width"), [(0, 64), (0, 24), (37, 80)])
def test_a_token_has_the_same_bits_however_its_attention_is_computed(
    dtype: torch.dtype, block_size: int, window: int, width: int, fp8: bool
) -> None:
    test_cpu_paged_attention.test_a_token_has_the_same_bits_however_it_is_computed(
        dtype, block_size, window, width, fp8
    )


@dtypes
@pools
@pytest.mark.parametrize(
    "branches", test_cpu_paged_attention.BRANCHES.values(), ids=test_cpu_paged_attention.BRANCHES
)
def test_shared_prefixes_change_no_bit(
    branches: test_cpu_paged_attention.Branches,
    dtype: torch.dtype,
    fp8: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    test_cpu_paged_attention.test_shared_prefixes_change_no_bit(
        branches, 64, dtype, fp8, monkeypatch
    )


@dtypes
def test_later_tokens_cannot_spoil_earlier_ones(dtype: torch.dtype) -> None:
    test_cpu_paged_attention.test_later_tokens_cannot_spoil_earlier_ones(dtype)


def test_attention_is_computed_by_any_of_the_instructions_there_are() -> None:
    test_cpu_paged_attention.test_attention_by_each_of_the_instructions_there_are()


def test_each_engine_of_a_process_attends_by_its_own_instructions() -> None:
    """Also where another one takes over the pool: layers keep what the C code is called with."""
    wide = {"head_dim": 128, "num_hidden_layers": 6}  # for sums that differ once they are rounded
    model, layout = fused("qwen3", joined=True, dtype=torch.bfloat16, **wide)
    run = Run("qwen3", layout, torch.bfloat16, **wide)
    step = run.maker.step([(run.first, 40), (run.second, 25)], every_logit=True)
    own = [kernel for kernel in linear_kernels(torch.bfloat16) if kernel.kind == "own"]
    backends = [make_backend(run.cache, kernel) for kernel in own]
    first = [forward(model, run.cache, backend, step) for backend in backends]
    again = [forward(model, run.cache, backend, step) for backend in backends]
    assert all(map(torch.equal, first, again))
    different = {logits.view(torch.uint8).numpy().tobytes() for logits in first}
    assert len(different) == len(cpu_attention.available(torch.bfloat16))


@dtypes
@pytest.mark.parametrize("rows", [0, 1, 5, 6, 7, 13, 14, 15, 40])
@pytest.mark.parametrize(("width", "outputs"), [(2, 1), (34, 31), (130, 33)])
def test_products_equal_those_in_float64(
    dtype: torch.dtype, rows: int, width: int, outputs: int
) -> None:
    check_product(dtype, rows, width, outputs)


@dtypes
def test_a_row_of_a_product_has_the_same_bits_among_any_others(dtype: torch.dtype) -> None:
    check_rows_do_not_depend_on_each_other(dtype)


@dtypes
@pytest.mark.parametrize("rows", [257, 289])
def test_rows_beyond_those_taken_at_once_have_the_same_bits(
    dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_many_rows(dtype, rows, monkeypatch)


@dtypes
@pytest.mark.parametrize(("rows", "shape", "block"), FLOAT8_CASES[1:])
def test_float8_is_multiplied_as_the_numbers_it_stands_for(
    dtype: torch.dtype, rows: int, shape: tuple[int, int], block: int
) -> None:
    check_float8(dtype, rows, shape, block)


@dtypes
@pytest.mark.parametrize("case", LOW_BIT_CASES, ids=str)
def test_low_bit_products_have_the_bits_of_their_reference(
    dtype: torch.dtype, case: LowBitCase
) -> None:
    check_low_bit(*build_low_bit(case, dtype))


def test_weights_are_packed_for_any_of_the_instructions_there_are() -> None:
    test_cpu_gemm.test_a_packed_weight_tells_by_what_it_is_multiplied(torch.bfloat16)


def test_sums_of_floats_have_the_same_bits_wherever_multiply_adds_are_fused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What makes up a float is one chain, whatever the width of a vector."""
    if gemm.instructions(torch.float32) == "plain C":
        pytest.skip("nothing is fused")
    x, weight = torch.randn(9, 130), torch.randn(70, 130)
    outs = []
    for _ in range(2):
        out = torch.empty(9, 70)
        gemm.gemm(x, gemm.pack(weight), None, out=out)
        outs.append(out)
        monkeypatch.setattr(gemm, "load", compiled_library.load)
    assert torch.equal(*outs)


@dtypes
@pytest.mark.parametrize("case", ROW_CASES[::2], ids=str)
def test_row_ops_equal_their_references(case: RowCase, dtype: torch.dtype) -> None:
    test_cpu_row_ops.test_rms_norm(case, dtype)
    test_cpu_row_ops.test_silu_mul(case, dtype)


@dtypes
@pytest.mark.parametrize("case", ROTARY_CASES, ids=str)
def test_rotary_write_equals_its_reference(case: RotaryCase, dtype: torch.dtype) -> None:
    test_cpu_row_ops.test_rotary_write(case, dtype)


@dtypes
def test_decoder_layers_give_the_logits_of_transformers(dtype: torch.dtype) -> None:
    model, layout = fused("qwen3", joined=True, dtype=dtype)
    run = Run("qwen3", layout, dtype)
    expected = run.expected[0]
    got = torch.cat([run.logits(model, (run.first, count)) for count in (30, 1, 9)])
    assert (got.float() - expected).norm() < (
        1e-4 if dtype == torch.float32 else 0.1
    ) * expected.norm()


@dtypes
@pytest.mark.parametrize("case", ENCODER_CASES[:-1], ids=str)
def test_encoder_layers_equal_those_in_float64(case: EncoderCase, dtype: torch.dtype) -> None:
    check_encoder_layers(case, dtype)


@dtypes
def test_a_sequence_has_the_same_bits_in_any_company(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_bits_of_a_sequence(dtype, monkeypatch)
