"""``batchinfer bench``: throughput on synthetic or given prompts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from batchinfer.bench_dataset import read_dataset
from batchinfer.bench_options import BenchOptions
from batchinfer.config import SamplingParams
from batchinfer.errors import DataError, JobError, RowError, StorageError, UsageError
from batchinfer.worker.model.checkpoint import CONFIG_FILES, read_config, resolve_folder

_ENGINE_KEYS = ("max_num_seqs", "max_num_batched_tokens", "block_size", "num_kv_blocks")


def run_bench(options: BenchOptions, *, show: Callable[[str], None]) -> dict[str, Any]:
    """Load the model, run the prompts once, show and return what was measured.

    Weights are loaded and one prompt is run before the clock starts.

    Args:
        options: what to run.
        show: takes the lines to show.

    Raises:
        JobError: the model cannot be run, the dataset cannot be read, none of its prompts can be
            run, or the result cannot be written.
    """
    read_config(resolve_folder(options.model, None, CONFIG_FILES))
    given: list[str | list[int]] = []
    if options.dataset is not None:
        given = read_dataset(options.dataset, options.num_prompts)
    from batchinfer.llm import LLM  # imports torch, which takes seconds

    keys = {name: value for name in _ENGINE_KEYS if (value := getattr(options, name)) is not None}
    try:
        llm = LLM(options.model, dtype=options.dtype, **keys)
    except ValueError as error:
        raise UsageError(str(error)) from None
    prompts = given or _synthetic(options, llm.vocab_size)
    params = SamplingParams(
        max_tokens=options.output_len,
        n=options.n,
        temperature=0.0 if options.n == 1 else 1.0,
        ignore_eos=True,
        seed=options.seed if options.n == 1 else None,
    )
    llm.generate(prompts[:1], params, use_tqdm=False)
    llm.reset_stats()
    began = time.perf_counter()
    outputs = llm.generate(prompts, params)
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
    for line in _lines(result):
        show(line)
    if errors:
        show(f"{len(errors)} of {len(outputs)} prompts could not be run; the first: {errors[0]}")
    if options.output_json is not None:
        _write(options.output_json, result)
    return result


def _nothing_measured(options: BenchOptions, errors: Sequence[RowError]) -> JobError:
    """None of the prompts could be run."""
    problem = f"none of the {len(errors)} prompts could be run; the first: {errors[0]}"
    if options.dataset is not None:
        return DataError(problem, hint=f"give shorter prompts than those of {options.dataset}")
    return UsageError(problem, hint="give a smaller --input-len or --output-len")


def _write(path: Path, result: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(result, indent=2) + "\n")
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from None


def _synthetic(options: BenchOptions, vocab_size: int) -> list[str | list[int]]:
    rng = np.random.default_rng(options.seed)
    ids = rng.integers(0, vocab_size, (options.num_prompts, options.input_len))
    return list(ids.tolist())


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
