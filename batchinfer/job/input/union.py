"""Files of one dataset whose columns differ, read as one table (``input.schema``).

Only types that hold every value of another unchanged take it in; so a text, and a number as Python
writes it, are the same in whichever file they stand. What columns have in common beyond that is
kept apart: it is an error where such a column is asked for, and none where nobody reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal, Protocol

import pyarrow as pa

from batchinfer.console.format import first_line, format_value, printable
from batchinfer.errors import DataError
from batchinfer.job.input.arrow_text import python_rows
from batchinfer.job.input.format import MEND, InputFile, ReadRequest, Row, Rows

SchemaMode = Literal["strict", "union"]
Widen = Callable[[Collection[pa.DataType]], pa.DataType | None]
"""The type that holds the values of all; None: there is none."""

_FAMILIES = (
    (pa.large_string(), {pa.string(), pa.large_string(), pa.string_view()}),
    (pa.large_binary(), {pa.binary(), pa.large_binary(), pa.binary_view()}),
)
_EXACT_IN_FLOAT64 = 32
"""Bits of whole numbers that a float64 holds unchanged."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A column that is not the same in two files."""

    column: str
    first: str
    """Path of a file, and of the other below."""
    first_type: pa.DataType | None
    """None: no such column."""
    other: str
    other_type: pa.DataType | None
    can_be_united: bool
    """Whether ``input.schema: union`` makes one column of the two."""

    def error(self, *, only_kept: bool) -> DataError:
        """Why the column cannot be used.

        Args:
            only_kept: it is in ``input.keep_columns`` alone.
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
            f"  {printable(self.first)}: {_shown(self.first_type)}\n"
            f"  {printable(self.other)}: {_shown(self.other_type)}",
            hint=", ".join(ways),
        )


def _shown(kind: pa.DataType | None) -> str:
    return "no such column" if kind is None else printable(str(kind), 200)


def same(kinds: Collection[pa.DataType]) -> pa.DataType | None:
    """The type of all, if they are the same."""
    first, *others = kinds
    return first if all(kind == first for kind in others) else None


def widened(kinds: Collection[pa.DataType]) -> pa.DataType | None:
    """The type that holds all values of some types unchanged; None if there is none.

    Nulls go with all, whole numbers with wider ones and, up to 32 bits, with float64, floats with
    wider ones; texts with texts and bytes with bytes, however they are stored; lists and structs by
    what is in them, fields that one does not have being null there.
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
    if all(map(_is_number, plain)):
        return _widened_number(plain)
    if all(map(pa.types.is_struct, plain)):
        return _widened_struct(plain)
    if all(map(_is_list, plain)):
        value = widened([kind.value_type for kind in plain])
        make = pa.large_list if any(map(pa.types.is_large_list, plain)) else pa.list_
        return None if value is None else make(value)
    return None


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _is_list(kind: pa.DataType) -> bool:
    return isinstance(kind, pa.ListType | pa.LargeListType | pa.FixedSizeListType)


def _widened_number(kinds: Sequence[pa.DataType]) -> pa.DataType | None:
    """The narrowest number type for the values of different ones."""
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


class TypedFormat(Protocol):
    """A kind of file that says what columns it has, and of which types.

    Methods are as those of ``Format``; what is read has the types that the file says.
    """

    def inspect(self, path: str) -> tuple[InputFile, pa.Schema]: ...

    def scan(self, request: ReadRequest) -> Iterator[tuple[int, pa.RecordBatch]]: ...

    def stored_bytes(self, file: InputFile, columns: Collection[str]) -> int: ...


class UnitedFormat:
    """Files of a typed format read as if all had the same columns.

    Args:
        inner: reads the files.
        mode: ``union``: a column that a file does not have is null there.
        widen: the type for values of files' types.
    """

    holds_requests = False

    def __init__(self, inner: TypedFormat, mode: SchemaMode, widen: Widen) -> None:
        self._inner = inner
        self._mode = mode
        self._widen = widen
        self._types: dict[str, Mapping[str, pa.DataType]] = {}
        """Columns of each file, by its path."""
        self.differences: dict[str, Difference] = {}
        """Columns that cannot be read as one, by name."""

    def inspect(self, path: str) -> tuple[InputFile, pa.Schema]:
        return self._inner.inspect(path)

    def common_schema(self, files: Sequence[InputFile], schemas: Sequence[pa.Schema]) -> pa.Schema:
        """The columns of all files, in the order they are first met.

        Those that cannot be read as one are among them, of the first type met, and in
        ``differences``.
        """
        before: pa.Schema | None = None
        fields: dict[str, pa.Field] = {}
        for file, schema in zip(files, schemas, strict=True):
            if before is None or not schema.equals(before):
                _check_names(file.path, schema)
                types, before = {field.name: field.type for field in schema}, schema
                fields = {field.name: field for field in schema} | fields
            self._types[file.path] = types
        paths = [file.path for file in files]
        return pa.schema([self._united(fields[name], paths) for name in _in_order(schemas)])

    def _united(self, field: pa.Field, paths: Sequence[str]) -> pa.Field:
        """A column of all files."""
        first_with: dict[pa.DataType | None, str] = {}
        for path in paths:
            first_with.setdefault(self._types[path].get(field.name), path)
        kinds = [kind for kind in first_with if kind is not None]
        kind = self._widen(kinds)
        if kind is not None and (None not in first_with or self._mode == "union"):
            return field.with_type(kind)
        pairs = combinations(first_with if kind is not None else kinds, 2)
        one, other = next(pair for pair in pairs if None in pair or self._widen(pair) is None)
        can_be_united = self._mode == "strict" and (kind or widened(kinds)) is not None
        self.differences[field.name] = Difference(
            field.name, first_with[one], one, first_with[other], other, can_be_united
        )
        return field.with_type(kinds[0])

    def scan(self, request: ReadRequest) -> Iterator[tuple[int, pa.RecordBatch]]:
        types = self._types[request.file.path]
        schema = pa.schema([request.schema.field(name) for name in request.columns])
        if all(types.get(field.name) == field.type for field in schema):
            yield from self._inner.scan(request)
            return
        # A column that differs is only read to see how many rows there are.
        own = [n for n in request.columns if n in types and n not in self.differences]
        for first, batch in self._inner.scan(replace(request, columns=own or list(types)[:1])):
            united = [_united(batch, own, schema, request.file.path)]
            del batch  # a huge one goes with its last piece
            yield first, united.pop()

    def rows(self, request: ReadRequest) -> Iterator[Rows]:
        for first, batch in self.scan(request):
            rows: list[Row] = list(python_rows(batch))
            del batch  # before the next one is read: it may be huge
            yield first, rows

    def stored_bytes(self, file: InputFile, columns: Collection[str]) -> int:
        return self._inner.stored_bytes(file, columns)


def _in_order(schemas: Sequence[pa.Schema]) -> list[str]:
    names: dict[str, None] = {}
    before: pa.Schema | None = None
    for schema in schemas:
        if before is None or not schema.equals(before):
            names.update(dict.fromkeys(schema.names))
            before = schema
    return list(names)


def _united(
    batch: pa.RecordBatch, own: Sequence[str], schema: pa.Schema, path: str
) -> pa.RecordBatch:
    """A file's batch with the columns of ``schema``: ``own`` cast, the others null."""
    arrays = [
        _cast(batch.column(field.name), field.type, path, field.name)
        if field.name in own
        else pa.nulls(len(batch), field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, names=schema.names)


def _cast(column: pa.Array, kind: pa.DataType, path: str, name: str) -> pa.Array:
    if column.type == kind:
        return column
    try:
        return column.cast(kind)
    except pa.ArrowException as error:  # what is damaged, or of a type that no cast is written for
        raise DataError(
            f"{path}: column {format_value(name)} cannot be read as {_shown(kind)}: "
            f"{first_line(error)}",
            hint=MEND,
        ) from error


def _check_names(path: str, schema: pa.Schema) -> None:
    """Check that no two columns have one name.

    Raises:
        DataError: naming file and column.
    """
    for name in schema.names:
        if schema.names.count(name) > 1:
            raise DataError(
                f"{path} has more than one column named {format_value(name)}; rename one"
            )
