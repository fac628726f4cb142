"""``input.filter``: parses an SQL condition on a row's columns, and selects the rows that meet it.

Polars evaluates the condition batch by batch. The condition may call only a fixed list of functions
that work on one row, because an aggregate like ``avg`` would have a different value in every batch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchinfer.console.format import did_you_mean, first_line, format_value, printable
from batchinfer.errors import DataError, JobError, UsageError
from batchinfer.job.row_ranges import NO_ROWS, RowIds

if TYPE_CHECKING:
    import polars as pl

_KEY = "input.filter"
_MOST_CHARACTERS = 100_000
_MOST_STEPS = 400
"""Maximum number of words and operators in a condition, not counting values and lists. The time
that Polars needs grows with the cube of this number.
"""
_MOST_DEPTH = 50
_FUNCTIONS = """
abs array_contains array_length bit_length cast ceil ceiling char_length character_length coalesce
concat concat_ws date date_part ends_with exp extract floor greatest if ifnull initcap least left
length ln log10 log2 lower ltrim mod nullif octet_length position pow power regexp_like replace
reverse right round rtrim sign sqrt starts_with strpos substr substring timestamp trim try_cast
upper"""
_BEFORE_BRACKETS = """
and or not in like ilike rlike regexp between is case when then else from for
decimal numeric varchar char"""
_NEVER = "select with over current_date current_time current_timestamp"
_QUOTED = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"")
_CALL = re.compile(r"(\"|\w+)\s*\(")
_STEP = re.compile(r"[^\W\d]\w*|[^\s\w,'.()]")
_ODD = re.compile(r"\w'|--|/\*|[`$;]")

_CAST = "cast one side, as in cast(n as varchar) = '5' or cast(text as double) > 5"
_QUOTE = "put strings in single quotes, as in lang = 'en'"
_TRY_CAST = "use try_cast, which gives null for values that cannot be converted"
_NULLIF = "divide by nullif(n, 0), which gives null for 0"
_COMPARE = "compare it with a value, as in score >= 0.5"
_DATES = "write date '2026-11-20' or timestamp '2026-11-20 12:30:00'"
_HINTS: tuple[tuple[str, str | None], ...] = (
    ("cannot compare 'date/datetime/time'|'is_in' cannot check for Date", _DATES),
    ("cannot compare|'is_in' cannot|expected `.*`, got|arithmetic on dtypes", _CAST),
    ("casting from .* to Boolean", _COMPARE),
    ("conversion from", _TRY_CAST),
    ("division by zero", _NULLIF),
    (
        "unable to parse|Unterminated",
        "the condition ends too early, or a bracket or a quote is not closed",
    ),
    ("unexpected token", _QUOTE),
    ("expected an expression", "write only the part that would follow WHERE"),
)
"""Patterns of Polars error messages, each with advice for the user."""


class Condition:
    """An SQL condition on the columns of ``schema``; raises UsageError if ``text`` is not one."""

    def __init__(self, text: str, schema: pa.Schema) -> None:
        self._text = text
        self._expression = parsed(text)
        names = list(dict.fromkeys(self._expression.meta.root_names()))
        for name in names:
            if name not in schema.names:
                raise UsageError(
                    f"{_KEY}: the data has no column {format_value(name)}"
                    f"{did_you_mean(name, schema.names)}",
                    hint=_QUOTE,
                )
        self.columns = names or schema.names[:1]
        """Columns to read. A condition without columns reads one column, for the number of rows."""
        fields = [schema.field(name) for name in self.columns]
        kind = self._evaluated(pa.schema(fields).empty_table()).dtype
        if str(kind) != "Boolean":
            shown = printable(str(kind), 60)
            raise UsageError(
                f"{_KEY}: {format_value(text)} is of type {shown}, not a condition", hint=_COMPARE
            )

    def holds(self, batch: pa.RecordBatch) -> npt.NDArray[np.bool_]:
        """Evaluate the condition on each row of a batch with ``columns``; null counts as false.

        Returns:
            bool [rows].

        Raises:
            DataError: a value cannot be cast or divided as the condition says.
            UsageError: the condition cannot be evaluated.
        """
        values = self._evaluated(pa.Table.from_batches([batch])).fill_null(False).to_numpy()
        # A condition without columns gives a single value.
        return np.broadcast_to(values, len(batch))

    def _evaluated(self, table: pa.Table) -> pl.Series:
        import polars as pl

        try:
            frame = pl.from_arrow(table)
            assert isinstance(frame, pl.DataFrame)
            return frame.select(self._expression).to_series()
        except (*_errors(), pa.ArrowException, TypeError, ValueError, NotImplementedError) as error:
            raise _refused(self._text, error, table) from None


def parsed(text: str) -> pl.Expr:
    """Parse ``text`` without knowing the columns. Raise UsageError if the condition is invalid."""
    _check_functions(text)
    import polars as pl

    try:
        return pl.sql_expr(text)
    except _errors() as error:
        raise _refused(text, error) from None


def _errors() -> tuple[type[BaseException], ...]:
    from polars.exceptions import PanicException, PolarsError

    return PolarsError, PanicException


def _refused(text: str, error: BaseException, table: pa.Table | None = None) -> JobError:
    reason = first_line(error)
    if table is not None and reason.isidentifier():  # Polars' message is only the field's name
        reason = f'no column has a field "{reason}"'
    hint = next((hint for pattern, hint in _HINTS if re.search(pattern, reason)), None)
    if hint == _CAST and table is not None:
        types = ", ".join(f"{field.name} is {field.type}" for field in list(table.schema)[:4])
        reason += printable(f" ({types})", 120)
    is_bad_value = hint in (_TRY_CAST, _NULLIF) and table is not None and len(table) > 0
    kind = DataError if is_bad_value else UsageError
    return kind(f"{_KEY}: {format_value(text)} cannot be evaluated: {reason}", hint=hint)


def _check_functions(text: str) -> None:
    """Check that a condition calls only allowed functions, and is not too long or too nested.

    Comments and unusual quotes are refused too, because they could hide a call from this check.
    """
    bare = _QUOTED.sub(lambda quoted: '"' if quoted[0][0] == '"' else " ' ", text)
    odd = _ODD.search(_QUOTED.sub(lambda quoted: quoted[0][0], text))
    if odd or len(text) > _MOST_CHARACTERS:
        what = (
            f"a condition cannot contain {format_value(odd[0])}"
            if odd
            else f"a condition can have at most {_MOST_CHARACTERS} characters"
        )
        raise UsageError(
            f"{_KEY}: {what}", hint="write one condition, with strings in single quotes"
        )
    if len(_STEP.findall(bare)) > _MOST_STEPS:
        raise UsageError(
            f"{_KEY}: the condition has more than {_MOST_STEPS} words and operators; shorten it"
        )
    depths = accumulate(1 if c == "(" else -1 for c in bare if c in "()")
    if max(depths, default=0) > _MOST_DEPTH:
        raise UsageError(f"{_KEY}: the condition has more than {_MOST_DEPTH} nested brackets")
    for word in re.findall(r"\w+", bare):
        if word.lower() in _NEVER.split():
            raise UsageError(
                f"{_KEY}: {word.lower()} is not allowed, because a condition sees only one row",
                hint=f'write a column of this name as "{word}"',
            )
    known = {*_FUNCTIONS.split(), *_BEFORE_BRACKETS.split()}
    for name in _CALL.findall(bare):
        if name.lower() not in known:
            near = did_you_mean(name.lower(), _FUNCTIONS.split())
            raise UsageError(f"{_KEY}: {printable(name, 60)}() is not an allowed function{near}")


def select_rows(
    condition: Condition, pieces: Iterable[tuple[int, pa.RecordBatch]], limit: int | None
) -> RowIds:
    """Return the ids of the rows that meet a condition; stop after ``limit`` such rows.

    Args:
        pieces: batches of the condition's columns over the whole dataset, each with the id of its
            first row.
        limit: maximum number of rows to select; None for all.

    Raises:
        DataError: a value cannot be cast or divided as the condition says.
        UsageError: the condition cannot be evaluated.
    """
    found, num_rows = [NO_ROWS], 0
    for first_row, batch in pieces:
        found.append(first_row + np.flatnonzero(condition.holds(batch)))
        num_rows += len(found[-1])
        if limit is not None and num_rows >= limit:
            break
    return np.concatenate(found)[:limit]
