"""``batchinfer run-batch``: runs a job that answers an OpenAI batch file.

The output directory of the job is next to the output file, or in the current folder if the output
is a pipe. The folder ``openai/`` inside this directory holds answers and errors in separate files.
"""

from __future__ import annotations

import json
import os.path
from pathlib import Path, PurePath
from typing import Any

from batchinfer.config.options import BATCH_ENGINE_KEYS, MODEL_KEYS, BatchOptions, given
from batchinfer.console.format import did_you_mean, format_value, printable
from batchinfer.console.text_view import Display
from batchinfer.errors import ExitCode, JobError, UsageError
from batchinfer.job.input.openai_batch import (
    CLASSIFY_URLS,
    EMBEDDINGS,
    RERANK_URLS,
    SCORE_URLS,
    first_url,
)
from batchinfer.job.openai.batch_names import for_run_batch
from batchinfer.job.output.records.export_record import is_open_file
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.document import JobDocument
from batchinfer.job.spec.load import checked_job
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.spec.task_keys import CLASSIFY, EMBED
from batchinfer.job.spec.yaml import YamlText
from batchinfer.job.storage.urls import StorePath, is_url
from batchinfer.text.reasoning.formats import PARSERS, checked_reasoning

_TO_THE_END = 2**31 - 1
"""``max_tokens`` of a request that sets no limit: as many tokens as fit after the prompt."""


def batch_job(options: BatchOptions) -> JobSpec:
    """Return the job that answers a batch file. Raise UsageError if an option is invalid."""
    if not is_url(options.output_file) and os.path.isdir(options.output_file):
        raise UsageError(f"-o: {printable(options.output_file)} is a folder; name a file")
    paths = (options.input_file, options.output_file)
    if len({path if is_url(path) else os.path.realpath(path) for path in paths}) == 1:
        raise UsageError("-o: the output file is the input file; choose another name")
    return checked_job(JobDocument(YamlText(_keys(options), {}), "run-batch"), Path.cwd())


def _output_file(options: BatchOptions) -> PurePath:
    path = options.output_file
    return StorePath(path) if is_url(path) else Path(os.path.abspath(path))


def state_directory(options: BatchOptions) -> str:
    """Return the output directory of the job, or its URL."""
    is_open = is_open_file(_output_file(options))
    file = os.path.basename(options.input_file) if is_open else options.output_file
    return f"{file}.batchinfer"


def _keys(options: BatchOptions) -> dict[str, Any]:
    prompt = {
        "chat_template": options.chat_template,
        "chat_template_kwargs": options.chat_template_kwargs(),
    }
    return {
        "name": os.path.basename(options.output_file),
        "model": {
            "name": options.model,
            "served_model_name": options.served_model_name,
            **given(options, MODEL_KEYS),
        },
        "input": {"path": options.input_file, "format": "openai-batch"},
        "prompt": {name: value for name, value in prompt.items() if value is not None},
        **_task(options),
        "engine": given(options, BATCH_ENGINE_KEYS),
        "output": {
            "path": state_directory(options),
            "format": "openai-batch",
            "reasoning": _reasoning(options.reasoning_parser),
            "tool_parser": options.tool_call_parser,
        },
        "errors": {"max_error_rate": options.max_error_rate},
    }


def _task(options: BatchOptions) -> dict[str, Any]:
    url = first_url(options.input_file)
    if url == EMBEDDINGS:
        return {"task": EMBED.name}
    if url in CLASSIFY_URLS:
        return {"task": CLASSIFY.name}
    if url in (*SCORE_URLS, *RERANK_URLS):
        columns = {"query_column": "query", "document_column": "document"}
        return {"task": CLASSIFY.name, CLASSIFY.name: columns}
    return {"sampling": {"max_tokens": options.max_tokens or _TO_THE_END, "seed": options.seed}}


def _reasoning(parser: str) -> Any:
    """Return ``output.reasoning`` for a parser's name, or for its markers as JSON."""
    if parser in PARSERS:
        return PARSERS[parser]
    try:
        return checked_reasoning(json.loads(parser))
    except ValueError:
        known = did_you_mean(parser, tuple(PARSERS))
        raise UsageError(f"--reasoning-parser: {format_value(parser)} is unknown{known}") from None


def run_batch(options: BatchOptions) -> ExitCode:
    """Answer a batch file, or resume an interrupted run.

    Raises:
        JobError: see ``run_job``; the message names options of ``run-batch``, not keys of a job
            file.
    """
    try:
        return _answer(options)
    except JobError as error:
        error.args = (for_run_batch(str(error)),)
        error.message = for_run_batch(error.message)
        raise


def _answer(options: BatchOptions) -> ExitCode:
    job, output = batch_job(options), _output_file(options)
    is_open = is_open_file(output)
    display = Display(quiet=options.quiet, result_on_stdout=not is_open)
    code = run_job(
        job,
        overwrite=options.overwrite,
        retry_errors=options.retry_errors,
        update=options.update,
        quiet=options.quiet,
        combined_output=output,
        display=display,
    )
    if code in (ExitCode.OK, ExitCode.TOO_MANY_ROW_ERRORS) and not is_open:
        display.say("answered", f"answers  {printable(str(output))}", is_result=True)
    return code
