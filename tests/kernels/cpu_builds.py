"""Builds of the C kernels with other compiler flags, each compiled once for all pytest workers."""

from __future__ import annotations

import ctypes
import fcntl
import os

import pytest

from batchinfer.kernels.cpu import compiled_library


def load_build(
    name: str, command: str, tmp_path_factory: pytest.TempPathFactory
) -> ctypes.CDLL | None:
    """Compile the kernels if no worker has done so, and load them.

    Args:
        name: name of the build.
        command: shell command that compiles; its ``"$@"`` stands for the usual arguments.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"kernels-{name}"
    folder.mkdir(exist_ok=True)
    compiler = folder / "cc"
    with (folder / "lock").open("w") as lock, pytest.MonkeyPatch.context() as patch:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed
        if not compiler.exists():
            compiler.write_text(f"#!/bin/sh\nexec {command}\n")
            compiler.chmod(0o755)
        patch.setenv("CC", str(compiler))
        patch.setenv("XDG_CACHE_HOME", str(folder))
        return compiled_library.load.__wrapped__()
