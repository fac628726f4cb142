"""Unifies the schemas of files whose columns differ (``input.schema``).

Two types are merged only if one type holds all their values unchanged, so that templates show each
value as it is in its file. A column that cannot be merged is an error only if the job uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import pyarrow as pa

from batchinfer.console.format import format_value, printable
from batchinfer.errors import DataError

SchemaMode = Literal["strict", "union"]
Widen = Callable[[Collection[pa.DataType]], pa.DataType | None]
"""A function that returns a type that holds the values of all given types, or None."""

_FAMILIES = (
    (pa.large_string(), {pa.string(), pa.large_string(), pa.string_view()}),
    (pa.large_binary(), {pa.binary(), pa.large_binary(), pa.binary_view()}),
)
_EXACT_IN_FLOAT64 = 32
"""Width in bits of the widest integer type whose values float64 represents exactly."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A column that differs between two files."""

    column: str
    first: str
    """Path of the first file."""
    first_type: pa.DataType | None
    """Type in the first file; None if the column is missing there."""
    other: str
    """Path of the second file."""
    other_type: pa.DataType | None
    can_be_united: bool
    """True if ``input.schema: union`` can merge the column."""

    def error(self, *, only_kept: bool) -> DataError:
        """Make the error for a job that uses the column.

        Args:
            only_kept: True if the job uses the column only in ``input.keep_columns``.
        """
        ways = ["write the files again with the same columns, or run them as separate jobs"]
        if self.can_be_united:
            filled = None in (self.first_type, self.other_type)
            what = "null where it is missing" if filled else "one type for all files"
            ways = [f"set input.schema: union ({what})"]
        if only_kept:
            ways.append("or leave it out of input.keep_columns: the prompt does not need it")
        return DataError(
            f"input files differ in column {format_value(self.column)}:\n"
            f"  {printable(self.first)}: {shown_type(self.first_type)}\n"
            f"  {printable(self.other)}: {shown_type(self.other_type)}",
            hint=", ".join(ways),
        )


def shown_type(kind: pa.DataType | None) -> str:
    """Format a type for messages; None means that the column is missing."""
    return "no such column" if kind is None else printable(str(kind), 200)


def united(
    schemas: Mapping[str, pa.Schema], mode: SchemaMode, widen: Widen
) -> tuple[pa.Schema, dict[str, Difference]]:
    """Merge schemas. Columns are in the order in which they first appear.

    The second result holds the columns that cannot be merged; in the schema, each has
    the type from the first file that contains it.

    Args:
        schemas: schema of each file, keyed by path. For speed, pass the same object for equal
            consecutive schemas.
        mode: with ``union``, a column may be missing in some files.

    Raises:
        DataError: a file has two columns with the same name.
    """
    runs: list[tuple[str, dict[str, pa.Field]]] = []
    before = None
    for path, schema in schemas.items():
        if schema is not before:
            _check_names(path, schema)
            runs.append((path, {field.name: field for field in schema}))
            before = schema
    names = dict.fromkeys(name for _, fields in runs for name in fields)
    columns: list[pa.Field] = []
    differences: dict[str, Difference] = {}
    for name in names:
        column, difference = _united(name, runs, mode, widen)
        columns.append(column)
        if difference is not None:
            differences[name] = difference
    return pa.schema(columns), differences


def _united(
    name: str, runs: Sequence[tuple[str, Mapping[str, pa.Field]]], mode: SchemaMode, widen: Widen
) -> tuple[pa.Field, Difference | None]:
    first_with: dict[pa.DataType | None, str] = {}
    for path, fields in runs:
        first_with.setdefault(fields[name].type if name in fields else None, path)
    field = next(fields[name] for _, fields in runs if name in fields)
    kinds = [kind for kind in first_with if kind is not None]
    kind = widen(kinds)
    if kind is not None and (None not in first_with or mode == "union"):
        return field.with_type(kind), None
    pairs = combinations(first_with if kind is not None else kinds, 2)
    one, other = next(pair for pair in pairs if None in pair or widen(pair) is None)
    can_be_united = mode == "strict" and (kind or widened(kinds)) is not None
    return field, Difference(name, first_with[one], one, first_with[other], other, can_be_united)


def _check_names(path: str, schema: pa.Schema) -> None:
    names = schema.names
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{path} has more than one column named {format_value(twice)}; rename one")


def same(kinds: Collection[pa.DataType]) -> pa.DataType | None:
    """Return the common type if all types are equal, else None."""
    first, *rest = kinds
    return first if all(kind == first for kind in rest) else None


def widened(kinds: Collection[pa.DataType]) -> pa.DataType | None:
    """Find the type that holds all values of ``kinds`` unchanged; None if there is none.

    Null merges with every type, integers with wider integers, integers of up to 32 bits with
    float64, floats with wider floats, and string or binary types with their large and view
    variants. Lists merge by their items and structs by their fields; missing fields are null.
    """
    known = [kind for kind in dict.fromkeys(kinds) if not pa.types.is_null(kind)]
    if len(known) < 2:
        return known[0] if known else pa.null()
    plain = list(dict.fromkeys(k.value_type if pa.types.is_dictionary(k) else k for k in known))
    if len(plain) == 1:
        return plain[0]
    for large, family in _FAMILIES:
        if all(kind in family for kind in plain):
            return large
    if all(pa.types.is_integer(kind) or pa.types.is_floating(kind) for kind in plain):
        return _widened_number(plain)
    if all(map(pa.types.is_struct, plain)):
        return _widened_struct(plain)
    if all(isinstance(k, pa.ListType | pa.LargeListType | pa.FixedSizeListType) for k in plain):
        value = widened([kind.value_type for kind in plain])
        make = pa.large_list if any(map(pa.types.is_large_list, plain)) else pa.list_
        return None if value is None else make(value)
    return None


def _widened_number(kinds: Sequence[pa.DataType]) -> pa.DataType | None:
    whole = [kind for kind in kinds if pa.types.is_integer(kind)]
    if len(whole) < len(kinds):
        exact = all(kind.bit_width <= _EXACT_IN_FLOAT64 for kind in whole)
        widest = max(set(kinds) - set(whole), key=lambda kind: kind.bit_width)
        return None if not exact else pa.float64() if whole else widest
    unsigned = [kind for kind in whole if pa.types.is_unsigned_integer(kind)]
    bits = [kind.bit_width * (2 if kind in unsigned else 1) for kind in whole]
    if len(unsigned) == len(whole):
        return max(whole, key=lambda kind: kind.bit_width)
    return {16: pa.int16(), 32: pa.int32(), 64: pa.int64()}.get(max(bits))


def _widened_struct(kinds: Sequence[pa.StructType]) -> pa.DataType | None:
    fields: dict[str, list[pa.DataType]] = {}
    for kind in kinds:
        if len({field.name for field in kind}) < len(kind):
            return None
        for field in kind:
            fields.setdefault(field.name, []).append(field.type)
    wider = {name: widened(found) for name, found in fields.items()}
    return None if None in wider.values() else pa.struct(list(wider.items()))
