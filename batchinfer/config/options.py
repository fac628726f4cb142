"""Options of ``batchinfer run-batch`` and ``batchinfer bench``.

The module avoids slow imports, so that usage errors appear quickly.
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
BENCH_TASKS = ("auto", "generate", "embed", "classify")
MODEL_KEYS = ("revision", "tokenizer", "dtype", "max_model_len")
"""Options that are also keys of the job file's section ``model``."""
BENCH_ENGINE_KEYS = ("max_num_seqs", "max_num_batched_tokens", "block_size", "num_kv_blocks")
BATCH_ENGINE_KEYS = (*BENCH_ENGINE_KEYS, "gpu_memory_utilization", "kv_cache_dtype")
"""Options that are also keys of the job file's section ``engine``."""


def _option(help_: str, metavar: str | None = None, *names: str, **limits: Any) -> Any:
    return typer.Option(*names, metavar=metavar, help=help_, **limits)


Model = Annotated[str, _option("Hub id or local directory.", "MODEL", "--model")]
Dtype = Annotated[str, _option("auto, float32, bfloat16 or float16.", "NAME")]
Count = Annotated[int | None, typer.Option(metavar="N", min=1)]
"""A count; None for the default of the engine or the model."""
Text = str | None


@dataclass(frozen=True)
class BatchOptions:
    """Options of ``run-batch``: files, the model, and keys of the job; None for the default."""

    input_file: Annotated[
        str, _option("File of requests, one per line.", "FILE", "-i", "--input-file")
    ]
    output_file: Annotated[
        str,
        _option(
            "Answers and errors: a file, its URL, or /dev/stdout.", "FILE", "-o", "--output-file"
        ),
    ]
    model: Model
    served_model_name: Annotated[
        list[str] | None, _option("Model name that requests must use (default: any).", "NAME")
    ] = None
    max_tokens: Annotated[
        int | None,
        _option(
            "max_tokens for requests that do not set it (default: the model's limit).", "N", min=1
        ),
    ] = None
    revision: Annotated[Text, _option("Branch, tag or commit.", "REF")] = None
    tokenizer: Annotated[Text, _option("Hub id or local directory.", "MODEL")] = None
    dtype: Dtype = "auto"
    max_model_len: Count = None
    chat_template: Annotated[Text, _option("Template file, or none.", "FILE")] = None
    default_chat_template_kwargs: Annotated[
        Text, _option("Template variables, e.g. '{\"enable_thinking\": false}'.", "JSON")
    ] = None
    reasoning_parser: Annotated[
        str, _option("Split reasoning from answers: auto, qwen3, ..., none.", "NAME")
    ] = "none"
    tool_call_parser: Annotated[str, _option("Tool call format: auto, hermes, ...", "NAME")] = (
        "none"
    )
    seed: Annotated[int, _option("Seed for requests that do not set one.", "N", min=0)] = 0
    max_num_seqs: Count = None
    max_num_batched_tokens: Count = None
    block_size: Count = None
    gpu_memory_utilization: Annotated[
        float | None, _option("Share of device memory to use.", "SHARE")
    ] = None
    num_kv_blocks: Count = None
    kv_cache_dtype: Annotated[Text, _option("auto or fp8.", "NAME")] = None
    max_error_rate: Annotated[
        float,
        _option("Share of failed requests above which the exit code is 3.", "SHARE", min=0, max=1),
    ] = 1.0
    overwrite: Annotated[
        bool, _option("Delete existing answers and start over.", None, "--overwrite")
    ] = False
    retry_errors: Annotated[bool, _option("Retry failed requests.", None, "--retry-errors")] = False
    update: Annotated[bool, _option("Recompute only requests that changed.", None, "--update")] = (
        False
    )
    quiet: Annotated[bool, _option("Hide progress.", None, "--quiet")] = False

    def chat_template_kwargs(self) -> dict[str, Any] | None:
        """Parse the template variables; raise UsageError if the text is not a JSON object."""
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
    """Options of ``bench``: the model, the prompts, and the engine keys that affect throughput.

    The names come from ``vllm bench throughput``. Runs ignore end-of-sequence tokens.

    Raises:
        UsageError: the dtype or the task is unknown.
        StorageError: ``output_json`` cannot be written.
    """

    model: Model
    input_len: Annotated[
        int | None,
        _option(
            "Tokens per synthetic prompt (default: 1024, or fewer if the model's limit is lower).",
            "N",
            min=1,
        ),
    ] = None
    output_len: Annotated[int, _option("Tokens per answer.", "N", min=1)] = 128
    num_prompts: Annotated[int, _option("Prompts to run.", "N", min=1)] = 1000
    n: Annotated[int, _option("Samples per prompt.", "N", "--n", min=1)] = 1
    dtype: Dtype = "auto"
    seed: Annotated[int, _option("Seed for prompts and sampling.", "N", min=0)] = 0
    max_num_seqs: Count = None
    max_num_batched_tokens: Count = None
    block_size: Count = None
    num_kv_blocks: Count = None
    task: Annotated[
        str,
        _option("generate, embed, classify, or auto (from the model's class)."),
    ] = "auto"
    dataset: Annotated[
        Path | None, _option("Parquet file of prompts or token ids to run.", "FILE", "--dataset")
    ] = None
    output_json: Annotated[Path | None, _option("Write the result to a file.", "FILE")] = None
    deterministic: Annotated[
        bool, _option("Also measure the cost of engine.deterministic.", None, "--deterministic")
    ] = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UsageError(f"--dtype {self.dtype}: must be one of {', '.join(DTYPES)}")
        if self.task not in BENCH_TASKS:
            raise UsageError(f"--task {self.task}: must be one of {', '.join(BENCH_TASKS)}")
        if self.output_json is not None:
            _check_writable(self.output_json)


def given(options: BatchOptions | BenchOptions, names: Iterable[str]) -> dict[str, Any]:
    """Return the options in ``names`` that are not None, by name."""
    values = ((name, getattr(options, name)) for name in names)
    return {name: value for name, value in values if value is not None}


def _check_writable(path: Path) -> None:
    """Raise StorageError if ``path`` cannot be written; create no file."""
    problem = None
    if path.is_dir():
        problem = "is a folder"
    elif not path.parent.is_dir():
        problem = "is in a folder that does not exist"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        problem = "cannot be written: permission denied, or the file system is read-only"
    if problem is not None:
        raise StorageError(f"--output-json {path} {problem}")
