"""The prompts of ``batchinfer bench --dataset``."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.errors import DataError

_COLUMNS = ("prompt_token_ids", "token_ids", "prompt", "text")


def read_dataset(path: Path, limit: int) -> list[str | list[int]]:
    """The first ``limit`` prompts of a Parquet file: texts, or lists of token ids.

    Raises:
        DataError: it cannot be read, or has no such prompts; naming the row where it is one.
    """
    try:
        names = pq.read_schema(path).names
        column = next((name for name in _COLUMNS if name in names), None)
        if column is None:
            raise DataError(
                f"{path} has no column of prompts: it has {', '.join(names)}",
                hint=f"name one of them {' or '.join(_COLUMNS)}",
            )
        values = pq.read_table(path, columns=[column])[column].slice(0, limit)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    if not len(values):
        raise DataError(f"{path} has no rows")
    kind, types = values.type, pa.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        values = values.cast(kind).cast(pa.large_binary())  # pyarrow takes any bytes for text
    elif not _is_list_of_ids(kind):
        raise DataError(f"{path}: column {column} is {kind}; it must be string or list<int32>")
    return [_prompt(path, column, row, value) for row, value in enumerate(values.to_pylist())]


def _is_list_of_ids(kind: pa.DataType) -> bool:
    types = pa.types
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(is_list and types.is_integer(kind.value_type))


def _prompt(
    path: Path, column: str, row: int, value: bytes | list[int | None] | None
) -> str | list[int]:
    """A cell as a prompt.

    Raises:
        DataError: naming the row whose cell is none.
    """
    if value is None:
        problem = "is null"
    elif isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            problem = "is not valid UTF-8"
    elif None in value:
        problem = "holds a null"
    else:
        return value  # type: ignore[return-value]  # no None in it
    raise DataError(f"{path}, row {row}: {column} {problem}")
