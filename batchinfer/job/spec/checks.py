"""Checks a job's keys against each other and against files, before data or a model is read."""

from __future__ import annotations

import glob
import os.path
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path, PurePath, PurePosixPath

from batchinfer.config import PromptConfig
from batchinfer.console.format import did_you_mean, format_value, listed, printable
from batchinfer.errors import UsageError
from batchinfer.job.spec.document import JobDocument
from batchinfer.job.spec.referenced_files import text_of
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.spec.yaml import KeyPath, dotted
from batchinfer.job.storage.urls import StorePath, fixed_part, is_url
from batchinfer.text.chat import compile_chat_template
from batchinfer.text.prompt_sources import RowTemplate, conflicts
from batchinfer.text.sample_filter import SampleFilter
from batchinfer.text.structured.compiled_grammar import check_structured_outputs

_LONGEST = 300
"""Maximum number of characters in an error message."""
_WRITTEN = ("data", "part-00000.parquet")


def check_conflicts(spec: JobSpec, document: JobDocument) -> None:
    """Check the keys of ``spec``, which was read from ``document``. Raise UsageError with the file,
    line and key if a key is wrong."""
    for place in spec.input.paths:
        _check_output_place(spec.output.path, place, document)
    if spec.model.revision is not None and os.path.isabs(spec.model.name):
        problem = ": model.name is a local folder, which has no revisions; leave the key out"
        raise document.error(("model", "revision"), problem)
    _check_adapters(spec, document)
    if spec.input.filter is not None:
        # Import late, because this imports pyarrow and Polars, which is slow.
        from batchinfer.job.input.filter import parsed

        with _errors_at(("input", "filter"), document, names_key=True):
            parsed(spec.input.filter)
    for key, problem in conflicts(spec.prompt):
        raise document.error(tuple(key.split(".")), f" {problem}")
    if spec.prompt.chat_template not in ("auto", "none"):
        with _errors_at(("prompt", "chat_template"), document):
            where = printable(spec.prompt.chat_template, 200)
            compile_chat_template(text_of(spec.prompt.chat_template), UsageError, where)
    for path, template in _templates(spec.prompt):
        with _errors_at(path, document, names_key=True):
            RowTemplate(template, dotted(path))
    if spec.sampling.structured_outputs is not None:
        with _errors_at(("sampling", "structured_outputs"), document):
            check_structured_outputs(spec.sampling.structured_outputs)
    if spec.accept is not None:
        with _errors_at(("accept",), document):
            SampleFilter(spec.accept)
    _check_output_names(spec, document)


@contextmanager
def _errors_at(key: KeyPath, document: JobDocument, *, names_key: bool = False) -> Generator[None]:
    """Add the line of ``key`` to errors raised in the block, and ``key`` itself unless
    ``names_key`` says that the errors already name it."""
    try:
        yield
    except (UsageError, ValueError) as error:
        problem = "\n".join(printable(line) for line in str(error).splitlines())
        if names_key:
            raise UsageError(f"{document.origin(key)}: {problem}") from None
        raise document.error(key, f": {problem[:_LONGEST]}") from None


def _check_adapters(spec: JobSpec, document: JobDocument) -> None:
    adapters, name = spec.model.adapters, spec.prompt.adapter
    has_column = spec.prompt.adapter_column is not None
    if name is not None and name not in adapters:
        known = did_you_mean(name, tuple(adapters)) if adapters else ", because it is empty"
        problem = f": model.adapters has no {format_value(name)}{known}"
        raise document.error(("prompt", "adapter"), problem)
    if has_column and not adapters:
        problem = " is set, but model.adapters is empty; add an entry there, as NAME: FOLDER"
        raise document.error(("prompt", "adapter_column"), problem)
    if adapters and not has_column and name is None and spec.input.format != "openai-batch":
        problem = " are set, but no row uses them; set prompt.adapter for all rows, "
        raise document.error(("model", "adapters"), problem + "or prompt.adapter_column")


def _check_output_place(output: str, place: str, document: JobDocument) -> None:
    """Check that a later run cannot read the output as input, and that the output directory does
    not contain the input, which ``--overwrite`` would delete."""
    key: KeyPath = ("output", "path")
    fixed = _fixed_part(place)
    out, folder = _resolved(output), _resolved(fixed)
    if len(out.parts) <= (2 if is_url(output) else 1):
        raise document.error(
            key, f" is {printable(output)}, which is the root folder; choose a folder below it"
        )
    if is_url(output) and ".." in out.parts:
        raise document.error(
            key, f" is {printable(output)}; an object store has no folder named .."
        )
    if out.is_relative_to(folder) and (fixed == place or _would_match(place, output)):
        raise document.error(
            key, f" is inside the input folder {printable(fixed)}; choose another folder"
        )
    if folder.is_relative_to(out):
        problem = f" {printable(output)} contains the input {printable(place)}; "
        raise document.error(key, problem + "choose another folder")


def _resolved(path: str) -> PurePath:
    return StorePath(path) if is_url(path) else Path(os.path.realpath(path))


def _fixed_part(path: str) -> str:
    """Return ``path``; for a glob, return the folder that contains all matches."""
    if os.path.lexists(path) or not glob.has_magic(path):
        return path
    return str(fixed_part(StorePath(path) if is_url(path) else PurePosixPath(path)))


def _would_match(pattern: str, output: str) -> bool:
    """Return True if ``pattern`` matches files that the job writes to ``output``."""
    wanted, written = Path(pattern).parts, Path(output, *_WRITTEN).parts
    if "**" in wanted:
        return fnmatchcase(written[-1], wanted[-1])
    return len(wanted) <= len(written) and all(map(fnmatchcase, written, wanted))


def _templates(prompt: PromptConfig) -> Iterator[tuple[KeyPath, str]]:
    if prompt.template is not None:
        yield ("prompt", "template"), prompt.template
    if prompt.system is not None:
        yield ("prompt", "system"), prompt.system
    for index, message in enumerate(prompt.messages or ()):
        yield ("prompt", "messages", index, "content"), message["content"]


def _check_output_names(spec: JobSpec, document: JobDocument) -> None:
    """Check column names as far as possible without the data."""
    rename, key = spec.output.rename, ("output", "rename")
    generated = spec.task_spec.columns(spec.written)
    for name, new_name in rename.items():
        if new_name in generated:
            problem = f": {format_value(new_name)} is the name of an output column; choose another"
            raise document.error((*key, name), problem)
    if spec.input.keep_columns == "*":
        return
    kept = dict.fromkeys((*spec.input.keep_columns, *filter(None, [spec.input.id_column])))
    for name, new_name in rename.items():
        if name not in kept:
            raise document.error(
                (*key, name), f": the column is not kept; the kept columns are: {listed(kept)}"
            )
        if new_name in kept and new_name not in rename:
            problem = f": {format_value(new_name)} is also a kept input column; choose another name"
            raise document.error((*key, name), problem)
    for name in kept:
        if name in generated and name not in rename:
            problem = f": {format_value(name)} is also the name of an output column; "
            remedy = f"set output.rename: {{{printable(name)}: input_{printable(name)}}}"
            raise document.error(("input", "keep_columns"), problem + remedy)
