"""The plan of an output directory; only runs with the same plan may write to the output."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import PurePath
from typing import Any

from batchinfer.console.format import format_value, listed, printable
from batchinfer.errors import DataError, LockedError
from batchinfer.job.fingerprint import comparable, differences, model_commit, model_file
from batchinfer.job.input.changed_files import (
    contents,
    file_differences,
    have_common_files,
    same_files,
)
from batchinfer.job.input.format import InputFile
from batchinfer.job.row_ranges import Part
from batchinfer.job.storage.filesystem import Files, LocalFiles, parse_json, read_file

_UPDATE = (
    "use --update to recompute only the rows that changed, --output (run-batch: -o) to write "
    "elsewhere, or --overwrite to start over"
)
"""Hint for a job that was edited after it had begun to write its output."""
_UPDATE_ALL = (
    "use --update to compute all rows again with this model, --output (run-batch: -o) to write "
    "elsewhere, or --overwrite to start over"
)
"""Hint for a job in which only files of the model have changed."""
_OTHER_PLACE = (
    "use --output (run-batch: -o) to write elsewhere, or --overwrite to delete the existing output"
)
"""Hint for an output that belongs to an unrelated job."""


LAYOUT = 2
"""Version of the file layout of unfinished outputs. A run resumes only outputs of this version."""


@dataclass(frozen=True)
class Manifest:
    """The plan of a job, written once and never changed."""

    fingerprint: str
    """Hash of ``job``."""
    job: Mapping[str, Any]
    """Result of ``fingerprint_facts``."""
    input_paths: tuple[str, ...]
    """Entries of ``input.path``, as absolute paths or URLs."""
    inputs: tuple[InputFile, ...]
    num_rows: int
    rows_per_part: int
    planned_at: str
    """Time of planning in ISO 8601. Chat templates get this time in every run, so that prompts do
    not change between runs."""
    bounds: tuple[int, ...] | None = None
    """First row id of each part, followed by the end of the last part; None without a filter."""
    layout: int = LAYOUT
    table_version: int | None = None
    """Version of the Delta or Iceberg table; None for other inputs."""
    image_files: str | None = None
    """Hash of facts about the image files that rows name (``image_file_facts``). None if the hash
    is unknown, or if rows name no files."""

    def parts(self) -> list[Part]:
        """Return the parts in order; an empty dataset has one part without rows."""
        starts = range(0, self.num_rows, self.rows_per_part) or [0]
        stops = [min(start + self.rows_per_part, self.num_rows) for start in starts]
        parts = enumerate(zip(starts, stops, strict=True))
        if self.bounds is None:
            return [Part(index, range(start, stop)) for index, (start, stop) in parts]
        ids = zip(self.bounds[:-1], self.bounds[1:], strict=True)
        return [
            Part(index, range(first, end), stop - start)
            for (index, (start, stop)), (first, end) in zip(parts, ids, strict=True)
        ]

    @property
    def replaced_cells(self) -> int:
        """Number of input cells in which U+FFFD replaced bytes (``input.encoding_errors``)."""
        return sum(file.replaced_cells for file in self.inputs)

    def with_replaced_cells(self, earlier: Manifest) -> Manifest:
        """Return this plan with the numbers of replaced cells of an earlier plan of the same job,
        whose files may have had other paths."""
        pairs = zip(self.inputs, earlier.inputs, strict=True)
        files = (replace(file, replaced_cells=was.replaced_cells) for file, was in pairs)
        return replace(self, inputs=tuple(files))

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1, ensure_ascii=False).encode()

    def check_same_job(self, other: Manifest, output: str) -> None:
        """Check that ``other`` plans the same work.

        Raises:
            LockedError: the job differs; the message names the keys that differ.
            DataError: an input file differs; the message names the file.
        """
        changes = ""
        if self.fingerprint != other.fingerprint:
            changes = _changes(comparable(self.job, other.job), comparable(other.job, self.job))
        if not changes and not have_common_files(self.inputs, other.inputs):
            changes = self._other_paths(other)
        if changes:
            raise LockedError(
                f"{output} holds the output of another job. Differences: {changes}",
                hint=self._way_on(other),
            )
        for problem in file_differences(self.inputs, other.inputs):
            raise DataError(
                f"the input has changed since the job was started: {problem}",
                hint="use --update to recompute only the rows that changed, or restore the input, "
                "or use --output (run-batch: -o) to write elsewhere, or --overwrite to start over",
            )

    def check_same_images(self, other: Manifest) -> None:
        """Raise DataError if both plans have a hash of the image files, and the hashes differ."""
        if None not in (self.image_files, other.image_files) and (
            self.image_files != other.image_files
        ):
            raise DataError(
                "image files that rows name have changed since the job was started, or have new "
                "modification times",
                hint="use --update to recompute only the rows whose images differ, or restore the "
                "files with their modification times, or use --retry-errors to keep all finished "
                "rows and retry the failed ones, or use --output (run-batch: -o) to write "
                "elsewhere, or --overwrite to start over",
            )

    def _way_on(self, other: Manifest) -> str:
        """Return advice for a run of ``other``, which cannot resume this output."""
        changed = differences(comparable(self.job, other.job), comparable(other.job, self.job))
        has_other_model = any(key.startswith("model_facts.model.") for key in changed)
        is_elsewhere = not have_common_files(self.inputs, other.inputs)
        if "task" in changed or (is_elsewhere and self._other_paths(other)):
            return _OTHER_PLACE
        if has_other_model and not self._way_back(other):
            return _UPDATE_ALL if all(map(model_file, changed)) else _OTHER_PLACE
        return self._way_back(other) + _UPDATE

    def _other_paths(self, other: Manifest) -> str:
        if self.input_paths == other.input_paths:
            return ""
        was, now = (printable(", ".join(m.input_paths), 120) for m in (self, other))
        return f"input.path was {was} and is now {now}"

    @property
    def name(self) -> str:
        """16 hex digits that identify the planned work."""
        content: list[object] = [self.fingerprint, contents(self.inputs)]
        if self.image_files is not None:
            content.append(self.image_files)
        return hashlib.sha256(json.dumps(content, default=list).encode()).hexdigest()[:16]

    def is_of_same_job(self, other: Manifest) -> bool:
        """Return True if ``check_same_job`` accepts ``other``."""
        try:
            self.check_same_job(other, "")
        except (LockedError, DataError):
            return False
        return True

    def has_same_input(self, other: Manifest) -> bool:
        """Return True if ``other`` reads the same rows in the same order; the paths may differ."""
        return same_files(self.inputs, other.inputs)

    def _way_back(self, other: Manifest) -> str:
        """Return advice to use the old commit if the model's repository has a new one; ""
        otherwise."""
        commit = model_commit(self.job)
        if commit is None or model_commit(other.job) in (None, commit):
            return ""
        return f"set model.revision: {commit} to continue with the same model, "


def read_manifest(path: PurePath, files: Files | None = None) -> Manifest:
    """Read a stored manifest. Raise DataError if the manifest is damaged or missing."""
    try:
        fields = parse_json(read_file(files or LocalFiles(), path))
        fields.setdefault("layout", 1)
        fields["input_paths"] = tuple(map(str, fields["input_paths"]))
        datetime.fromisoformat(fields["planned_at"])
        fields["inputs"] = tuple(InputFile(**file) for file in fields["inputs"])
        if fields.get("bounds") is not None:
            fields["bounds"] = tuple(map(int, fields["bounds"]))
        manifest = Manifest(**fields)
        if manifest.bounds is not None:
            manifest.parts()  # raises ValueError if the number of bounds is wrong
        return manifest
    except FileNotFoundError:
        raise DataError(f"{path} is missing") from None
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise DataError(f"{path} is damaged") from error


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Name the keys or files that differ, with both values if a single key differs."""
    changed = differences(old, new)
    names = {key: model_file(key) or key.removeprefix("model_facts.") for key in changed}
    if len(changed) != 1:
        return listed(list(names.values()))
    [(key, (was, now))] = changed.items()
    if model_file(key) is not None:
        return f"{names[key]} {'is new' if was is None else 'has changed' if now else 'is missing'}"
    return f"{names[key]} was {format_value(was)} and is now {format_value(now)}"
