"""The output table: which columns, of which types, and how finished rows fill them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from batchinfer.console.format import format_value, listed
from batchinfer.errors import UsageError
from batchinfer.job.input.arrow_text import with_valid_text
from batchinfer.job.input.dataset import Source
from batchinfer.job.output.explode import exploded
from batchinfer.job.spec.spec import JobSpec

_TOP = pa.struct([("token_id", pa.int32()), ("logprob", pa.float32())])
_LOGPROB = pa.struct(
    [
        ("token_id", pa.int32()),
        ("logprob", pa.float32()),
        ("rank", pa.int32()),
        ("top", pa.list_(_TOP)),
    ]
)
_OUTPUT = [
    ("index", pa.int32()),
    ("text", pa.string()),
    ("finish_reason", pa.string()),
    ("stop_reason", pa.string()),
    ("num_tokens", pa.int32()),
    ("cumulative_logprob", pa.float64()),
]
_OPTIONAL_OUTPUT = {"token_ids": pa.list_(pa.int32()), "logprobs": pa.list_(_LOGPROB)}
_SCORE = [
    ("index", pa.int32()),
    ("sum_logprob", pa.float64()),
    ("num_tokens", pa.int32()),
    ("greedy_match", pa.bool_()),
]
_OPTIONAL_SCORE = {"token_ids": pa.list_(pa.int32()), "logprobs": pa.list_(pa.float32())}
RESPONSE_COLUMNS = ("custom_id", "url")
"""Input columns that OpenAI's output files need."""
ERROR = pa.struct([("code", pa.string()), ("message", pa.string())])


@dataclass(frozen=True)
class OutputTable:
    """Columns of ``data/part-*.parquet``: the kept input columns, then the generated ones."""

    kept: Mapping[str, str]
    """Input column: its name in the output."""
    kept_schema: pa.Schema
    generated_schema: pa.Schema
    explodes: bool = False
    """Whether there is a row for each sample."""

    def columns(self, kept: Sequence[pa.RecordBatch], generated: pa.Table) -> pa.Table:
        """The table of finished rows: ``generated`` and the ``kept`` batches are of the same rows,
        in the same order."""
        arrays = [
            pa.chunked_array([with_valid_text(batch.column(name)) for batch in kept], kind)
            for name, kind in zip(self.kept, self.kept_schema.types, strict=True)
        ]
        schema = pa.schema([*self.kept_schema, *self.generated_schema])
        table = pa.table([*arrays, *generated.columns], schema=schema)
        return exploded(table) if self.explodes else table


def output_table(source: Source, spec: JobSpec) -> OutputTable:
    """The output table of a job.

    Raises:
        DataError: a column to keep is not in the input.
        UsageError: two output columns would have one name, or ``output.rename`` names a column
            that is not kept.
    """
    kept = _kept_names(source, spec)
    fields_of = _score_fields if spec.task == "score" else _generated_fields
    generated = pa.schema(list(fields_of(spec.output.written)))
    _check_collisions(kept, set(generated.names))
    fields = [source.schema.field(name) for name in kept]
    kept_schema = pa.schema([pa.field(kept[field.name], field.type) for field in fields])
    return OutputTable(kept, kept_schema, generated, spec.output.explode)


def _generated_fields(include: Sequence[str]) -> Iterator[tuple[str, pa.DataType]]:
    output = [*_OUTPUT, *((k, v) for k, v in _OPTIONAL_OUTPUT.items() if k in include)]
    yield "row_id", pa.int64()
    if "prompt" in include:
        yield "prompt", pa.string()
    yield "generated_text", pa.string()
    yield "outputs", pa.list_(pa.struct(output))
    if "prompt_logprobs" in include:
        yield "prompt_logprobs", pa.list_(_LOGPROB)
    yield "num_prompt_tokens", pa.int32()
    yield "num_output_tokens", pa.int32()
    yield "truncated", pa.bool_()
    yield "status", pa.string()
    yield "error", ERROR


def _score_fields(include: Sequence[str]) -> Iterator[tuple[str, pa.DataType]]:
    yield "row_id", pa.int64()
    if "prompt" in include:
        yield "prompt", pa.string()
    optional = ((name, kind) for name, kind in _OPTIONAL_SCORE.items() if name in include)
    yield "score", pa.list_(pa.struct([*_SCORE, *optional]))
    yield "perplexity", pa.float64()
    yield "num_prompt_tokens", pa.int32()
    yield "truncated", pa.bool_()
    yield "status", pa.string()
    yield "error", ERROR


def _kept_names(source: Source, spec: JobSpec) -> dict[str, str]:
    keep = spec.input.keep_columns
    names = list(source.schema.names if keep == "*" else keep)
    source.require(names, "input.keep_columns")
    if spec.input.id_column is not None:
        source.require([spec.input.id_column], "input.id_column")
        names.append(spec.input.id_column)
    if spec.output.format == "openai-batch":
        names += RESPONSE_COLUMNS
    rename = spec.output.rename
    unknown = [name for name in rename if name not in names]
    if unknown:
        raise UsageError(
            f"output.rename: no column {format_value(unknown[0])} is kept",
            hint=f"leave it out; kept are: {listed(names)}",
        )
    return {name: rename.get(name, name) for name in dict.fromkeys(names)}


def _check_collisions(kept: Mapping[str, str], generated: set[str]) -> None:
    taken = dict.fromkeys(generated, "an output column")
    for name, new_name in kept.items():
        if new_name in taken:
            raise UsageError(
                f"input column {format_value(name)} would be {format_value(new_name)} in the "
                f"output, which is the name of {taken[new_name]}",
                hint=f"rename it with output.rename: {{{name}: input_{name}}}, or leave it out of "
                "input.keep_columns",
            )
        taken[new_name] = f"input column {format_value(name)} there"
