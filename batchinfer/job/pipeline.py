"""The way of a row: source, prompt, order, engine, text, sink."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from batchinfer.errors import UsageError
from batchinfer.job.columns import is_conversation
from batchinfer.job.loop import EngineLoop, Finished
from batchinfer.job.manifest import Manifest, Part
from batchinfer.job.order import PromptRow, by_prefix, prompt_rows, without_text
from batchinfer.job.output import OutputDir
from batchinfer.job.progress import Progress
from batchinfer.job.recorder import Recorder, package_versions
from batchinfer.job.row_params import RowParams
from batchinfer.job.rows import RequestMaker, RowFinisher
from batchinfer.job.sink import Sink
from batchinfer.job.source import BATCH_ROWS, Source
from batchinfer.job.spec import JobSpec
from batchinfer.job.table import OutputTable
from batchinfer.job.threads import Ahead, Behind
from batchinfer.text.prompts import PromptBuilder

if TYPE_CHECKING:
    from batchinfer.build import Built

BuildEngine = Callable[..., "Built"]
_WRITES_DUE = 64  # turns of the engine's loop that the writing thread may be behind


@dataclass(frozen=True)
class Job:
    """A job whose data and output directory have been looked at."""

    spec: JobSpec
    source: Source
    table: OutputTable
    manifest: Manifest
    out: OutputDir


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to run a job."""

    built: Built
    prompts: PromptBuilder
    params: RowParams
    log: Sequence[str]
    """Where the device's memory goes, line by line."""
    seconds: float
    """Time this took."""


def load(job: Job, build: BuildEngine) -> Loaded | None:
    """Load the model and check the job against it; None for a job without rows.

    Args:
        job: the job.
        build: makes the engine.

    Raises:
        JobError: the model cannot be run, or the job does not go with it.
    """
    if not job.source.num_rows:
        return None
    began = time.perf_counter()
    log: list[str] = []
    built = build(job.spec.model, job.spec.engine, log=log.append)
    prompts = _prompt_builder(job, built)
    params = RowParams(job.spec.sampling, built.vocab_size)
    return Loaded(built, prompts, params, log, time.perf_counter() - began)


def make_parts(
    job: Job, todo: Sequence[Part], loaded: Loaded | None, progress: Progress, stop: Event
) -> bool:
    """Make the parts in ``todo``.

    Rows are read and made into prompts in one thread, run in this one, made into text and written
    in another.

    Args:
        job: the job.
        todo: parts to make, in order.
        loaded: its model.
        progress: told about finished rows.
        stop: when set, the running step is the last.

    Returns:
        Whether all parts were made.

    Raises:
        JobError: data cannot be read, the model cannot be run, or a part cannot be written.
    """
    spec, source = job.spec, job.source
    recorder = Recorder(job.out, spec.model.name, spec.stats.every_steps)
    sink = Sink(job.out, todo, job.table, source, _file_metadata(job), recorder.checkpoint)
    sink.write_complete()  # the part of an empty dataset lacks no row
    if loaded is None:
        return True
    built = loaded.built
    recorder.loaded(built, loaded.seconds)
    for line in loaded.log:
        recorder.log(line)
    leaving = Event()
    rows = _rows(job, todo, loaded, lambda: stop.is_set() or leaving.is_set())
    loop = EngineLoop(
        built.engine,
        RequestMaker(built.tokenizer, built.eos_token_ids),
        recorder.sampler,
        built.device_bytes,
        progress,
        stop,
        max_waiting=2 * spec.engine.max_num_seqs,
    )
    finisher = RowFinisher(built.tokenizer, spec.output.include)

    def write(finished: Finished) -> None:
        recorder.add(finished.steps)
        for row, completion in finished.rows:
            sink.add(finisher.finish(row, completion))

    batches_ahead = max(1, spec.engine.order_window // BATCH_ROWS)
    with Ahead(rows, batches_ahead) as ahead, Behind(write, _WRITES_DUE) as writer:
        try:
            complete = loop.run(ahead, writer)
        finally:
            leaving.set()
    recorder.checkpoint()
    return complete


def _rows(
    job: Job, todo: Sequence[Part], loaded: Loaded, is_over: Callable[[], bool]
) -> Iterator[list[PromptRow]]:
    """Prompts of the rows of ``todo``, in the order they should run, until ``is_over``."""
    spec = job.spec
    rows = prompt_rows(job.source, todo, loaded.prompts, loaded.params)
    rows = takewhile(lambda _: not is_over(), rows)  # here: a window takes a while to collect
    if "prompt" not in spec.output.include:
        rows = without_text(rows)
    if spec.engine.order == "prefix":
        rows = by_prefix(rows, todo, spec.engine.order_window)
    return rows


def _prompt_builder(job: Job, built: Built) -> PromptBuilder:
    config, schema = job.spec.prompt, job.source.schema
    template = config.chat_template
    return PromptBuilder(
        config,
        built.tokenizer,
        max_model_len=built.max_model_len,
        columns=schema.names,
        conversation_columns=[field.name for field in schema if is_conversation(field.type)],
        chat_template_source=None if template in ("auto", "none") else _text_of(template),
        vocab_size=built.vocab_size,
        now=datetime.fromisoformat(job.manifest.planned_at),
    )


def _text_of(template: str) -> str:
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"prompt.chat_template: {template} cannot be read: {error}") from None


def _file_metadata(job: Job) -> dict[str, str]:
    """Key-value metadata of every part: what made it, nothing of when or where."""
    facts, model = job.manifest.job, job.spec.model
    template = json.dumps(facts["prompt"], sort_keys=True).encode()
    return {
        "batchinfer.model": model.name,
        "batchinfer.revision": model.revision or "",
        "batchinfer.sampling": json.dumps(facts["sampling"]),
        "batchinfer.template_hash": hashlib.sha256(template).hexdigest(),
        "batchinfer.versions": json.dumps(package_versions()),
        "batchinfer.fingerprint": job.manifest.fingerprint,
    }
