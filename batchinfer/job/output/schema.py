"""The output table: its columns and their types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.console.format import format_value, listed, near_name, printable
from batchinfer.errors import DataError, UsageError
from batchinfer.job.input.dataset import Source
from batchinfer.job.input.invalid_utf8 import with_valid_text
from batchinfer.job.output.explode import exploded
from batchinfer.job.rows.tasks import TASKS
from batchinfer.job.spec.spec import JobSpec

RESPONSE_COLUMNS = ("custom_id", "url", "body")
"""Names of the input columns that OpenAI's output files need."""
ERROR = pa.struct([("code", pa.string()), ("message", pa.string())])
_OF_ALL_TASKS = {
    "row_id": pa.int64(),
    "prompt": pa.string(),
    "num_prompt_tokens": pa.int32(),
    "truncated": pa.bool_(),
    "status": pa.string(),
    "error": ERROR,
}


@dataclass(frozen=True)
class OutputTable:
    """The columns of ``data/part-*.parquet``: the kept input columns, then generated columns."""

    kept: Mapping[str, str]
    """Output names of the kept input columns, keyed by input name."""
    kept_schema: pa.Schema
    generated_schema: pa.Schema
    explodes: bool = False
    """True if the output has a row for each sample."""

    def columns(self, kept: Sequence[pa.RecordBatch], generated: pa.Table) -> pa.Table:
        """Combine kept columns, under their input names, with the same rows' generated columns."""
        arrays = [
            pa.chunked_array([with_valid_text(batch.column(name)) for batch in kept], kind)
            for name, kind in zip(self.kept, self.kept_schema.types, strict=True)
        ]
        schema = pa.schema([*self.kept_schema, *self.generated_schema])
        table = pa.table([*arrays, *generated.columns], schema=schema)
        return exploded(table) if self.explodes else table


def output_table(source: Source, spec: JobSpec) -> OutputTable:
    """Return the output table of a job.

    Raises:
        DataError: a column to keep is not in the input, differs between files, or has a type that
            Parquet does not support.
        UsageError: two output columns would have the same name, or ``output.rename`` names a column
            that is not kept.
    """
    kept = _kept_names(source, spec)
    include = spec.written
    types = {**_OF_ALL_TASKS, **TASKS[spec.task].result_types(spec)}
    generated = pa.schema([(name, types[name]) for name in spec.task_spec.columns(include)])
    _check_collisions(kept, set(generated.names))
    fields = [source.schema.field(name) for name in kept]
    kept_schema = pa.schema([pa.field(kept[field.name], field.type) for field in fields])
    _check_can_be_written(kept_schema)
    return OutputTable(kept, kept_schema, generated, spec.output.explode)


def _kept_names(source: Source, spec: JobSpec) -> dict[str, str]:
    keep = spec.input.keep_columns
    names = list(source.schema.names if keep == "*" else keep)
    source.require(names, "input.keep_columns")
    if spec.input.id_column is not None:
        source.require([spec.input.id_column], "input.id_column")
        source.require_alike([spec.input.id_column])
        names.append(spec.input.id_column)
    source.require_alike(names, only_kept=True)
    if spec.output.format == "openai-batch":
        names += RESPONSE_COLUMNS
    rename = spec.output.rename
    unknown = [name for name in rename if name not in names]
    if unknown:
        raise UsageError(
            f"output.rename: no column {format_value(unknown[0])} is kept"
            + near_name(unknown[0], names),
            hint=f"leave it out; the kept columns are: {listed(names)}",
        )
    return {name: rename.get(name, name) for name in dict.fromkeys(names)}


def _check_can_be_written(schema: pa.Schema) -> None:
    """Check that Parquet supports the types of all kept columns; Arrow IPC has more types."""
    for field in schema:
        try:
            pq.write_table(pa.schema([field]).empty_table(), pa.BufferOutputStream())
        except pa.ArrowNotImplementedError:
            kind = printable(str(field.type), 120)
            raise DataError(
                f"input column {format_value(field.name)} is {kind}, which Parquet "
                "does not support",
                hint="leave it out of input.keep_columns, or cast it to another type",
            ) from None


def _check_collisions(kept: Mapping[str, str], generated: set[str]) -> None:
    taken = dict.fromkeys(generated, "an output column")
    for name, new_name in kept.items():
        if new_name in taken:
            raise UsageError(
                f"input column {format_value(name)} cannot be called "
                f"{format_value(new_name)} in the output, because that is the name "
                f"of {taken[new_name]}",
                hint=f"rename it with output.rename: {{{name}: input_{name}}}, or leave it out of "
                "input.keep_columns",
            )
        taken[new_name] = f"input column {format_value(name)}"
