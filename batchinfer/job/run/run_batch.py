"""``batchinfer run-batch``: an OpenAI batch file in, one out, as a job like any other.

What the job needs to go on after an interruption is in a folder beside the output file, or, where
that is a pipe or the like, in the current folder; its ``openai/`` holds answers and errors apart.
"""

from __future__ import annotations

import json
import os.path
from pathlib import Path, PurePath
from typing import Any

from batchinfer.config.options import BATCH_ENGINE_KEYS, MODEL_KEYS, BatchOptions, given
from batchinfer.console.display import Display
from batchinfer.console.format import did_you_mean, format_value, printable
from batchinfer.errors import ExitCode, UsageError
from batchinfer.job.input.openai_batch import (
    CLASSIFY_URLS,
    EMBEDDINGS,
    RERANK_URLS,
    SCORE_URLS,
    first_url,
)
from batchinfer.job.output.export_record import is_open_file
from batchinfer.job.run.run import run_job
from batchinfer.job.spec.document import JobDocument
from batchinfer.job.spec.load import checked_job
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.spec.tasks import CLASSIFY, EMBED
from batchinfer.job.spec.yaml import YamlText
from batchinfer.job.storage.urls import StorePath, is_url
from batchinfer.text.reasoning.formats import PARSERS, checked_reasoning

_TO_THE_END = 2**31 - 1
"""As ``max_tokens``: all that the model's length leaves after the prompt."""


def batch_job(options: BatchOptions) -> JobSpec:
    """The job that answers a batch file.

    Raises:
        UsageError: an option has a value that its key cannot have.
    """
    if not is_url(options.output_file) and os.path.isdir(options.output_file):
        raise UsageError(f"-o: {printable(options.output_file)} is a folder; name a file")
    if _resolved(options.input_file) == _resolved(options.output_file):
        raise UsageError("-o: the output file is the input file; give it a name of its own")
    return checked_job(JobDocument(YamlText(_keys(options), {}), "run-batch"), Path.cwd())


def _resolved(path: str) -> str:
    return path if is_url(path) else os.path.realpath(path)


def _output_file(options: BatchOptions) -> PurePath:
    path = options.output_file
    return StorePath(path) if is_url(path) else Path(os.path.abspath(path))


def state_directory(options: BatchOptions) -> str:
    """The output directory, or its URL, of the job behind ``output_file``."""
    is_open = is_open_file(_output_file(options))
    beside = os.path.basename(options.input_file) if is_open else options.output_file
    return f"{beside}.batchinfer"


def _keys(options: BatchOptions) -> dict[str, Any]:
    """The job as its file would have it."""
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
    """What is done with the requests: one thing with all, as OpenAI has it."""
    url = first_url(options.input_file)
    if url == EMBEDDINGS:
        return {"task": EMBED.name}
    if url in CLASSIFY_URLS:
        return {"task": CLASSIFY.name}
    if url in (*SCORE_URLS, *RERANK_URLS):
        columns = {"query_column": "query", "document_column": "document"}
        return {"task": CLASSIFY.name, CLASSIFY.name: columns}
    return {"sampling": {"max_tokens": options.max_tokens or _TO_THE_END, "seed": options.seed}}


def _reasoning(asked: str) -> Any:
    """``output.reasoning`` as an option gives it: by name, or the markers as JSON."""
    if asked in PARSERS:
        return PARSERS[asked]
    try:
        return checked_reasoning(json.loads(asked))
    except ValueError:
        known = did_you_mean(asked, tuple(PARSERS))
        raise UsageError(f"--reasoning-parser: {format_value(asked)} is not known{known}") from None


def run_batch(options: BatchOptions) -> ExitCode:
    """Answer a batch file; again: go on where that stopped.

    Raises:
        JobError: as ``run_job``.
    """
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
