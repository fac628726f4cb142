"""Compilation of the C kernels, and the cache of compiled libraries."""

from __future__ import annotations

import logging
import os
import subprocess
from pathlib import Path

import pytest
import torch

from batchinfer.kernels.cpu import compiled_library
from batchinfer.kernels.cpu import paged_attention as cpu_attention

_SAME_VERSION = """#!/bin/sh
while [ $# -gt 0 ]; do [ "$1" = -o ] && touch "$2"; shift; done
echo "compiler 1.0"
"""
compiled = pytest.mark.skipif(compiled_library.load() is None, reason="no C compiler here")


def test_missing_compiler_disables_the_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled_library, "_why_not", "")
    monkeypatch.setenv("CC", "no-such-compiler")
    caplog.set_level(logging.WARNING, "batchinfer")
    assert compiled_library.load.__wrapped__() is None
    assert compiled_library.why_not() == "there is no C compiler (cc, or $CC)"
    assert caplog.messages == [f"the C kernels cannot be compiled: {compiled_library.why_not()}"]
    monkeypatch.setattr(cpu_attention, "load", lambda: None)
    assert not cpu_attention.supports(torch.float32)


@compiled
@pytest.mark.parametrize(("flag", "tiles"), [("-mavx512bf16", "1"), ("-mno-avx512bf16", "0")])
def test_amx_needs_bf16_vectors_for_the_same_pool(flag: str, tiles: str) -> None:
    """If Linux refuses AMX to a process, bf16 vector instructions attend over the same pool."""
    header = Path(compiled_library.__file__).with_name("amx_tiles.h")
    compiler = os.environ.get("CC", "cc")
    command = [compiler, "-march=sapphirerapids", flag, "-include", str(header), "-E", "-P", "-"]
    ran = subprocess.run(command, input="HAS_TILES", capture_output=True, text=True)
    if ran.returncode:
        pytest.skip("the compiler does not support such processors")
    assert ran.stdout.split()[-1] == tiles


@pytest.fixture
def fast_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile without optimization, to save time."""
    compiler = tmp_path / "fast-cc"
    compiler.write_text(f'#!/bin/sh\nexec {os.environ.get("CC", "cc")} "$@" -O0\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))


@compiled
@pytest.mark.usefixtures("fast_compiler")
def test_library_is_compiled_once_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    caplog.set_level(logging.WARNING, "batchinfer")  # an earlier `run --quiet` may have changed it
    assert compiled_library.load.__wrapped__() is not None
    (built,) = (tmp_path / "batchinfer").iterdir()
    built_at = built.stat().st_mtime_ns
    assert compiled_library.load.__wrapped__() is not None
    assert built.stat().st_mtime_ns == built_at
    [line] = caplog.messages
    assert line == f"compiling the C kernels for this processor into {built.parent} (only once)"


@compiled
@pytest.mark.usefixtures("fast_compiler")
def test_cache_folder_that_other_users_can_write_to_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache" / "batchinfer").mkdir(parents=True)
    (tmp_path / "cache" / "batchinfer").chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(compiled_library.tempfile, "gettempdir", lambda: str(tmp_path))
    assert compiled_library.load.__wrapped__() is not None
    assert not list((tmp_path / "cache" / "batchinfer").iterdir())


def test_each_compiler_path_has_its_own_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    built = set()
    for name in ("cc", "cc-with-flags"):
        compiler = tmp_path / name
        compiler.write_text(_SAME_VERSION)
        compiler.chmod(0o755)
        built.add(compiled_library._built(str(compiler)))
    assert len(built) == 2


def test_compiler_error_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] || { echo "x.c: error: no" >&2; exit 1; }\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setattr(compiled_library, "_why_not", "")
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    caplog.set_level(logging.WARNING, "batchinfer")
    assert compiled_library.load.__wrapped__() is None
    assert caplog.messages[-1] == (
        f"the C kernels cannot be compiled by {compiler}: x.c: error: no"
    )
    assert (
        compiled_library.why_not()
        == f"the C kernels cannot be compiled by {compiler}: x.c: error: no"
    )


def test_compiler_timeout_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The message has the reason but not the compiler's long command."""
    compiler = tmp_path / "slow-cc"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] || exec tail -f /dev/null\n')
    compiler.chmod(0o755)
    monkeypatch.setattr(compiled_library, "_why_not", "")
    monkeypatch.setattr(compiled_library, "_MOST_SECONDS", 0.1)
    monkeypatch.setattr(compiled_library, "_openmp_libraries", tuple)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    caplog.set_level(logging.WARNING, "batchinfer")
    assert compiled_library.load.__wrapped__() is None
    assert caplog.messages[-1].endswith(
        f"cannot be compiled by {compiler}: timed out after 0.1 seconds"
    )
