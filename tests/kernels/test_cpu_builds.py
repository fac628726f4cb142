"""Builds for lesser processors than this one: equal to the twins, as the build for this one is."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from batchinfer.kernels.cases import ATTENTION_CASES, AttentionCase
from batchinfer.kernels.cpu import library, native
from tests.kernels.cpu_attention import ODD_CASES, TOLERANCE, check_attention

_WITHOUT = {
    "no_pairs": ("-mno-avx512bf16",),
    "lanes_8": ("-mno-avx512f",),
    "lanes_4": ("-mno-avx512f", "-mno-avx2"),
}

pytestmark = pytest.mark.skipif(library.load() is None, reason="no C compiler here")


@pytest.fixture(scope="module", params=_WITHOUT.values(), ids=_WITHOUT.keys())
def lesser(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """The kernels as they are built for processors that lack some instructions."""
    flags = " ".join(request.param)
    folder: Path = tmp_path_factory.mktemp("build")
    compiler = folder / "cc"
    compiler.write_text(f'#!/bin/sh\nexec {shutil.which("cc")} "$@" {flags} -O1\n')
    compiler.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", str(compiler))
        patch.setenv("XDG_CACHE_HOME", str(folder))
        built = library.load.__wrapped__()
        if built is None:
            pytest.skip(f"the compiler does not know {flags}")
        assert not built.lies_in_pairs()
        patch.setattr(native, "load", lambda: built)
        yield


@pytest.mark.usefixtures("lesser")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", [*ATTENTION_CASES[::8], *ODD_CASES], ids=str)
def test_attention_equals_its_twin(case: AttentionCase, dtype: torch.dtype) -> None:
    check_attention(case, dtype)
