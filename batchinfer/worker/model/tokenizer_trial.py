"""Tries a tokenizer file in a separate process, which may safely loop, run out of memory or crash.

Native code reads the file's patterns and tables when it loads the tokenizer, and uses its decoder
when it decodes tokens. Without the trial, a crash in that code would end the job without a message.
"""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from batchinfer.errors import ModelError, one_line

_CPU_S = 60
_WALL_S = 600
"""Limit of wall time, in seconds, for a process that sleeps or gets no processor time."""
_MEMORY_BYTES = 4 << 30
_PANICKED = 3
# sys.path is replaced first: it begins with the current folder, which may contain any modules.
_CODE = f"""
import sys
path, sys.path[:] = sys.argv[1], sys.argv[2:]
import resource
from tokenizers import Tokenizer
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_CPU, ({_CPU_S}, {_CPU_S} + 5))
if sys.platform == "linux":
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = {_MEMORY_BYTES} if most == resource.RLIM_INFINITY else min(most, {_MEMORY_BYTES})
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
try:
    tokenizer = Tokenizer.from_file(path)
except Exception:
    sys.exit()  # the main process reports it
except BaseException as error:  # a panic
    print(error, file=sys.stderr)
    sys.exit({_PANICKED})
try:
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    tokenizer.decode_batch([[id] for id in ids])
except BaseException:
    pass  # the job's rows report it
"""
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "RUST_BACKTRACE": "0"}


def try_tokenizer(path: Path) -> None:
    """Load a tokenizer.json and decode each of its tokens in a process with limits, once for the
    same content. Does nothing if this Python cannot start processes.

    Raises:
        ModelError: the process crashed or exceeded its limits.
        OSError: the file cannot be read.
    """
    problem = _problem(path, hashlib.sha256(path.read_bytes()).digest())
    if problem:
        raise ModelError(
            f"{path} cannot be used: loading it, or decoding its tokens, {problem}",
            hint="fetch tokenizer.json again, or set model.tokenizer",
        )


@functools.lru_cache(maxsize=64)
def _problem(path: Path, digest: bytes) -> str:
    """Return why the process failed, as the predicate of a sentence; "" if it did not fail.

    Args:
        digest: hash of the file's content, for the cache.
    """
    del digest
    if not sys.executable or getattr(sys, "frozen", False):
        return ""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CODE, str(path), *sys.path],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, **_ENVIRONMENT},
            timeout=_WALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"takes over {_WALL_S} s"
    except OSError:
        return ""
    code, stderr = done.returncode, done.stderr.decode(errors="replace")
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"takes over {_CPU_S} s of processor time, or all memory"
    if code < 0 and "memory allocation of" in stderr:
        return f"needs over {_MEMORY_BYTES >> 30} GiB of memory"
    last = one_line(ValueError(stderr.strip().rpartition("\n")[2]), 200)
    if code < 0:
        return f"ends the process ({signal.Signals(-code).name}): {last}"
    return f"fails: {last}" if code == _PANICKED else ""
