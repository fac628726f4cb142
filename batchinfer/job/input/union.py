"""Files of one dataset whose columns differ, read as one table (``input.schema``).

Types unite only if one holds every value of the other unchanged, so that a text, or a number as
Python writes it, is the same in every file. A column that cannot be united is an error only if
somebody asks for it.
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
"""The type that holds the values of all types, or None."""

_FAMILIES = (
    (pa.large_string(), {pa.string(), pa.large_string(), pa.string_view()}),
    (pa.large_binary(), {pa.binary(), pa.large_binary(), pa.binary_view()}),
)
_EXACT_IN_FLOAT64 = 32
"""Widest integers, in bits, that a float64 holds unchanged."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A column that is not the same in two files."""

    column: str
    first: str
    """Path of one of the files."""
    first_type: pa.DataType | None
    """None: no such column."""
    other: str
    other_type: pa.DataType | None
    can_be_united: bool
    """Whether ``input.schema: union`` makes one column of the two."""

    def error(self, *, only_kept: bool) -> DataError:
        """Why the column cannot be used.

        Args:
            only_kept: only ``input.keep_columns`` names it.
        """
        ways = ["write them again with the same columns, or run them as jobs of their own"]
        if self.can_be_united:
            filled = None in (self.first_type, self.other_type)
            what = "where it is missing it is then null" if filled else "it is then of one type"
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
    """A type as messages show it; None is a column that is missing."""
    return "no such column" if kind is None else printable(str(kind), 200)


def united(
    schemas: Mapping[str, pa.Schema], mode: SchemaMode, widen: Widen
) -> tuple[pa.Schema, dict[str, Difference]]:
    """The columns of all files, in the order they are first met.

    Columns that cannot be read as one are among them, of the first type met, and in the second
    result.

    Args:
        schemas: by path; equal ones in sequence are cheap if they are the same object.
        mode: ``union``: a column that a file does not have is null there.

    Raises:
        DataError: a file has two columns of one name.
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
    """The type of all, if they are the same."""
    first, *others = kinds
    return first if all(kind == first for kind in others) else None


def widened(kinds: Collection[pa.DataType]) -> pa.DataType | None:
    """The type that holds all values of some types unchanged; None if there is none.

    Null unites with every type, an integer with wider ones and, up to 32 bits, with float64, a
    float with wider ones, texts with texts and bytes with bytes, however they are stored. Lists and
    structs unite by their content; fields that a struct does not have are null.
    """
    given = [kind for kind in dict.fromkeys(kinds) if not pa.types.is_null(kind)]
    if len(given) < 2:
        return given[0] if given else pa.null()
    plain = list(dict.fromkeys(k.value_type if pa.types.is_dictionary(k) else k for k in given))
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
