"""Checks of the columns that requests are made of: are they there, and of types that can be used?

Found from the schema alone, so that no model is loaded for data that cannot be run.
"""

from __future__ import annotations

import pyarrow as pa

from batchinfer.config import (
    SAMPLING_ALIASES,
    PromptConfig,
    SamplingParams,
    field_names,
)
from batchinfer.console.format import did_you_mean, printable
from batchinfer.errors import DataError, UsageError
from batchinfer.job.input.arrow_text import is_conversation, is_text
from batchinfer.job.input.dataset import Source
from batchinfer.job.input.format import SAMPLING_COLUMN
from batchinfer.text.prompt_sources import (
    ColumnSource,
    checked_template,
    make_source,
    require_column,
)


def check_prompt_columns(config: PromptConfig, source: Source) -> None:
    """Check what can be checked of ``config`` before there is a tokenizer.

    Raises:
        UsageError: it reads a column that is not there, names no source where none is usual, or
            needs the chat template that it switches off.
        DataError: the column it names is not there, or of a type that no prompt is made of, or
            differs from file to file; or the column ``sampling_params`` is of a type that holds no
            parameters.
    """
    if source.format.holds_requests:
        return  # prompts are in them
    names = source.schema.names
    if config.token_ids_column is not None:
        require_column(config.token_ids_column, "prompt.token_ids_column", names)
        source.require_alike([config.token_ids_column])
        _check_token_ids(source, config.token_ids_column)
    else:
        prompt = make_source(config, names)
        source.require_alike(sorted(prompt.columns))
        if isinstance(prompt, ColumnSource):
            _check_prompt(source, prompt.name, config)
    if config.system is not None:
        system = checked_template(config.system, "prompt.system", frozenset(names))
        source.require_alike(sorted(system.columns(frozenset(names))))
    if config.tools_column is not None:
        _check_tools(source, config.tools_column)
    if config.adapter_column is not None:
        require_column(config.adapter_column, "prompt.adapter_column", names)
        source.require_alike([config.adapter_column])
        kind = _type_of(source, config.adapter_column)
        if not _may_be_text(kind):
            raise _wrong_type(source, config.adapter_column, "prompt.adapter_column", "string")
    if SAMPLING_COLUMN in names:
        source.require_alike([SAMPLING_COLUMN])
        _check_sampling_params(source)


def check_completions_column(name: str, source: Source) -> None:
    """Check the column that ``score`` names.

    Raises:
        DataError: it is not there, or of a type that holds no completions.
    """
    key = "score.completions_column"
    require_column(name, key, source.schema.names)
    source.require_alike([name])
    kind = _type_of_lists(source, name, key)
    item = _item_of(kind)
    is_ids = item is not None and _is_list(item) and pa.types.is_integer(item.value_type)
    if not (_may_be_text(kind) or is_ids or (item is not None and _may_be_text(item))):
        raise _wrong_type(
            source, name, key, "string, list<string>, or list<list<int>> of token ids"
        )


def check_text_column(name: str, key: str, source: Source) -> None:
    """Check a column of texts that ``key`` names.

    Raises:
        DataError: it is not there, or of another type.
    """
    require_column(name, key, source.schema.names)
    source.require_alike([name])
    if not _may_be_text(_type_of(source, name)):
        raise _wrong_type(source, name, key, "string")


def _check_tools(source: Source, name: str) -> None:
    require_column(name, "prompt.tools_column", source.schema.names)
    source.require_alike([name])
    kind = _type_of_lists(source, name, "prompt.tools_column")
    item = _item_of(kind)
    if not (_may_be_text(kind) or (item is not None and pa.types.is_struct(item))):
        raise _wrong_type(source, name, "prompt.tools_column", "string (JSON) or list<struct>")


def _may_be_text(kind: pa.DataType) -> bool:
    return is_text(kind) or pa.types.is_null(kind)


def _item_of(kind: pa.DataType) -> pa.DataType | None:
    if not _is_list(kind):
        return None
    item = kind.value_type
    return item.value_type if pa.types.is_dictionary(item) else item


def _check_prompt(source: Source, name: str, config: PromptConfig) -> None:
    kind = _type_of_lists(source, name, "prompt.column")
    talks = is_conversation(kind)
    if not (talks or _may_be_text(kind)):
        raise _wrong_type(source, name, "prompt.column", "string or list<struct<role, content>>")
    if talks and config.chat_template == "none":
        raise UsageError(
            f"prompt.chat_template is none, but column {printable(name)} holds conversations",
            hint="set it to auto or to a file, or name a column of strings in prompt.column",
        )


def _check_token_ids(source: Source, name: str) -> None:
    kind = _type_of_lists(source, name, "prompt.token_ids_column")
    item = kind.value_type if _is_list(kind) else None
    if item is None or not (pa.types.is_integer(item) or pa.types.is_null(item)):
        raise _wrong_type(source, name, "prompt.token_ids_column", "list of integers")


def _type_of_lists(source: Source, name: str, key: str) -> pa.DataType:
    """The type of a column that may hold lists, but no views of them.

    Raises:
        DataError: it holds such views: Arrow casts them wrongly where they are slices.
    """
    kind = _type_of(source, name)
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        expected = printable(str(pa.list_(kind.value_type)), 120)
        raise _wrong_type(source, name, key, f"a plain list; cast it to {expected}")
    return kind


def _check_sampling_params(source: Source) -> None:
    kind = _type_of(source, SAMPLING_COLUMN)
    if pa.types.is_struct(kind):
        _check_field_names(source, kind)
    elif not (_may_be_text(kind) or pa.types.is_map(kind)):
        remedy = "; rename the column if it holds something else"
        raise _wrong_type(source, SAMPLING_COLUMN, "sampling", f"struct, or string (JSON){remedy}")


def _check_field_names(source: Source, kind: pa.StructType) -> None:
    known = (*field_names(SamplingParams), *SAMPLING_ALIASES)
    names = [field.name for field in kind]
    where = f"{source.files[0].path}: column {SAMPLING_COLUMN}"
    for name in names:
        if name not in known:
            what = f"{printable(name, 60)}{did_you_mean(name, known)}"
            raise DataError(f"{where} has the unknown field {what}")
        if names.count(name) > 1:
            raise DataError(f"{where} has more than one field {name}; keep one")


def _type_of(source: Source, name: str) -> pa.DataType:
    kind = source.schema.field(name).type
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _is_list(kind: pa.DataType) -> bool:
    return isinstance(kind, pa.ListType | pa.LargeListType | pa.FixedSizeListType)


def _wrong_type(source: Source, name: str, key: str, expected: str) -> DataError:
    kind = printable(str(source.schema.field(name).type), 120)
    where = f"{source.files[0].path}: column {printable(name, 60)}"
    return DataError(f"{key}: {where} is {kind}; it must be {expected}")
