"""What ``batchinfer bench`` measures. Names are those of ``vllm bench throughput``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from batchinfer.errors import UsageError

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class BenchOptions:
    """A model, the prompts to run through it, and the engine keys that matter for throughput.

    Raises:
        UsageError: an unknown dtype.
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
