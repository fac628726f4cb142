"""Measures throughput on synthetic prompts or on a dataset, for ``batchinfer bench``."""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.config import SamplingParams
from batchinfer.config.options import BENCH_ENGINE_KEYS, BenchOptions, given
from batchinfer.errors import DataError, JobError, RowError, StorageError, UsageError
from batchinfer.worker.model.model_folder import CONFIG_FILES, read_config, resolve_folder

_INPUT_LEN = 1024
"""Default number of tokens of a synthetic prompt, as in ``vllm bench throughput``."""
_COLUMNS = ("prompt_token_ids", "token_ids", "prompt", "text")


def read_dataset(path: Path, limit: int) -> list[str | list[int]]:
    """Return the first ``limit`` prompts of a Parquet file: texts, or lists of token ids.

    Raises:
        DataError: the file cannot be read, or a prompt is invalid; the message names its row.
    """
    try:
        names = pq.read_schema(path).names
        column = next((name for name in _COLUMNS if name in names), None)
        if column is None:
            raise DataError(
                f"{path} has no prompt column; its columns are: {', '.join(names)}",
                hint=f"rename the prompt column to {' or '.join(_COLUMNS)}",
            )
        values = pq.read_table(path, columns=[column])[column].slice(0, limit)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    if not len(values):
        raise DataError(f"{path} has no rows")
    kind, types = values.type, pa.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        values = values.cast(kind).cast(pa.large_binary())  # pyarrow does not check UTF-8
    elif not (_is_list(kind) and types.is_integer(kind.value_type)):
        raise DataError(f"{path}: column {column} is {kind}; it must be string or list<int32>")
    return [_prompt(path, column, row, value) for row, value in enumerate(values.to_pylist())]


def _is_list(kind: Any) -> Any:
    types = pa.types
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _prompt(
    path: Path, column: str, row: int, value: bytes | list[int | None] | None
) -> str | list[int]:
    problem = "is null" if value is None else "holds a null"
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            problem = "is not valid UTF-8"
    elif value is not None and None not in value:
        return value  # type: ignore[return-value]
    raise DataError(f"{path}, row {row}: {column} {problem}")


def run_bench(options: BenchOptions, *, show: Callable[[str], None]) -> dict[str, Any]:
    """Load the model, run the prompts once, and show and return the throughput.

    The first prompt also runs once before the measurement, as a warm-up.

    Returns:
        The measurements. With ``options.deterministic``, ``deterministic`` holds the measurements
        of a second run with ``engine.deterministic``. ``deterministic_ratio`` is the requests per
        second of the second run divided by the requests per second of the first run.

    Raises:
        JobError: the model cannot be run, the dataset cannot be read, no prompt of the dataset can
            be run, or the result cannot be written.
    """
    read_config(resolve_folder(options.model, None, CONFIG_FILES))
    dataset_prompts: list[str | list[int]] = []
    if options.dataset is not None:
        dataset_prompts = read_dataset(options.dataset, options.num_prompts)
    result = _measure(options, dataset_prompts, show)
    if options.deterministic:
        show("With engine.deterministic:")
        gc.collect()  # free the first model and its KV pool
        other = _measure(options, dataset_prompts, show, deterministic=True)
        ratio = other["requests_per_s"] / result["requests_per_s"]
        show(f"engine.deterministic: true reaches {ratio:.2f} times the requests/s of the default")
        result |= {"deterministic": other, "deterministic_ratio": ratio}
    if options.output_json is not None:
        _write(options.output_json, result)
    return result


def _measure(
    options: BenchOptions,
    dataset_prompts: list[str | list[int]],
    show: Callable[[str], None],
    **engine_keys: bool,
) -> dict[str, Any]:
    """Load the model with ``options`` and ``engine_keys``; run and measure the prompts once."""
    from batchinfer.llm import LLM  # imports torch, which takes seconds
    from batchinfer.llm.pooling.choose_runner import choose_runner, refused_calls

    keys = given(options, BENCH_ENGINE_KEYS) | engine_keys
    writes_text = not refused_calls(choose_runner("auto", options.task, options.model, None))
    try:
        llm = LLM(options.model, dtype=options.dtype, task=options.task, **keys)
    except ValueError as error:
        raise UsageError(str(error)) from None
    _check_ids(options.dataset, dataset_prompts, llm.vocab_size)
    # A causal model's engine keeps room for one token even if nothing is sampled.
    room = llm.max_model_len - (options.output_len if writes_text else 1)
    prompts = dataset_prompts or _synthetic(options, llm.vocab_size, room)
    params = SamplingParams(
        max_tokens=options.output_len,
        n=options.n,
        temperature=0.0 if options.n == 1 else 1.0,
        ignore_eos=True,
        seed=options.seed if options.n == 1 else None,
    )
    run: Callable[..., Any] = partial(llm.generate, sampling_params=params)
    if not writes_text:
        task = None if options.task == "auto" else options.task
        run = partial(llm.encode, pooling_task=task)
    run(prompts[:1], use_tqdm=False, errors="return")
    llm.reset_stats()
    began = time.perf_counter()
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    outputs = run(prompts, use_tqdm=is_terminal, errors="return")
    elapsed = time.perf_counter() - began
    errors = [output.error for output in outputs if output.error is not None]
    if len(errors) == len(outputs):
        raise _nothing_measured(options, errors)
    result = {
        "model": options.model,
        "num_requests": len(prompts),
        "num_errors": len(errors),
        "elapsed_s": elapsed,
        "requests_per_s": len(prompts) / elapsed,
        **llm.stats(),
    }
    for line in _lines(result) if writes_text else _pooled_lines(result):
        show(line)
    if errors:
        show(f"{len(errors)} of {len(outputs)} prompts could not be run; the first: {errors[0]}")
    return result


def _nothing_measured(options: BenchOptions, errors: Sequence[RowError]) -> JobError:
    problem = f"none of the {len(errors)} prompts could be run; the first: {errors[0]}"
    if options.dataset is not None:
        return DataError(problem, hint=f"shorten the prompts in {options.dataset}")
    return UsageError(problem, hint="give a smaller --input-len or --output-len")


def _write(path: Path, result: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(result, indent=2) + "\n")
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from None


def _check_ids(path: Path | None, prompts: Sequence[str | list[int]], vocab_size: int) -> None:
    for row, prompt in enumerate(prompts):
        for token_id in () if isinstance(prompt, str) else prompt:
            if not 0 <= token_id < vocab_size:
                raise DataError(
                    f"{path}, row {row}: token id {token_id} is out of vocabulary; "
                    f"the model's ids are 0 to {vocab_size - 1}"
                )


def _synthetic(options: BenchOptions, vocab_size: int, room: int) -> list[str | list[int]]:
    """Return prompts of random token ids; ``room`` limits the default length, in tokens."""
    length = options.input_len or min(_INPUT_LEN, max(1, room))
    rng = np.random.default_rng(options.seed)
    ids = rng.integers(0, vocab_size, (options.num_prompts, length))
    return list(ids.tolist())


def _pooled_lines(result: dict[str, Any]) -> list[str]:
    throughput, tokens = result["throughput"], result["tokens"]
    return [
        f"Throughput: {result['requests_per_s']:.2f} rows/s, "
        f"{throughput['total_tokens_per_s']:.1f} tokens/s",
        f"Tokens: {tokens['prompt_computed']:,} of {tokens['prompt']:,} prompt tokens computed",
    ]


def _lines(result: dict[str, Any]) -> list[str]:
    throughput, kv, tokens = result["throughput"], result["kv"], result["tokens"]
    return [
        f"Throughput: {result['requests_per_s']:.2f} requests/s, "
        f"{throughput['total_tokens_per_s']:.1f} total tokens/s, "
        f"{throughput['output_tokens_per_s']:.1f} output tokens/s",
        f"Tokens: {tokens['prompt_computed']:,} of {tokens['prompt']:,} prompt tokens computed, "
        f"{tokens['output']:,} output tokens, {tokens['recomputed']:,} recomputed",
        f"KV pool: {kv['mean_utilization']:.1%} used on average, {kv['peak_utilization']:.1%} at "
        f"most, {kv['mean_waste']:.1%} waste, {kv['sharing_saving']:.1%} saved by sharing",
    ]
