"""Reads a job file and command-line options into a checked ``JobSpec``.

``{{ name }}`` in the job's name and paths inserts a value from ``vars``. Expressions are not
supported, so loading a job cannot take long or need much memory.
"""

from __future__ import annotations

import glob
import json
import os.path
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from pydantic import ValidationError

from batchinfer.console.format import did_you_mean, format_value, printable
from batchinfer.errors import UsageError
from batchinfer.job.spec.checks import check_conflicts
from batchinfer.job.spec.document import JobDocument
from batchinfer.job.spec.errors import usage_error
from batchinfer.job.spec.referenced_files import read_preset, tools_file
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.spec.task_keys import TASK_SPECS
from batchinfer.job.spec.yaml import KeyPath, read_yaml, valid_text
from batchinfer.job.storage.urls import is_url

_PLACEHOLDER = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,17}")

_WITH_VARIABLES: tuple[KeyPath, ...] = (
    ("name",),
    ("model", "name"),
    ("model", "tokenizer"),
    ("input", "path"),
    ("engine", "preset"),
    ("output", "path"),
    ("output", "reuse"),
)


def render_variables(text: str, variables: Mapping[str, str]) -> str:
    """Replace every ``{{ name }}`` in ``text``; raise ValueError for an unknown name."""

    def value(match: re.Match[str]) -> str:
        name = match.group(1).strip()
        if name not in variables:
            near = did_you_mean(name, tuple(variables), "vars has")
            raise ValueError(f"{{{{ {printable(name, 60)} }}}} is not a variable{near}")
        return variables[name]

    if text.count("{{") != len(_PLACEHOLDER.findall(text)):
        raise ValueError("a {{ has no matching }}")
    return _PLACEHOLDER.sub(value, text)


def parse_variables(assignments: Sequence[str]) -> dict[str, str]:
    """Parse ``--var name=text`` options; if a name is repeated, the last value wins. Raise
    UsageError if an option does not have this form, or is not valid Unicode."""
    variables: dict[str, str] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name.strip():
            raise UsageError(
                f"--var {printable(assignment, 60)}: it has no name or no value; write "
                "--var name=text"
            )
        try:
            valid_text(assignment)
        except ValueError:
            raise UsageError(f"--var {printable(name, 60)}: not valid Unicode") from None
        variables[name.strip()] = text
    return variables


def check_token_keys(biases: object) -> None:
    """Raise ValueError if a key of ``logit_bias`` is not a token id in plain digits.

    Other spellings of a number could name the same token twice. ``SamplingParams`` checks that
    ``biases`` is a mapping.
    """
    for key in biases if isinstance(biases, Mapping) else ():
        if not _TOKEN_ID.fullmatch(key):
            raise ValueError(
                f"logit_bias has the key {format_value(key)}; its keys must be "
                "token ids, written as whole numbers like 5"
            )


def load_job(
    path: Path,
    *,
    overrides: Sequence[str] = (),
    options: Mapping[str, str] | None = None,
    variables: Mapping[str, str] | None = None,
    output: str | None = None,
    limit: int | None = None,
    reuse: Sequence[str] = (),
) -> JobSpec:
    """Load the job file at ``path``; make its paths absolute and check its templates.

    The data and the model are not read.

    Args:
        overrides: assignments ``section.key=value`` with values in YAML, which override the file.
        options: more assignments, keyed by the command-line option that each came from.
        variables: values for ``vars``.
        output: overrides ``output.path``; relative to the current directory.
        limit: overrides ``input.limit``.
        reuse: paths to add to ``output.reuse``; relative to the current directory.

    Raises:
        UsageError: the job is invalid. The message has a line for each of the first problems, with
            the file, line, key and valid values.
        NotYetError: this version does not support a key or value.
    """
    source = printable(str(path), 200)
    base_dir = Path(os.path.abspath(path)).parent
    document = JobDocument(read_yaml(path, source), source)
    for assignment in overrides:
        document.override(assignment)
    for option, assignment in (options or {}).items():
        document.override(assignment, option)
    _fill_in_variables(document, variables or {})
    if output is not None:
        _set_output(document, output)
    if limit is not None:
        document.set(("input", "limit"), limit, "--limit")
    if reuse:
        _add_reuse(document, reuse)
    if document.get(("name",)) is None:
        document.set(("name",), os.fsencode(path.stem).decode(errors="replace"), source)
    return checked_job(document, base_dir)


def checked_job(document: JobDocument, base_dir: Path) -> JobSpec:
    """Check a document whose variables are filled in; paths are relative to ``base_dir``. Errors
    are those of ``load_job``."""
    _apply_preset(document, base_dir)
    spec = _with_absolute_paths(_check(document), base_dir, document)
    check_conflicts(spec, document)
    return spec


def _check(document: JobDocument) -> JobSpec:
    biases: KeyPath = ("sampling", "logit_bias")
    try:
        check_token_keys(document.get(biases))
    except ValueError as error:
        raise UsageError(f"{document.origin(biases)}: sampling.{error}") from None
    _fill_in_sampling(document)
    seed: KeyPath = ("sampling", "seed")
    if document.get(seed, 0) is None:
        raise document.error(
            seed, " is null; set it to a number, like 0, so that runs can be repeated"
        )
    # In strict mode, pydantic accepts lists for tuples only from JSON.
    try:
        return JobSpec.model_validate_json(json.dumps(document.data), strict=True)
    except ValidationError as error:
        raise usage_error(error, document) from None


def _fill_in_sampling(document: JobDocument) -> None:
    """Set the sampling parameters of a task that draws no tokens."""
    name = document.get(("task",))
    task = TASK_SPECS.get(name) if isinstance(name, str) else None
    if task is not None and task.sampling is not None:
        if document.get(("sampling",)) is not None:
            problem = (
                f" cannot be used with task: {name}, which draws no tokens; leave the section out"
            )
            raise document.error(("sampling",), problem)
        document.data["sampling"] = asdict(task.sampling)


def _fill_in_variables(document: JobDocument, overrides: Mapping[str, str]) -> None:
    declared = document.get(("vars",), {})
    if not isinstance(declared, dict):
        raise document.error(
            ("vars",), " must map names to strings, or to null if --var must set them"
        )
    for name in overrides:
        if name not in declared:
            near = did_you_mean(name, tuple(declared), "vars")
            raise UsageError(f"--var {printable(name, 60)}: the job has no such variable{near}")
    values = {**declared, **overrides}
    for name, value in values.items():
        if value is None:
            raise document.error(("vars", name), f" has no value; add --var {name}=VALUE")
        if not isinstance(value, str):
            raise document.error(("vars", name), " must be a string; write it in quotes")
    if values:
        document.data["vars"] = values
    for path in _WITH_VARIABLES:
        _render(document, path, values)


def _render(document: JobDocument, path: KeyPath, values: Mapping[str, str]) -> None:
    written = document.get(path)
    texts = written if isinstance(written, list) else [written]
    try:
        filled = [render_variables(t, values) if isinstance(t, str) else t for t in texts]
    except ValueError as error:
        raise document.error(path, f": {error}") from None
    if filled != texts:
        document.set(
            path, filled if isinstance(written, list) else filled[0], document.origin(path)
        )


def _set_output(document: JobDocument, output: str) -> None:
    try:
        valid_text(output)
    except ValueError as error:
        raise UsageError(f"--output: {error}") from None
    if not output:
        raise UsageError("--output is empty; give a folder")
    place = output if is_url(output) else os.path.abspath(output)
    document.set(("output", "path"), place, "--output")


def _add_reuse(document: JobDocument, paths: Sequence[str]) -> None:
    written = document.get(("output", "reuse"), [])
    if not isinstance(written, list):
        raise document.error(("output", "reuse"), " must be a list of folders")
    places = [path if is_url(path) else os.path.abspath(path) for path in paths]
    document.set(("output", "reuse"), [*written, *places], "--reuse")


def _apply_preset(document: JobDocument, base_dir: Path) -> None:
    engine = document.get(("engine",))
    if not isinstance(engine, dict) or "preset" not in engine:
        return
    preset = engine.pop("preset")
    if preset is None:
        return
    if not isinstance(preset, str):
        raise document.error(
            ("engine", "preset"), " must be the name of a shipped preset, or a file"
        )
    try:
        text, source = read_preset(preset, base_dir)
    except UsageError as error:
        raise UsageError(f"{document.origin(('engine', 'preset'))}: {error}") from None
    document.underlay("engine", text.data, text, source)


def _with_absolute_paths(spec: JobSpec, base_dir: Path, document: JobDocument) -> JobSpec:
    model, prompt = spec.model, spec.prompt
    if prompt.chat_template not in ("auto", "none"):
        prompt = replace(prompt, chat_template=_absolute(prompt.chat_template, base_dir))
    if isinstance(prompt.tools, str):
        try:
            prompt = replace(prompt, tools=tools_file(_absolute(prompt.tools, base_dir)))
        except ValueError as error:
            raise document.error(("prompt", "tools"), f": {error}") from None
    sections = {
        "model": {
            "name": _local_or_hub(model.name, base_dir),
            "tokenizer": model.tokenizer and _local_or_hub(model.tokenizer, base_dir),
            "adapters": {
                name: _local_or_hub(path, base_dir) for name, path in model.adapters.items()
            },
        },
        "input": {
            "path": tuple(_absolute(path, base_dir) for path in spec.input.paths),
            "media_root": spec.input.media_root and _absolute(spec.input.media_root, base_dir),
        },
        "output": {
            "path": _absolute(spec.output.path, base_dir),
            "reuse": tuple(_absolute(path, base_dir) for path in spec.output.reuse),
        },
    }
    changed = {name: getattr(spec, name).model_copy(update=keys) for name, keys in sections.items()}
    return spec.model_copy(update={**changed, "prompt": prompt})


def _absolute(path: str, base_dir: Path) -> str:
    """Join ``path`` to ``base_dir``; escape ``base_dir`` if ``path`` is a glob."""
    if is_url(path):
        return path
    path = os.path.expanduser(path)
    base = str(base_dir)
    if os.path.isabs(path):
        return os.path.normpath(path)
    if glob.has_magic(path) and not os.path.lexists(os.path.join(base, path)):
        base = glob.escape(base)
    return os.path.normpath(os.path.join(base, path))


def _local_or_hub(name: str, base_dir: Path) -> str:
    """Return an absolute path if ``name`` looks like a path or is a folder, else the hub id."""
    path = os.path.normpath(os.path.join(base_dir, os.path.expanduser(name)))
    written_as_path = name.startswith((".", "/", "~"))
    return path if written_as_path or os.path.isdir(path) else name
