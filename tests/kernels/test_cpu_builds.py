"""Runs tests of the C kernels again with other builds: for older processors, and with emulated AMX.

The imported tests run with the build of the fixture `other_build`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch

from batchinfer.kernels.cpu import (
    compiled_library,
    decoder_layer,
    encoder_layers,
    gated_delta,
    gemm,
    row_ops,
)
from batchinfer.kernels.cpu import paged_attention as cpu_attention
from batchinfer.worker.attention.attention import make_backend
from batchinfer.worker.forward import forward
from batchinfer.worker.linear_kernels import linear_kernels
from tests.kernels.cases import AttentionCase
from tests.kernels.cpu_attention_cases import (
    CPU_CASES,
    ODD_CASES,
    TOLERANCE,
    check_attention,
    check_attention_over_fp8,
)
from tests.kernels.cpu_builds import load_build
from tests.kernels.test_cpu_encoder_layers import (  # noqa: F401
    test_encoder_layers_equal_float64,
    test_sequence_bits_do_not_depend_on_other_sequences,
)
from tests.kernels.test_cpu_gemm import (  # noqa: F401
    test_float8_gemm_has_the_bits_of_the_dequantized_weight,
    test_gemm_equals_float64,
    test_gemm_row_bits_are_the_same_for_many_rows,
    test_gemm_row_bits_do_not_depend_on_other_rows,
    test_packed_weight_names_its_instructions,
)
from tests.kernels.test_cpu_paged_attention import (  # noqa: F401
    test_cpu_attention_converts_every_float8_exactly,
    test_cpu_attention_over_latents_equals_reference,
    test_cpu_attention_with_all_available_instructions,
    test_nan_in_later_tokens_does_not_affect_earlier_tokens,
    test_shared_prefixes_change_no_bits,
    test_token_bits_do_not_depend_on_chunks,
)
from tests.kernels.test_cpu_row_ops import (  # noqa: F401
    test_cpu_rms_norm_equals_reference,
    test_cpu_rotary_write_equals_reference,
    test_cpu_sigmoid_mul_equals_reference,
    test_cpu_silu_mul_equals_reference,
)
from tests.kernels.test_gated_delta import (  # noqa: F401
    test_bits_do_not_depend_on_steps_and_neighbors,
    test_c_kernel_equals_reference,
)
from tests.kernels.test_low_bit import test_low_bit_gemm_has_the_bits_of_its_reference  # noqa: F401
from tests.worker.fusion.test_native_layers import Run, fused

_FLAGS = {
    "no_pairs": ("-mno-amx-tile", "-mno-avx512bf16", "-mno-avx512vnni"),
    "lanes_8": ("-mno-amx-tile", "-mno-avx512f", "-mno-avxvnni"),
    "lanes_4": ("-mno-amx-tile", "-mno-avx512f", "-mno-avx2"),
    "plain": ("-mno-amx-tile", "-mno-avx"),  # also disables fused multiply-adds
    "tiles": ("-DEMULATE_TILES",),
}

pytestmark = [
    pytest.mark.skipif(compiled_library.load() is None, reason="no C compiler"),
    pytest.mark.usefixtures("other_build"),
]
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


_MODULES = cpu_attention, gemm, row_ops, decoder_layer, encoder_layers, gated_delta
_BUILDS = [
    pytest.param(build, id=build[0], marks=[] if build[0] == "lanes_8" else [pytest.mark.long])
    for build in _FLAGS.items()
]


@pytest.fixture(scope="module", params=_BUILDS)
def other_build(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Load kernels that are built for a processor with other instructions."""
    name, flags = request.param
    added = " ".join(flags)
    built = load_build(name, f'{shutil.which("cc")} "$@" {added} -O1', tmp_path_factory)
    if built is None:
        pytest.skip(f"the compiler does not support {added}")
    assert name == "tiles" or not built.stores_pairs()
    with pytest.MonkeyPatch.context() as patch:
        for module in _MODULES:
            patch.setattr(module, "load", lambda: built)
        linear_kernels.cache_clear()
        yield
    linear_kernels.cache_clear()


@dtypes
@pytest.mark.parametrize("case", [*CPU_CASES[::10], ODD_CASES[1]], ids=str)
def test_cpu_attention_equals_reference(case: AttentionCase, dtype: torch.dtype) -> None:
    check_attention(case, dtype)


@pytest.mark.long
@dtypes
@pytest.mark.parametrize("case", ODD_CASES, ids=str)
def test_cpu_attention_over_float8_equals_reference(
    case: AttentionCase, dtype: torch.dtype
) -> None:
    check_attention_over_fp8(case, dtype)


def test_engines_in_one_process_use_their_own_instructions() -> None:
    """Layers keep their C functions' arguments, even if another engine uses the same pool."""
    wide = {"head_dim": 128, "num_hidden_layers": 6}  # sums of other instructions round differently
    model, layout = fused("qwen3", joined=True, dtype=torch.bfloat16, **wide)
    run = Run("qwen3", layout, torch.bfloat16, **wide)
    step = run.maker.step([(run.first, 40), (run.second, 25)], every_logit=True)
    native = [kernel for kernel in linear_kernels(torch.bfloat16) if kernel.kind == "own"]
    backends = [make_backend(run.cache, kernel) for kernel in native]
    first = [forward(model, run.cache, backend, step) for backend in backends]
    again = [forward(model, run.cache, backend, step) for backend in backends]
    assert all(map(torch.equal, first, again))
    different = {logits.view(torch.uint8).numpy().tobytes() for logits in first}
    assert len(different) == len(cpu_attention.available(torch.bfloat16))


def test_float32_gemm_bits_do_not_depend_on_the_vector_width(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each output is one chain of fused multiply-adds."""
    if gemm.instructions(torch.float32) == "plain C":
        pytest.skip("this build has no fused multiply-adds")
    x, weight = torch.randn(9, 130), torch.randn(70, 130)
    outs = []
    for _ in range(2):
        out = torch.empty(9, 70)
        gemm.gemm(x, gemm.pack(weight), None, out=out)
        outs.append(out)
        monkeypatch.setattr(gemm, "load", compiled_library.load)
    assert torch.equal(*outs)


@dtypes
def test_decoder_layers_equal_transformers(dtype: torch.dtype) -> None:
    model, layout = fused("qwen3", joined=True, dtype=dtype)
    run = Run("qwen3", layout, dtype)
    expected = run.expected[0]
    got = torch.cat([run.logits(model, (run.first, count)) for count in (30, 1, 9)])
    assert (got.float() - expected).norm() < (
        1e-4 if dtype == torch.float32 else 0.1
    ) * expected.norm()
