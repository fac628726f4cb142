"""Compiles the C kernels in this folder to a shared library on first use, and loads it.

Compiling needs a C compiler (``$CC``, or else ``cc``). The library is cached for each combination
of source, flags, compiler and processor.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

# Compilation is logged as a warning, so that users see why the first start takes longer.
_log = logging.getLogger(__name__)

POINTER, INT64, INT32, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}
"""Suffixes of C functions' names, keyed by the dtype that they compute in."""
_OTHER_SUFFIX = {torch.float8_e4m3fn: "e4m3"}
"""Suffixes for dtypes that only the KV pool can have."""

_FOLDER = Path(__file__).resolve().parent
_SOURCES = tuple(sorted(path.name for path in _FOLDER.glob("*.c")))
_INCLUDED = tuple(sorted(path.name for path in _FOLDER.glob("*.[hi]*")))
# The compiler may reorder sums to vectorize them, but must respect NaN and infinity.
FLAGS = (
    *("-O3", "-fPIC", "-shared", "-std=gnu11"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"),
    *("-freciprocal-math", "-ffp-contract=fast"),
)
_X86, _ARM = ("-march=native", "-mprefer-vector-width=512"), ("-mcpu=native",)
_FOR_THIS_PROCESSOR = {"x86_64": _X86, "AMD64": _X86, "aarch64": _ARM, "arm64": _ARM}

_MOST_SECONDS = 600
"""Time limit for the compiler, in seconds. The limit is high, because compiling can take minutes on
a busy machine. After a timeout, torch operations would run instead and give other bits."""

_why_not = ""


@functools.cache
def load() -> ctypes.CDLL | None:
    """Return the compiled library, or warn and return None if it cannot be built. The result is
    cached."""
    global _why_not
    _why_not = ""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        _why_not = "there is no C compiler (cc, or $CC)"
        _log.warning("the C kernels cannot be compiled: %s", _why_not)
        return None
    try:
        return ctypes.CDLL(str(_built(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        printed = getattr(error, "stderr", None) or b""
        without_command = str(error).rpartition("]' ")[2]
        lines = printed.decode(errors="replace").split("\n") if printed else [without_command]
        reason = next((line for line in lines if "error" in line), lines[0])
        _why_not = f"the C kernels cannot be compiled by {compiler}: {reason[:200]}"
        _log.warning("the C kernels cannot be compiled by %s: %s", compiler, reason[:200])
        return None


def why_not() -> str:
    """Return why ``load`` returns None, or "" after a success."""
    load()
    return _why_not


def source_digest() -> str:
    return hashlib.sha256(b"|".join(_source())).hexdigest()


def cache_folder() -> Path | None:
    """Return the user's cache folder for compiled kernels, or None if no folder is writable."""
    return next((folder for folder in _own_folders() if os.access(folder, os.W_OK)), None)


_KERNELS = 1, 0  # TILES and VECTORS of arguments.h, the fastest first


def kernels_of(library: ctypes.CDLL | None, operation: str, dtype: torch.dtype) -> dict[str, int]:
    """Return the available kernels of an operation ("gemm" or "attend"), the fastest first.

    The keys are the names of the kernels' instruction sets; the values are the kernels' numbers in
    C. Kernels with equal names give equal bits.
    """
    return kernels_by_suffix(library, operation, _OTHER_SUFFIX.get(dtype) or SUFFIX[dtype])


def kernels_by_suffix(library: ctypes.CDLL | None, operation: str, suffix: str) -> dict[str, int]:
    """Like ``kernels_of``, for a suffix of C function names instead of a dtype."""
    function = getattr(library, f"{operation}_instructions_{suffix}")
    function.restype = ctypes.c_char_p
    names = ((function(kernel), kernel) for kernel in _KERNELS)
    return {name.decode(): kernel for name, kernel in names if name is not None}


def chosen(kernels: dict[str, int], instructions: str | None) -> int:
    """Return the number of the kernel for ``instructions``, or of the fastest kernel if None."""
    if instructions is None:
        return next(iter(kernels.values()))
    if instructions not in kernels:
        available = ", ".join(kernels)
        raise ValueError(f"{instructions} cannot be used on this machine, which has {available}")
    return kernels[instructions]


def _built(compiler: str) -> Path:
    openmp = _openmp_libraries()
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=30)
    flags = (*FLAGS, *for_this_processor())
    # Include the compiler's path, because a wrapper that adds flags prints the same version as the
    # compiler that it calls.
    parts = [compiler.encode(), version.stdout, processor(), *map(str.encode, (*flags, *openmp))]
    name = f"kernels-{hashlib.sha256(b'|'.join((*parts, *_source()))).hexdigest()[:24]}.so"
    for folder in _own_folders():
        path = folder / name
        try:
            if path.exists():
                return path
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                new = Path(scratch) / name
                sources = [str(_FOLDER / source) for source in _SOURCES]
                _log.warning(
                    "compiling the C kernels for this processor into %s (only once)", folder
                )
                subprocess.run(
                    [compiler, *flags, *sources, "-o", str(new), "-fopenmp", *openmp, "-lm"],
                    capture_output=True,
                    check=True,
                    timeout=_MOST_SECONDS,
                )
                os.replace(new, path)  # another process may have compiled the same library
                return path
        except OSError:
            continue
    raise OSError("no folder is writable, so the kernels cannot be built")


def for_this_processor() -> tuple[str, ...]:
    """Return the compiler flags that enable all of this processor's instructions."""
    return _FOR_THIS_PROCESSOR.get(platform.machine(), ())


def _openmp_libraries() -> list[str]:
    """Return the paths of torch's OpenMP runtime. A second runtime would compete for the cores."""
    return [str(path) for path in (Path(torch.__file__).parent / "lib").glob("libgomp*.so*")]


def _source() -> list[bytes]:
    return [(_FOLDER / name).read_bytes() for name in (*_SOURCES, *_INCLUDED)]


def _own_folders() -> Iterator[Path]:
    """Yield the folders for compiled libraries, except those to which other users can write. Create
    missing folders."""
    for folder in _cache_folders():
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if _is_own(folder):
                yield folder
        except OSError:
            continue


def _cache_folders() -> list[Path]:
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        user = [Path(root) if root else Path.home() / ".cache"]
    except RuntimeError:  # the user has no home folder
        user = []
    shared = Path(tempfile.gettempdir()) / f"batchinfer-{os.getuid()}"
    return [*(folder / "batchinfer" for folder in user), shared]


def _is_own(folder: Path) -> bool:
    """Return true if only this user can write to a folder."""
    status = folder.stat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


def processor() -> bytes:
    """Return the properties of the processor that ``-march=native`` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}".encode()
    reporter = b"model name", b"flags", b"CPU implementer", b"CPU part", b"Features"
    return b"".join(sorted({line for line in lines if line.startswith(reporter)}))
