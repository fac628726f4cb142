"""Threads of the C kernels synchronize correctly under extreme interleaving: each thread runs until
it must wait before the next thread starts (``interleaving.c``)."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from batchinfer.kernels.cpu import compiled_library, decoder_layer, encoder_layers, gemm, row_ops
from batchinfer.kernels.cpu import paged_attention as cpu_attention
from batchinfer.worker.linear_kernels import linear_kernels
from tests.kernels.cpu_builds import load_build
from tests.kernels.cpu_gemm_cases import check_many_rows
from tests.kernels.encoder_cases import check_bits_of_a_sequence
from tests.worker.fusion import test_native_layers

pytestmark = [
    pytest.mark.long,  # it compiles all kernels
    pytest.mark.skipif(compiled_library.load() is None, reason="no C compiler"),
    pytest.mark.skipif(platform.system() != "Linux", reason="uses linker flags of GCC on Linux"),
    pytest.mark.usefixtures("interleaved"),
]
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(scope="module")
def interleaved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Load kernels whose threads run one after the other."""
    source = Path(__file__).with_name("interleaving.c")
    command = f'{shutil.which("cc")} {source} "$@" -O1 -Wl,-Bsymbolic -lpthread'
    built = load_build("interleaving", command, tmp_path_factory)
    assert built is not None
    with pytest.MonkeyPatch.context() as patch:
        for module in (
            compiled_library,
            cpu_attention,
            gemm,
            row_ops,
            decoder_layer,
            encoder_layers,
        ):
            patch.setattr(module, "load", lambda: built)
        linear_kernels.cache_clear()
        yield
    linear_kernels.cache_clear()


@dtypes
@pytest.mark.parametrize("method", ["", "int8", "int4"])
def test_decoder_layers_under_interleaving(
    dtype: torch.dtype, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_native_layers.test_joined_layers_have_the_bits_of_separate_calls(
        "mistral", {}, dtype, method, 3, monkeypatch
    )


@dtypes
def test_encoder_layers_under_interleaving(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_bits_of_a_sequence(dtype, monkeypatch)


@dtypes
def test_gemm_under_interleaving(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    check_many_rows(dtype, 257, monkeypatch)
