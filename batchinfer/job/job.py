"""Opens a job's data and loads its model."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from batchinfer.config import PromptConfig, SamplingParams, field_names
from batchinfer.console.phases import Phases, active_phases, phase
from batchinfer.errors import RowError
from batchinfer.job.fingerprint import digest, fingerprint_facts
from batchinfer.job.images.job_images import (
    JobImages,
    image_settings,
    may_have_images,
    media_root_fact,
)
from batchinfer.job.images.mark_images import with_marked_images
from batchinfer.job.input import valid_text
from batchinfer.job.input.arrow_types import is_conversation
from batchinfer.job.input.changed_files import with_content_hashes
from batchinfer.job.input.dataset import Source, open_source
from batchinfer.job.input.format import SAMPLING_COLUMN
from batchinfer.job.input.formats.options import TextOptions
from batchinfer.job.manifest import Manifest
from batchinfer.job.model_files.facts import model_facts
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.partitioned import check_partition_columns
from batchinfer.job.output.schema import OutputTable, output_table
from batchinfer.job.rows.column_checks import check_prompt_columns, prompt_columns
from batchinfer.job.rows.read_prompts import ColumnReader, Prompts, RowAdapters, RowReader
from batchinfer.job.rows.row_key import RowKeys
from batchinfer.job.rows.sampling_params import RowParams, check_token_ids
from batchinfer.job.rows.task import LoadedTask
from batchinfer.job.rows.tasks import TASKS
from batchinfer.job.spec.referenced_files import chat_template_file
from batchinfer.job.spec.spec import JobSpec, ModelSpec
from batchinfer.requests.tool_choice import ToolChoices
from batchinfer.text.processes.limits import BOUNDS_MEMORY
from batchinfer.text.processes.pool import TextProcesses
from batchinfer.text.processes.worker import BuilderFactory
from batchinfer.text.prompts import PromptBuilder, RawTexts
from batchinfer.text.structured.compiled_grammar import GrammarCompiler
from batchinfer.text.tools.formats import find_tool_format
from batchinfer.text.tools.row_tools import RowToolsReader

if TYPE_CHECKING:
    from batchinfer.builders.context import EngineContext, WarmUp

BuildEngine = Callable[..., "EngineContext"]


@dataclass(frozen=True)
class Job:
    spec: JobSpec
    source: Source
    table: OutputTable
    manifest: Manifest


@dataclass(frozen=True)
class OutputJob(Job):
    out: OutputDir
    combined_output: PurePath | None = None
    """Extra file that receives all lines of the OpenAI output and error files, in input order."""


def open_input(spec: JobSpec) -> Source:
    """Open a job's dataset. If the files name no columns, the dataset has the columns that the job
    keeps. Raise JobError if the dataset cannot be read."""
    entry = spec.input
    with phase("reading inputs"):
        source = open_source(
            entry.paths,
            entry.limit,
            entry.format,
            entry.filter,
            entry.schema_mode,
            entry.version,
            TextOptions(*(getattr(entry, key.name) for key in fields(TextOptions))),
        )
    named = [*spec.output.rename, *spec.output.partition_by]
    named += [] if entry.keep_columns == "*" else entry.keep_columns
    named += [] if entry.id_column is None else [entry.id_column]
    return source.with_columns(named)


def identified(source: Source, planned: Manifest | None) -> Source:
    """Return a dataset with a content hash for each of its files.

    Args:
        planned: an earlier plan, whose hashes of unchanged files are reused.

    Raises:
        DataError: a file cannot be read.
    """
    known = () if planned is None else planned.inputs
    known_at_s = 0.0 if planned is None else datetime.fromisoformat(planned.planned_at).timestamp()
    return replace(source, files=with_content_hashes(source.files, known, known_at_s))


def open_job(
    spec: JobSpec,
    source: Source,
    facts_of: Callable[[ModelSpec], Mapping[str, Any]] | None = model_facts,
) -> Job:
    """Check a job's columns and model files, without writing anything.

    Args:
        facts_of: returns facts that identify the model. With None, the manifest has no fingerprint.

    Raises:
        JobError: the job cannot be run.
    """
    task = TASKS[spec.task]
    if source.knows_columns:
        task.check_columns(spec, source)
        check_prompt_columns(task.prompt_config(spec), source)
    table = output_table(source, spec)
    check_partition_columns(spec.output.partition_by, table)
    facts = {}
    if facts_of is not None:
        media_root = media_root_fact(spec, source)
        facts = fingerprint_facts(task.with_defaults(spec), facts_of(spec.model), media_root)
    manifest = Manifest(
        fingerprint=digest(facts) if facts else "",
        job=facts,
        input_paths=spec.input.paths,
        inputs=source.files,
        num_rows=source.num_rows,
        rows_per_part=spec.output.rows_per_part,
        planned_at=datetime.now().isoformat(timespec="seconds"),
        bounds=source.bounds(spec.output.rows_per_part),
        table_version=source.version,
    )
    return Job(spec, source, table, manifest)


def with_checked_inputs(job: Job) -> Job:
    """Check that the text in kept columns is UTF-8; with ``input.encoding_errors: replace``, count
    the cells that are not.

    Without ``replace``, a bad text of a prompt fails only its row, so prompts are not checked here.

    Raises:
        DataError: a file cannot be read, or a cell is not UTF-8.
    """
    source, columns = job.source, set(job.table.kept)
    if source.format.has_unchecked_text and not source.format.replaces_bad_text:
        columns -= prompt_columns(TASKS[job.spec.task].prompt_config(job.spec), source)
    source = valid_text.with_checked_text(source, [c for c in job.table.kept if c in columns])
    return replace(job, source=source, manifest=replace(job.manifest, inputs=source.files))


@dataclass(frozen=True)
class LoadedJob:
    context: EngineContext
    reader: RowReader
    task: LoadedTask
    log: Sequence[str]
    """Lines for the user about how the device's memory is used."""
    seconds: float
    """Loading time in seconds."""
    processes: TextProcesses
    phases: Phases | None = None
    """Durations of the phases of loading."""
    images: JobImages | None = None
    """Loads the images of rows; None if rows have only text."""

    def close(self) -> None:
        """Stop the processes that build prompts and the threads that download images."""
        self.processes.close()
        if self.images is not None:
            self.images.close()


def load(job: Job, build: BuildEngine) -> LoadedJob | None:
    """Load the model and check the job against it; return None for a job without rows. Raise
    JobError if the model cannot be loaded, or does not support the job."""
    if not job.source.num_rows:
        return None
    began = time.perf_counter()
    log: list[str] = []
    processes = TextProcesses()  # processes start while the model is loaded
    try:
        context = build(
            job.spec.model.config(TASKS[job.spec.task].runner(job.spec)),
            job.spec.engine,
            log=log.append,
            check_vocab_size=partial(check_token_ids, job.spec.sampling.params),
            with_images=may_have_images(job.spec, job.source),
        )
        settings = image_settings(job.spec, job.source, context)
        images = None
        if settings is not None:
            images = JobImages(settings, processes, downloads=job.spec.input.media_urls)
        with phase("starting text processes"):
            processes.load(context.tokenizer, settings)
        if not BOUNDS_MEMORY:
            log.append(
                "this system cannot limit the memory of a process, so a malicious row "
                "may use up the machine's memory"
            )
        grammars = GrammarCompiler(context.tokenizer, context.eos_token_ids, context.vocab_size)
        reader = _row_reader(job, context, grammars, processes, images)
        task = TASKS[job.spec.task].load(job.spec, context, grammars)
        if context.warm_up is not None:
            _warm_up(job, context.warm_up)
    except BaseException:
        processes.close()
        raise
    seconds = time.perf_counter() - began
    return LoadedJob(context, reader, task, log, seconds, processes, active_phases(), images)


def row_keys(job: Job, context: EngineContext) -> RowKeys:
    """Return an object that makes row keys for a job and its model.

    If the manifest has no fingerprint, the keys can be compared only with keys of the same job.
    """
    facts = job.manifest.job or fingerprint_facts(job.spec, {"adapters": job.spec.model.adapters})
    return RowKeys(
        facts,
        context.max_model_len,
        context.adapters,
        chosen_by_length="longrope" in context.model_facts,
    )


def _warm_up(job: Job, compile_for: WarmUp) -> None:
    task = job.spec.task_spec
    if task.runner == "pooling":
        return
    if task.sampling is not None:
        compile_for([task.sampling], forced_tokens=True)
        return
    row_params: Collection[str] = ()
    if job.source.format.holds_requests or SAMPLING_COLUMN in job.source.schema.names:
        row_params = field_names(SamplingParams)
    elif job.spec.prompt.has_tools:
        row_params = ("structured_outputs",)
    compile_for([job.spec.sampling.params], own=row_params)


def _row_reader(
    job: Job,
    context: EngineContext,
    grammars: GrammarCompiler,
    processes: TextProcesses,
    images: JobImages | None,
) -> RowReader:
    spec, schema = job.spec, job.source.schema
    check = _params_check(spec, processes)
    make_params = partial(
        RowParams, spec.sampling.params, context.vocab_size, grammars, check=check
    )
    template = chat_template_file(spec.prompt.chat_template)
    tool_format = find_tool_format(spec.tool_parser, context.tokenizer, template)
    tool_choices = None
    if tool_format is not None:
        tool_choices = ToolChoices(tool_format, context.tokenizer, grammars)
    if job.source.format.holds_requests:
        kept = "logprobs" in spec.output.written
        params = make_params(where="body", keeps_logprobs=kept) if spec.task_spec.draws else None
        return _request_reader(job, context, processes, params, tool_choices, images)
    task = TASKS[spec.task]
    make, config = task.prompt_builder(spec), task.prompt_config(spec)
    conversations = [field.name for field in schema if is_conversation(field.type)]
    prompts = _prompts(job, context, processes, images, make, config, schema.names, conversations)
    adapters = RowAdapters(spec.prompt.adapter_column, context.adapters, spec.prompt.adapter)
    row_params = make_params() if spec.task_spec.draws else None
    id_column = spec.input.id_column if row_params and spec.sampling.key == "id" else None
    tools = RowToolsReader(spec.prompt) if spec.prompt.has_tools else None
    return ColumnReader(prompts, row_params, adapters, schema.names, id_column, tools, tool_choices)


def _request_reader(
    job: Job,
    context: EngineContext,
    processes: TextProcesses,
    params: RowParams | None,
    tool_choices: ToolChoices | None,
    images: JobImages | None,
) -> RowReader:
    from batchinfer.job.openai.reader import TEMPLATE_VARIABLES, OpenAIReader, request_kind

    spec, task = job.spec, TASKS[job.spec.task]
    make: BuilderFactory = partial(PromptBuilder, variables_column=TEMPLATE_VARIABLES)
    if params is None:
        make = task.prompt_builder(spec)
    return OpenAIReader(
        request_kind(spec, job.table, has_tools=tool_choices is not None),
        task.prompt_config(spec),
        lambda config, columns: _prompts(job, context, processes, images, make, config, columns),
        params,
        spec.model.served_names,
        context.adapters,
        tool_choices,
        accepts_any_model=spec.model.served_model_name is None and not context.adapters,
    )


def _params_check(spec: JobSpec, processes: TextProcesses) -> Callable[[SamplingParams], None]:
    """Return a function that checks a row's parameters against ``accept``, ``output.reasoning`` and
    the tokenizer.

    The tokenizer runs in text processes, because a text that crashes it must not end the job.
    """
    texts = processes.prompts(RawTexts)

    def check(params: SamplingParams) -> None:
        if params.max_reasoning_tokens is not None and spec.output.reasoning == "none":
            raise ValueError(
                "max_reasoning_tokens needs output.reasoning to be set in the job file"
            )
        if spec.accept is not None:
            spec.accept.check(params)
        for prompt in texts.build([{"text": word} for word in params.bad_words]):
            if isinstance(prompt, RowError):
                raise ValueError(f"bad_words: {prompt.message}")

    return check


def _prompts(
    job: Job,
    context: EngineContext,
    processes: TextProcesses,
    images: JobImages | None,
    make: BuilderFactory,
    config: PromptConfig,
    columns: Sequence[str],
    conversation_columns: Sequence[str] = (),
) -> Prompts:
    """Return an object that builds prompts in ``processes``, or in this process if rows hold token
    ids."""
    factory = partial(
        make,
        config,
        max_model_len=context.max_model_len,
        columns=columns,
        conversation_columns=conversation_columns,
        chat_template_source=chat_template_file(config.chat_template),
        vocab_size=context.vocab_size,
        now=datetime.fromisoformat(job.manifest.planned_at),
    )
    if images is not None:
        plain = processes.prompts(partial(factory, images=images.settings))
        prompts = images.prompts(plain, config)
        return with_marked_images(prompts, job.source.schema, config.image_columns)
    if config.token_ids_column is not None and job.spec.task_spec.draws:
        return PromptBuilder(config, context.tokenizer, **factory.keywords)
    return with_marked_images(processes.prompts(factory), job.source.schema, config.image_columns)
