"""``batchinfer init``: writes a commented job file that runs without changes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchinfer.config import attends_both_ways
from batchinfer.console.format import printable
from batchinfer.errors import StorageError, UsageError
from batchinfer.job.init.detect_columns import DetectedColumns, detect_columns
from batchinfer.job.init.detect_text_options import detect_text_options
from batchinfer.job.input.dataset import Source, open_source
from batchinfer.job.input.formats.options import TextOptions
from batchinfer.job.spec.json_schema import json_schema
from batchinfer.job.spec.task_keys import TASK_SPECS, TaskName, TaskSpec
from batchinfer.job.spec.text_options import encoding_name
from batchinfer.job.storage.urls import is_url

SCHEMA_FILE = "job.schema.json"
DEFAULT_MODEL = "Qwen/Qwen3-0.6B"
_COMMENT_AT = 34
_WITH_OUTPUT_HEAD = "LMHeadModel"
"""Suffix of the name of GPT-2's class, which has an output head. Most other classes whose names end
in Model have no output head.
"""
_TEXT_COMMENTS = {
    "encoding": "Python's name of the files' encoding",
    "delimiter": "separates the cells of a record",
    "json_field": "key of the list of rows",
}
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")


@dataclass(frozen=True)
class InitOptions:
    data: str
    """Path or URL of the dataset, as for ``input.path``; relative to the current folder."""
    model: str | None = None
    """Hub id or local directory."""
    output: str | None = None
    """Output directory; default: ``out/`` plus the job file's name, next to the job file."""
    job: Path = Path("job.yaml")
    prompt_column: str | None = None
    id_column: str | None = None
    force: bool = False
    encoding: str = "utf-8"


def write_job_file(options: InitOptions) -> list[str]:
    """Write the job file, and next to it the JSON schema that the file's first line names.

    Returns:
        Lines for the screen that say what was written and why.

    Raises:
        UsageError: the file already exists, or no column can be identified as the prompt.
        DataError: the data cannot be read.
        StorageError: the files cannot be written.
    """
    schema = options.job.parent / SCHEMA_FILE
    if not options.force and os.path.lexists(options.job):
        raise UsageError(
            f"{printable(str(options.job), 200)} exists",
            hint="write another file with --job FILE, or overwrite it with --force",
        )
    for text in (options.data, options.output or "", options.model or ""):
        if "{{" in text:
            raise UsageError(
                f"{printable(text, 200)}: paths and names must not contain {{{{ }}}}, which marks "
                "variables in a job file"
            )
    data = options.data if is_url(options.data) else os.path.abspath(options.data)
    text_options = _text_options(data, options.encoding)
    source, is_united = _open(data, text_options)
    columns = detect_columns(source, prompt=options.prompt_column, row_id=options.id_column)
    try:
        options.job.parent.mkdir(parents=True, exist_ok=True)
        if options.force or not schema.exists():
            schema.write_text(json.dumps(json_schema(), indent=2) + "\n", encoding="utf-8")
        options.job.write_text(
            "\n".join(_lines(options, text_options, source, columns, is_united)) + "\n",
            encoding="utf-8",
        )
    except OSError as error:
        raise StorageError(f"{error.filename} cannot be written: {error.strerror}") from None
    return list(_report_lines(options, columns))


def _text_options(data: str, encoding: str) -> TextOptions:
    try:
        name = encoding_name(encoding)
    except ValueError as error:
        raise UsageError(f"--encoding: {error}") from None
    return detect_text_options(data, name)


def _open(data: str, options: TextOptions) -> tuple[Source, bool]:
    """Return the dataset, and True if the dataset is the union of files with different schemas."""
    source = open_source(data, options=options)
    if not source.differences:
        return source, False
    united = open_source(data, mode="union", options=options)
    united.require_alike(united.schema.names, only_kept=True)
    return united, True


def _report_lines(options: InitOptions, columns: DetectedColumns) -> Iterator[str]:
    job = printable(str(options.job), 200)
    yield f"wrote    {job}"
    for title, lines in (("prompt", columns.prompt_reasons), ("note", columns.notes)):
        for number, line in enumerate(lines):
            yield f"{'' if number else title:<9}{line}"
    id_column = "none" if columns.id_column is None else printable(columns.id_column, 60)
    yield f"id       {id_column}: {columns.id_reason}"
    task, why = _task_of(options.model)
    if why:
        yield f"task     {task}: {printable(why, 200)}"
    if options.model is None:
        yield f"model    {DEFAULT_MODEL}; change it with --model, or model.name in the file"
    yield f"run it   batchinfer run {job}"


def _task_of(model: str | None) -> tuple[TaskName, str]:
    """Return a model's task and the reason. The task is ``generate`` unless the model's config
    shows another task.

    The hub is not accessed. Errors in a model's folder are ignored, because the run reports them.
    """
    config = Path(os.path.expanduser(model or ""), "config.json")
    try:
        values = json.loads(config.read_bytes())
        name = str(values["architectures"][0])
    except (OSError, ValueError, LookupError, TypeError):
        return "generate", ""
    if name.endswith("ForSequenceClassification"):
        return "classify", f"the model is a {name}, which has a classification head"
    if name.endswith("Model") and not name.endswith(_WITH_OUTPUT_HEAD):
        return "embed", f"the model is a {name}, which has no output head"
    if attends_both_ways(values):
        return "embed", f"the model is a {name}, an encoder"
    return "generate", ""


def _lines(
    options: InitOptions,
    text_options: TextOptions,
    source: Source,
    columns: DetectedColumns,
    is_united: bool,
) -> Iterator[str]:
    task = TASK_SPECS[_task_of(options.model)[0]]
    yield f"# yaml-language-server: $schema={SCHEMA_FILE}"
    yield f"# Written by `batchinfer init` for a dataset of {source.num_rows:,} rows."
    yield "# `batchinfer plan` estimates what the job needs; `batchinfer run` runs or resumes it."
    yield "version: 1"
    if not task.draws:
        yield f"task: {task.name}"
    yield "model:"
    yield _key("name", _model(options), "a hub id or a local directory, in safetensors")
    yield _key("dtype", "auto", "the checkpoint's dtype; on a CPU float32 is the most exact")
    yield "input:"
    yield _key("path", _from_job(options, options.data), "a file, list, glob or directory")
    for name in text_options.used():
        yield _key(name, getattr(text_options, name), _TEXT_COMMENTS[name])
    if is_united:
        yield _key("schema", "union", "the files' columns differ; missing columns are null")
    if source.version is not None:
        yield _key("# version", source.version, "version of the table (default: the latest)")
    if columns.id_column is None:
        yield f"  # id_column: {columns.id_reason}"
    else:
        yield _key("id_column", columns.id_column, columns.id_reason)
    yield _key("# limit", 100, "run only the first rows, to test the job; or use run --limit 100")
    yield "prompt:"
    yield from (f"  # {line}" for line in (*columns.prompt_reasons, *columns.notes))
    yield from _prompt_lines(columns.prompt)
    if task.draws:
        yield "sampling:"
        yield _key("max_tokens", 256, "maximum tokens per answer")
        yield _key("temperature", 0.0, "0 = always the most likely token; 0.7 to 1 gives variety")
        yield _key("# n", 8, "samples per row; needs a temperature above 0")
    yield "output:"
    yield _key("path", _output(options), "folder for data/, stats/ and summary.json")
    if renamed := _renamed(source, task):
        yield (
            "  rename:                         # input columns whose names are taken "
            "by output columns"
        )
        yield from (f"    {_text(old)}: {_text(new)}" for old, new in renamed.items())


def _prompt_lines(keys: Mapping[str, Any]) -> Iterator[str]:
    for key, value in keys.items():
        if key != "messages":
            texts = [value] if isinstance(value, str) else value
            written = ", ".join(map(_text, texts))
            yield f"  {key}: {written if isinstance(value, str) else f'[{written}]'}"
            continue
        yield "  messages:"
        for message in value:
            yield f"    - {{role: {message['role']}, content: {_text(message['content'])}}}"


def _key(key: str, value: object, comment: str) -> str:
    written = _text(value) if isinstance(value, str) else str(value)
    return f"{f'  {key}: {written} ':<{_COMMENT_AT}}# {comment}"


def _text(value: str) -> str:
    """Format a string as YAML, quoted unless it is clearly a plain scalar."""
    if _PLAIN.fullmatch(value) and value.lower() not in ("null", "true", "false"):
        return value
    text = json.dumps(value, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in text)


def _model(options: InitOptions) -> str:
    if options.model is None or not os.path.isdir(os.path.expanduser(options.model)):
        return options.model or DEFAULT_MODEL
    path = _from_job(options, options.model)
    return path if path.startswith((".", "/", "~")) else f"./{path}"


def _output(options: InitOptions) -> str:
    if options.output is not None:
        return _from_job(options, options.output)
    parent, data = options.job.parent, Path(os.path.abspath(options.data))
    if Path(os.path.abspath(parent)).is_relative_to(data):
        parent = data.parent  # output inside the data's folder would be read as data
    return os.path.relpath(parent / "out" / options.job.stem, options.job.parent)


def _from_job(options: InitOptions, path: str) -> str:
    """Make a path relative to the job file's folder instead of the current folder."""
    if is_url(path) or path.startswith("~") or os.path.isabs(path):
        return path
    return os.path.relpath(path, options.job.parent)


def _renamed(source: Source, task: TaskSpec) -> dict[str, str]:
    taken = {*source.schema.names, *task.columns(())}
    renamed: dict[str, str] = {}
    for name in filter(source.schema.names.__contains__, task.columns(())):
        new = f"input_{name}"
        while new in taken:
            new += "_"
        taken.add(new)
        renamed[name] = new
    return renamed
