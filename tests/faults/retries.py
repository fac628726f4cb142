"""A model that fails on some rows until it is repaired; ``--retry-errors`` then runs these rows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from tokenizers.pre_tokenizers import ByteLevel

from batchinfer.job.spec.spec import JobSpec
from tests.faults.jobs import tiny_job
from tests.faults.kills import Pace, start
from tests.faults.violation import ViolationError

BAD_DIGIT = "7"
"""The broken model fails on prompts with this digit."""


def retry_on_a_repaired_model(folder: Path, times: int) -> list[int]:
    """Run a job ``times`` times on a broken model, then repair the model.

    Returns:
        The exit statuses of ``times`` runs, a retry on the broken model, a run on the repaired
        model, and a retry on the repaired model.
    """
    spec = tiny_job(folder, num_rows=100, rows_per_part=20)
    weights = Path(spec.model.name) / "model.safetensors"
    good = weights.read_bytes()
    answers = _run(spec, folder, "unbroken")
    weights.write_bytes(_without_embedding(good, BAD_DIGIT))
    codes = [_code(spec, folder, "broken") for _ in range(times)]
    codes.append(_code(spec, folder, "broken", retry_errors=True))
    weights.write_bytes(good)
    codes.append(_code(spec, folder, "broken"))
    codes.append(_code(spec, folder, "broken", retry_errors=True))
    if _answers(folder / "broken") != answers:
        raise ViolationError("the output on the repaired model differs from a new output")
    return codes


def _without_embedding(weights: bytes, letter: str) -> bytes:
    """Return a safetensors file in which the embedding of a letter is NaN."""
    length = int.from_bytes(weights[:8], "little")
    entry = json.loads(weights[8 : 8 + length])["model.embed_tokens.weight"]
    row_bytes = 4 * entry["shape"][1]
    token_id = 3 + sorted(ByteLevel.alphabet()).index(letter)  # special tokens come first
    start = 8 + length + entry["data_offsets"][0] + token_id * row_bytes
    nan = np.full(entry["shape"][1], np.nan, np.float32).tobytes()
    return weights[:start] + nan + weights[start + row_bytes :]


def _run(spec: JobSpec, folder: Path, name: str) -> list[str]:
    code = _code(spec, folder, name)
    if code:
        raise ViolationError(f"exit {code}")
    return _answers(folder / name)


def _code(spec: JobSpec, folder: Path, name: str, *, retry_errors: bool = False) -> int:
    output = spec.output.model_copy(update={"path": str(folder / name)})
    job = spec.model_copy(update={"output": output})
    return start(job, None, Pace(1.0, 4096), folder, retry_errors=retry_errors).wait()


def _answers(out: Path) -> list[str]:
    files = sorted((out / "data").iterdir())
    return [text for file in files for text in pq.read_table(file)["generated_text"].to_pylist()]
