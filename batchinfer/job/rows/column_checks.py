"""Checks that the input columns needed to make requests exist and have usable types.

The checks need only the schema, so they run before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from batchinfer.config import (
    SAMPLING_ALIASES,
    PromptConfig,
    SamplingParams,
    field_names,
)
from batchinfer.console.format import did_you_mean, printable
from batchinfer.errors import DataError, UsageError
from batchinfer.job.input.arrow_types import is_conversation, is_text
from batchinfer.job.input.dataset import Source
from batchinfer.job.input.format import SAMPLING_COLUMN
from batchinfer.text.prompt_sources import checked_template, make_source, require_column


def check_prompt_columns(config: PromptConfig, source: Source) -> None:
    """Check the columns of ``config`` before a tokenizer is loaded.

    Raises:
        UsageError: a template reads a missing column, no prompt column is set or found, or
            conversations need the chat template that ``config`` turns off.
        DataError: a named column does not exist, has an unusable type, or differs between files.
    """
    if source.format.holds_requests:
        return  # the requests contain the prompts
    names = source.schema.names
    if config.token_ids_column is not None:
        key = "prompt.token_ids_column"
        _check_column(source, config.token_ids_column, key, _may_be_ids, "list of integers")
    else:
        prompt = make_source(config, names)
        source.require_alike(sorted(prompt.columns))
        if config.template is None and config.messages is None:
            (name,) = prompt.columns
            _check_prompt(source, name, config)
    if config.system is not None:
        system = checked_template(config.system, "prompt.system", frozenset(names))
        source.require_alike(sorted(system.columns(frozenset(names))))
    for name in config.image_columns:
        expected = "binary, string (paths), struct<bytes, path>, or a list of these"
        _check_column(source, name, "prompt.images", _may_be_images, expected)
    if config.tools_column is not None:
        key, expected = "prompt.tools_column", "string (JSON) or list<struct>"
        _check_column(source, config.tools_column, key, _may_be_tools, expected)
    if config.adapter_column is not None:
        check_text_column(config.adapter_column, "prompt.adapter_column", source)
    if SAMPLING_COLUMN in names:
        _check_sampling_params(source)


def prompt_columns(config: PromptConfig, source: Source) -> frozenset[str]:
    """Return the text columns from which every row's prompt or adapter name is made. A row in which
    one of these texts is not UTF-8 fails with ``invalid_utf8``."""
    names = frozenset(source.schema.names)
    columns = set[str]()
    if config.token_ids_column is None:
        columns |= make_source(config, source.schema.names).columns
    if config.system is not None:
        columns |= checked_template(config.system, "prompt.system", names).columns(names)
    return frozenset(columns | {config.adapter_column or ""} & names)


def check_completions_column(name: str, source: Source) -> None:
    """Raise DataError if the column ``score.completions_column`` is missing, or cannot hold
    completions."""
    expected = "string, list<string>, or list<list<int>> (token ids)"
    _check_column(source, name, "score.completions_column", _may_be_completions, expected)


def check_text_column(name: str, key: str, source: Source) -> None:
    """Raise DataError if the column that ``key`` of the job file names is missing or not text."""
    _check_column(source, name, key, _may_be_text, "string")


def _check_prompt(source: Source, name: str, config: PromptConfig) -> None:
    expected = "string or list<struct<role, content>>"
    kind = _check_column(
        source, name, "prompt.column", lambda k: is_conversation(k) or _may_be_text(k), expected
    )
    if is_conversation(kind) and config.chat_template == "none":
        raise UsageError(
            f"prompt.chat_template is none, but column {printable(name)} holds conversations",
            hint="set it to auto or to a file, or name a column of strings in prompt.column",
        )


def _check_sampling_params(source: Source) -> None:
    expected = "struct or string (JSON); rename the column if it holds something else"
    kind = _check_column(source, SAMPLING_COLUMN, "sampling", _may_be_params, expected)
    if not pa.types.is_struct(kind):
        return
    known = (*field_names(SamplingParams), *SAMPLING_ALIASES)
    names = [field.name for field in kind]
    where = f"{source.files[0].path}: column {SAMPLING_COLUMN}"
    for name in names:
        if name not in known:
            what = f"{printable(name, 60)}{did_you_mean(name, known)}"
            raise DataError(f"{where} has the unknown field {what}")
        if names.count(name) > 1:
            raise DataError(f"{where} has more than one field {name}; keep one")


def _check_column(
    source: Source, name: str, key: str, may_be: Callable[[pa.DataType], bool], expected: str
) -> pa.DataType:
    """Check the column that ``key`` of the job file names; return its type, dictionary-decoded.

    List views are refused, because Arrow casts slices of list views incorrectly.

    Raises:
        DataError: the column does not exist, differs between files, or has an unusable type.
    """
    require_column(name, key, source.schema.names)
    source.require_alike([name])
    whole = source.schema.field(name).type
    kind = whole.value_type if pa.types.is_dictionary(whole) else whole
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        expected = f"a plain list; cast it to {printable(str(pa.list_(kind.value_type)), 120)}"
    elif may_be(kind):
        return kind
    where = f"{source.files[0].path}: column {printable(name, 60)}"
    raise DataError(f"{key}: {where} is {printable(str(whole), 120)}; it must be {expected}")


def _may_be_text(kind: pa.DataType) -> bool:
    return is_text(kind) or pa.types.is_null(kind)


def _may_be_ids(kind: pa.DataType) -> bool:
    item = _item_of(kind)
    return item is not None and bool(pa.types.is_integer(item) or pa.types.is_null(item))


def _may_be_images(kind: pa.DataType) -> bool:
    item = _item_of(kind)
    if item is not None:
        return _may_be_images(item)
    if pa.types.is_struct(kind):
        return bool({"bytes", "path"} & {field.name for field in kind})
    return _may_be_text(kind)


def _may_be_tools(kind: pa.DataType) -> bool:
    item = _item_of(kind)
    return _may_be_text(kind) or (item is not None and pa.types.is_struct(item))


def _may_be_completions(kind: pa.DataType) -> bool:
    item = _item_of(kind)
    if item is None:
        return _may_be_text(kind)
    ids = _item_of(item)
    return _may_be_text(item) or (ids is not None and pa.types.is_integer(ids))


def _may_be_params(kind: pa.DataType) -> bool:
    return _may_be_text(kind) or pa.types.is_map(kind) or pa.types.is_struct(kind)


def _item_of(kind: pa.DataType) -> pa.DataType | None:
    """Return the type of a list's items, without dictionary encoding; None for other types."""
    if not isinstance(kind, pa.ListType | pa.LargeListType | pa.FixedSizeListType):
        return None
    item = kind.value_type
    return item.value_type if pa.types.is_dictionary(item) else item
