"""The plan that an output directory was made for: a run with another must not add to it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import PurePath
from typing import Any

from batchinfer.console.format import format_value, listed, printable
from batchinfer.errors import DataError, LockedError
from batchinfer.job.fingerprint import comparable, differences, model_commit
from batchinfer.job.input.format import InputFile
from batchinfer.job.input.identity import (
    contents,
    file_differences,
    have_common_files,
    same_files,
)
from batchinfer.job.row_ids import Part
from batchinfer.job.storage.filesystem import Files, LocalFiles, parse_json, read_file

_UPDATE = (
    "use --update to recompute only the rows that changed, --output (run-batch: -o) for another "
    "place, or --overwrite to start over"
)
"""What to do about the output of a job that was edited since."""
_OTHER_PLACE = (
    "use --output (run-batch: -o) for another place, or --overwrite to throw away what is there"
)
"""What to do about the output of a job that has nothing in common with this one."""


LAYOUT = 2
"""Version of an unfinished output's files: a run resumes no other one."""


@dataclass(frozen=True)
class Manifest:
    """The plan of a job, written once and never changed."""

    fingerprint: str
    job: Mapping[str, Any]
    """``fingerprint_facts``, which the fingerprint is the hash of."""
    input_paths: tuple[str, ...]
    """``input.path``, its entries absolute."""
    inputs: tuple[InputFile, ...]
    """The files found there."""
    num_rows: int
    rows_per_part: int
    planned_at: str
    """ISO 8601; what chat templates are told the time is, so that a resumed run says the same."""
    bounds: tuple[int, ...] | None = None
    """Where a filter is: the first row id of each part, and where the last one ends."""
    layout: int = LAYOUT
    """Of the files of an unfinished output."""
    table_version: int | None = None
    """Version of the table that is read; None: the files are no table's."""

    def parts(self) -> list[Part]:
        """The parts of the output, in order; an empty dataset has one without rows."""
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

    def to_json(self) -> bytes:
        """The manifest as it is stored."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False).encode()

    def check_same_job(self, other: Manifest, output: str) -> None:
        """Check that ``other`` plans the same work.

        Raises:
            LockedError: the job differs; names the keys.
            DataError: an input file differs; names it.
        """
        changes = ""
        if self.fingerprint != other.fingerprint:
            changes = _changes(comparable(self.job, other.job), comparable(other.job, self.job))
        if not changes and not have_common_files(self.inputs, other.inputs):
            changes = self._other_paths(other)
        if changes:
            raise LockedError(
                f"{output} holds the output of another job. What differs: {changes}",
                hint=_OTHER_PLACE
                if self._shares_nothing_with(other)
                else self._way_back(other) + _UPDATE,
            )
        for problem in file_differences(self.inputs, other.inputs):
            raise DataError(
                f"the input has changed since this output was begun: {problem}",
                hint="use --update to recompute only the rows that changed, or put the input back, "
                "or use --output (run-batch: -o) for another place, or --overwrite to start over",
            )

    def _shares_nothing_with(self, other: Manifest) -> bool:
        """Whether ``other`` is no edited version of this job: no answer would be kept."""
        changed = differences(comparable(self.job, other.job), comparable(other.job, self.job))
        if "task" in changed:
            return True
        if any(key.startswith("model_facts.model.") for key in changed):
            return not self._way_back(other)
        return self._other_paths(other) != "" and not have_common_files(self.inputs, other.inputs)

    def _other_paths(self, other: Manifest) -> str:
        """How ``input.path`` differs; "" where it does not."""
        if self.input_paths == other.input_paths:
            return ""
        was, now = (printable(", ".join(m.input_paths), 120) for m in (self, other))
        return f"input.path was {was}, is {now}"

    @property
    def name(self) -> str:
        """A name that plans of other work do not have: 16 hex digits."""
        content = json.dumps([self.fingerprint, contents(self.inputs)], default=list)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def is_of_same_job(self, other: Manifest) -> bool:
        """Whether ``other`` plans the same work, as ``check_same_job`` finds it."""
        try:
            self.check_same_job(other, "")
        except (LockedError, DataError):
            return False
        return True

    def has_same_input(self, other: Manifest) -> bool:
        """Whether ``other`` plans the same rows in the same order, wherever they are."""
        return same_files(self.inputs, other.inputs)

    def _way_back(self, other: Manifest) -> str:
        """What to do besides where a model's repository has moved on."""
        commit = model_commit(self.job)
        if commit is None or model_commit(other.job) in (None, commit):
            return ""
        return f"set model.revision: {commit} to go on with the model as it was, "


def read_manifest(path: PurePath, files: Files | None = None) -> Manifest:
    """The manifest stored at ``path``.

    Raises:
        DataError: it is damaged or missing.
    """
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
            manifest.parts()  # they are as many as it says
        return manifest
    except FileNotFoundError:
        raise DataError(f"{path} is missing") from None
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise DataError(f"{path} is damaged") from error


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """The keys that differ and their values; facts of models are named like keys of the section."""
    found = {key.removeprefix("model_facts."): both for key, both in differences(old, new).items()}
    if len(found) > 1:
        return listed(list(found))
    return ", ".join(
        f"{key} was {format_value(was)}, is {format_value(now)}"
        for key, (was, now) in found.items()
    )
