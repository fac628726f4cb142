"""What ``batchinfer bench`` measures. Names are those of ``vllm bench throughput``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from batchinfer.errors import StorageError, UsageError

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class BenchOptions:
    """A model, the prompts to run through it, and the engine keys that matter for throughput.

    Raises:
        UsageError: an unknown dtype.
        StorageError: ``output_json`` cannot be written.
    """

    model: str
    """Hub id or local directory."""
    input_len: int
    """Tokens per synthetic prompt."""
    output_len: int
    """Tokens per answer; end-of-sequence tokens are ignored."""
    num_prompts: int
    """Prompts to run."""
    n: int
    """Samples per prompt."""
    dtype: str
    """One of ``DTYPES``."""
    seed: int
    """Of the synthetic prompts and of sampling."""
    max_num_seqs: int | None
    """None: the engine's default, here and below."""
    max_num_batched_tokens: int | None
    block_size: int | None
    num_kv_blocks: int | None
    dataset: Path | None
    """Parquet file of prompts or token ids to run instead of synthetic ones."""
    output_json: Path | None
    """File for the result."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UsageError(f"--dtype {self.dtype}: must be one of {', '.join(DTYPES)}")
        if self.output_json is not None:
            _check_writable(self.output_json)


def _check_writable(path: Path) -> None:
    """Find out before measuring, and leave no trace of that."""
    problem = None
    if path.is_dir():
        problem = "is a folder"
    elif not path.parent.is_dir():
        problem = "is in a folder that does not exist"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        problem = "cannot be written: no permission, or a read-only file system"
    if problem is not None:
        raise StorageError(f"--output-json {path} {problem}")
