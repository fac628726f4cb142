"""Options of ``batchinfer run-batch`` and ``batchinfer bench``.

Imports nothing heavy, so that usage errors are quick.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from batchinfer.errors import StorageError, UsageError

DTYPES = ("auto", "float32", "bfloat16", "float16")

Model = Annotated[str, typer.Option("--model", metavar="MODEL", help="Hub id or local directory.")]
Dtype = Annotated[str, typer.Option(metavar="NAME", help="auto, float32, bfloat16 or float16.")]
Count = Annotated[int | None, typer.Option(metavar="N", min=1)]
"""None: the default of the engine or the model."""

MODEL_KEYS = ("revision", "tokenizer", "dtype", "max_model_len")
"""Options that are also keys of the section ``model``."""
BENCH_ENGINE_KEYS = ("max_num_seqs", "max_num_batched_tokens", "block_size", "num_kv_blocks")
BATCH_ENGINE_KEYS = (*BENCH_ENGINE_KEYS, "gpu_memory_utilization", "kv_cache_dtype")
"""Options that are also keys of the section ``engine``."""

BENCH_TASKS = ("auto", "generate", "embed", "classify")


@dataclass(frozen=True)
class BatchOptions:
    """A batch file, a model, and keys of the job that answers it; None: the key's default."""

    input_file: Annotated[
        str, typer.Option("-i", "--input-file", metavar="FILE", help="Requests, one per line.")
    ]
    output_file: Annotated[
        str,
        typer.Option(
            "-o",
            "--output-file",
            metavar="FILE",
            help="Answers and errors: a file, its URL, or /dev/stdout.",
        ),
    ]
    model: Model
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Model name that requests must use (default: any)."),
    ] = None
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Default max_tokens (default: up to the model's limit)."
        ),
    ] = None
    revision: Annotated[str | None, typer.Option(metavar="REF", help="Branch, tag or commit.")] = (
        None
    )
    tokenizer: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Hub id or local directory.")
    ] = None
    dtype: Dtype = "auto"
    max_model_len: Count = None
    chat_template: Annotated[str | None, typer.Option(metavar="FILE", help="A file, or none.")] = (
        None
    )
    default_chat_template_kwargs: Annotated[
        str | None, typer.Option(metavar="JSON", help="E.g. '{\"enable_thinking\": false}'.")
    ] = None
    reasoning_parser: Annotated[
        str,
        typer.Option(metavar="NAME", help="Split reasoning from answers: auto, qwen3, ..., none."),
    ] = "none"
    tool_call_parser: Annotated[
        str, typer.Option(metavar="NAME", help="Tool call format: auto, hermes, ...")
    ] = "none"
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Default seed.")] = 0
    max_num_seqs: Count = None
    max_num_batched_tokens: Count = None
    block_size: Count = None
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Share of device memory to use.")
    ] = None
    num_kv_blocks: Count = None
    kv_cache_dtype: Annotated[str | None, typer.Option(metavar="NAME", help="auto or fp8.")] = None
    max_error_rate: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            min=0,
            max=1,
            help="Failed share above which the exit code is 3.",
        ),
    ] = 1.0
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete existing answers and start over.")
    ] = False
    retry_errors: Annotated[bool, typer.Option("--retry-errors", help="Retry failed requests.")] = (
        False
    )
    update: Annotated[
        bool, typer.Option("--update", help="Recompute only requests that changed.")
    ] = False
    quiet: Annotated[bool, typer.Option("--quiet", help="Hide progress.")] = False

    def chat_template_kwargs(self) -> dict[str, Any] | None:
        """The JSON object in ``default_chat_template_kwargs``; UsageError if it is not one."""
        text, option = self.default_chat_template_kwargs, "--default-chat-template-kwargs"
        try:
            value = None if text is None else json.loads(text)
        except ValueError as error:
            raise UsageError(f"{option} is not JSON: {error}") from None
        if value is not None and not isinstance(value, dict):
            raise UsageError(f'{option} must be an object, like {{"enable_thinking": false}}')
        return value


@dataclass(frozen=True)
class BenchOptions:
    """A model, the prompts to run, and the engine keys that affect throughput.

    Names are those of ``vllm bench throughput``. End-of-sequence tokens are ignored.

    Raises:
        UsageError: unknown dtype or task.
        StorageError: ``output_json`` cannot be written.
    """

    model: Model
    input_len: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Tokens per synthetic prompt; default: 1024, or fewer where the model or answers "
            "need the room.",
        ),
    ] = None
    output_len: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens per answer.")] = 128
    num_prompts: Annotated[int, typer.Option(metavar="N", min=1, help="Prompts to run.")] = 1000
    n: Annotated[int, typer.Option("--n", metavar="N", min=1, help="Samples per prompt.")] = 1
    dtype: Dtype = "auto"
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of prompts and sampling.")] = 0
    max_num_seqs: Count = None
    max_num_batched_tokens: Count = None
    block_size: Count = None
    num_kv_blocks: Count = None
    task: Annotated[
        str,
        typer.Option(
            help="auto (what the model is saved for), generate, embed or classify; of the last two "
            "a row is a prompt."
        ),
    ] = "auto"
    dataset: Annotated[
        Path | None,
        typer.Option(
            "--dataset", metavar="FILE", help="Parquet file of prompts or token ids to run."
        ),
    ] = None
    output_json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the result to a file.")
    ] = None
    deterministic: Annotated[
        bool,
        typer.Option("--deterministic", help="Also measure the cost of engine.deterministic."),
    ] = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UsageError(f"--dtype {self.dtype}: must be one of {', '.join(DTYPES)}")
        if self.task not in BENCH_TASKS:
            raise UsageError(f"--task {self.task}: must be one of {', '.join(BENCH_TASKS)}")
        if self.output_json is not None:
            _check_writable(self.output_json)


def given(options: BatchOptions | BenchOptions, names: Iterable[str]) -> dict[str, Any]:
    """The options among ``names`` that are not None, by name."""
    values = ((name, getattr(options, name)) for name in names)
    return {name: value for name, value in values if value is not None}


def _check_writable(path: Path) -> None:
    """Check before measuring, without creating the file."""
    problem = None
    if path.is_dir():
        problem = "is a folder"
    elif not path.parent.is_dir():
        problem = "is in a folder that does not exist"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        problem = "cannot be written: no permission, or a read-only file system"
    if problem is not None:
        raise StorageError(f"--output-json {path} {problem}")
