"""Detects the prompt and id columns of a dataset, and gives reasons for the choice."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from batchinfer.console.format import did_you_mean, listed, printable
from batchinfer.errors import DataError, UsageError
from batchinfer.job.input.arrow_types import BYTES_TYPE, is_conversation, is_text
from batchinfer.job.input.dataset import Source
from batchinfer.job.input.invalid_utf8 import python_rows
from batchinfer.job.input.unique_ids import check_unique_ids

_LOOKED_AT = 1_000
"""Number of rows at the start of the dataset whose values are read."""
_LABEL_BYTES = 40
"""Maximum length of a label in bytes."""
_MOST_IDS = 1 << 24
"""Maximum number of rows for which the id column is checked for repeated values."""

_CONVERSATIONS = ("messages", "prompt", "conversation", "conversations", "chat", "dialog")
_TEXTS = (
    *("prompt", "question", "instruction", "query", "input", "text", "problem", "request"),
    *("message", "document", "content", "article", "passage", "body", "review", "comment"),
    *("sentence", "abstract", "goal"),
)
_INSTRUCTION_INPUTS = ("input", "document", "context", "text", "passage", "article", "content")
_TOKEN_IDS = ("prompt_token_ids", "token_ids", "input_ids")
_SYSTEM = ("system", "system_prompt")
_IMAGES = ("image", "images", "picture", "photo", "scan", "page_image", "img")
_IMAGE_PATH = re.compile(rb".+\.(png|jpe?g|webp|gif|bmp|tiff?)", re.IGNORECASE)
_QUESTION = "Describe the picture."
"""Prompt of rows that have only images."""
_IDS = ("id", "row_id", "custom_id", "uuid", "guid", "uid", "key", "index", "idx", "pk")


@dataclass(frozen=True)
class DetectedColumns:
    """Keys of the job file for the prompt and the id column, with reasons."""

    prompt: Mapping[str, Any]
    prompt_reasons: Sequence[str]
    id_column: str | None
    id_reason: str
    notes: Sequence[str]
    """Notes on the data that the user should read before the run."""


def detect_columns(
    source: Source, *, prompt: str | None = None, row_id: str | None = None
) -> DetectedColumns:
    """Detect the columns of the prompt and the id.

    Args:
        prompt: the prompt's column, if the user names it.
        row_id: the id column, if the user names it.

    Raises:
        UsageError: no column, or more than one column, could be the prompt.
        DataError: a named column is missing or has the wrong type, ``row_id`` repeats a value or
            holds a null, or the files have no rows that name columns.
    """
    if not source.knows_columns:
        raise DataError(f"{source.files[0].path} holds no rows, so its columns are unknown")
    if {"custom_id", "url", "body"} <= set(source.schema.names) and prompt is None:
        where = printable(source.files[0].path, 120)
        raise UsageError(
            f"{where} is an OpenAI batch file, which needs no job file",
            hint="run: batchinfer run-batch -i FILE -o ANSWERS.jsonl --model MODEL",
        )
    data = _Data(source)
    keys, reasons = _prompt(data) if prompt is None else _named_prompt(data, prompt)
    if data.images and "token_ids_column" not in keys:
        keys["images"] = data.images[0] if len(data.images) == 1 else data.images
        reasons.append(f"images of the rows: {listed(data.images)}; choose a vision-language model")
    if row_id is None:
        column, why = _id(data)
    else:
        column, why = data.require(row_id), "named by --id-column"
        check_unique_ids(source, column)
    return DetectedColumns(keys, reasons, column, why, _notes(data, keys.get("column")))


class _Data:
    """The dataset's columns, grouped by type, and the first rows of its text columns."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.where = printable(source.files[0].path, 120)
        self.types = {
            f.name: f.type.value_type if pa.types.is_dictionary(f.type) else f.type
            for f in source.schema
        }
        self.images = [name for name, kind in self.types.items() if _is_image(name, kind)]
        self.texts = [
            name for name, kind in self.types.items() if is_text(kind) and name not in self.images
        ]
        self.conversations = [name for name, kind in self.types.items() if is_conversation(kind)]
        self.lists = [name for name, kind in self.types.items() if _is_token_ids(kind)]
        self.rows: list[dict[str, Any]] = []
        if wanted := [*self.texts, *self.conversations]:
            for _, batch in source.scan(wanted, [range(min(_LOOKED_AT, source.num_rows))]):
                self.rows += python_rows(batch)
        paths = [name for name in self.texts if self._holds_image_paths(name)]
        self.images += paths
        self.texts = [name for name in self.texts if name not in paths]

    def _holds_image_paths(self, name: str) -> bool:
        if self.types[name] not in BYTES_TYPE:  # binary columns do not hold image paths
            return False
        values = [row[name] for row in self.rows if isinstance(row[name], bytes) and row[name]]
        return bool(values) and all(_IMAGE_PATH.fullmatch(value) for value in values)

    def variable(self, *names: str) -> str | None:
        """Return the first of ``names`` that is a text column and a valid template variable."""
        name = _first(names, self.texts)
        return name if name is not None and name.isidentifier() else None

    def require(self, name: str) -> str:
        if name not in self.types:
            near = did_you_mean(name, list(self.types))
            raise DataError(f"{self.where} has no column {printable(name, 60)}{near}")
        return name

    def repeats(self, name: str) -> bool:
        """Return True if a column has fewer distinct values than half the number of rows."""
        return len({row[name] for row in self.rows}) * 2 < len(self.rows)

    def prose(self) -> list[str]:
        """Return text columns that hold neither ids nor labels (short texts that repeat)."""
        texts = [name for name in self.texts if not _is_id(name)]
        labels = [n for n in texts if self.repeats(n) and max(self.lengths(n)) <= _LABEL_BYTES]
        return [name for name in texts if name not in labels] or texts

    def lengths(self, name: str) -> list[int]:
        """Return the length of each text of a column in bytes; 0 for other values."""
        values = (row[name] for row in self.rows)
        return [len(value) if isinstance(value, bytes) else 0 for value in values]


_Prompt = tuple[dict[str, Any], list[str]]
"""Keys of the job file's ``prompt`` section, and reasons for them."""


def _named_prompt(data: _Data, name: str) -> _Prompt:
    kind = data.types[data.require(name)]
    if is_text(kind) or is_conversation(kind):
        return {"column": name}, ["named by --prompt-column"]
    if _is_token_ids(kind):
        return {"token_ids_column": name}, ["named by --prompt-column: token ids, used unchanged"]
    raise DataError(
        f"{data.where}: column {printable(name, 60)} is {printable(str(kind), 80)}; a prompt must "
        "be a string, list<struct<role, content>>, or a list of token ids"
    )


def _prompt(data: _Data) -> _Prompt:
    columns = data.conversations
    if name := _first(_CONVERSATIONS, columns) or (columns[0] if len(columns) == 1 else None):
        why = (
            "conversations of messages with role and content, formatted by the model's "
            "chat template"
        )
        return {"column": name}, [f"{printable(name)}: {why}"]
    if detected := _two_columns(data) or _text(data):
        return detected
    if name := _first(_TOKEN_IDS, data.lists):
        return {"token_ids_column": name}, [f"{printable(name)}: token ids, used unchanged"]
    if data.images and not data.texts:
        return {"template": _QUESTION}, ["the rows have images but no text; edit this question"]
    raise _no_prompt(data)


def _two_columns(data: _Data) -> _Prompt | None:
    """Detect an instruction and its input, or a question and its context."""
    task, text = data.variable("instruction"), data.variable(*_INSTRUCTION_INPUTS)
    if task and text and data.repeats(task):
        columns = {"system": task, "user": text}
        messages = [{"role": role, "content": _place(name)} for role, name in columns.items()]
        return {"messages": messages}, [
            f"many rows share the same {task}, so it comes first and is computed once;",
            f"{text} differs from row to row",
        ]
    if task and text:
        template = f"{_place(task)}{{% if {text} %}}\n\n{_place(text)}{{% endif %}}"
        return {"template": template}, [f"{task}, then {text} if a row has it"]
    question, context = data.variable("question"), data.variable("context")
    if question and context:
        template = f"{_place(context)}\n\n{_place(question)}"
        return {"template": template}, [f"{context}, then {question}"]
    return None


def _text(data: _Data) -> _Prompt | None:
    name, why = _first(_TEXTS, data.texts), "a text column with a common name for prompts"
    if name is None:
        prose = data.prose()
        if len(prose) != 1:
            return None
        name, why = prose[0], "the only text column that holds no ids or labels"
    keys, reasons = {"column": name}, [f"{printable(name)}: {why}"]
    if system := data.variable(*_SYSTEM):
        keys["system"] = _place(system)
        reasons.append(f"system message: {system}")
    return keys, reasons


def _no_prompt(data: _Data) -> UsageError:
    choices = data.prose() + data.conversations
    what = (
        "has several columns that could be the prompt, and none has a common name for prompts"
        if len(choices) > 1
        else "has no column that clearly holds texts, conversations or token ids"
    )
    described = [f"{name} ({printable(str(kind), 60)})" for name, kind in data.types.items()]
    more = f" and {len(described) - 16} more" if len(described) > 16 else ""
    lines = [f"{data.where} {what}", f"its columns are: {listed(described[:16]) or '(none)'}{more}"]
    if (
        name := next((n for n, kind in data.types.items() if _is_sharegpt(kind)), None)
    ) is not None:
        lines.append(
            f"{printable(name, 40)} has the fields from and value (ShareGPT); rename them to "
            "role and content, and the roles human to user and gpt to assistant"
        )
    if choices:
        longest = max(choices, key=lambda name: sum(data.lengths(name)))
        example = json.dumps(printable(longest, 60), ensure_ascii=False)
        lines.append(f"name the prompt column, like --prompt-column {example}")
    elif data.lists:
        example = json.dumps(printable(data.lists[0], 60), ensure_ascii=False)
        lines.append(f"if a column holds token ids, name it, like --prompt-column {example}")
    return UsageError("\n".join(lines))


def _notes(data: _Data, name: str | None) -> list[str]:
    """Return a note if conversations already end with answers; an empty list otherwise."""
    if name is None or name not in data.conversations:
        return []
    ends = [row[name][-1] for row in data.rows if isinstance(row[name], list) and row[name]]
    answered = sum(isinstance(end, dict) and end["role"] == b"assistant" for end in ends)
    if not answered:
        return []
    return [
        f"{answered:,} of the first {len(data.rows):,} rows end with an assistant message, which "
        "the model continues; remove these messages if the model should answer instead"
    ]


def _id(data: _Data) -> tuple[str | None, str]:
    named = [
        name for name, kind in data.types.items() if is_text(kind) or pa.types.is_integer(kind)
    ]
    usual = (_first((name,), named) for name in _IDS)
    candidates = dict.fromkeys([*filter(None, usual), *filter(_is_id, named)])
    if candidates and data.source.num_rows > _MOST_IDS:
        return None, (
            f"ids are not checked for duplicates, because the data has more than {_MOST_IDS:,} rows"
        )
    for name in candidates:
        try:
            check_unique_ids(data.source, name)
        except DataError:
            continue
        return name, "every row has a value, and no value repeats"
    if candidates:
        return None, f"{listed(candidates)} has nulls or repeated values; row_id identifies rows"
    return None, "no column has a common name for ids; row_id, a row's position, identifies rows"


def _first(names: Sequence[str], among: Sequence[str]) -> str | None:
    """Return the first of ``names`` that is in ``among``, ignoring case."""
    by_name = {name.lower(): name for name in reversed(among)}
    return next((by_name[name] for name in names if name in by_name), None)


def _place(column: str) -> str:
    return f"{{{{ {column} }}}}"


def _is_token_ids(kind: pa.DataType) -> bool:
    lists = pa.ListType | pa.LargeListType | pa.FixedSizeListType
    return isinstance(kind, lists) and bool(pa.types.is_integer(kind.value_type))


def _is_image(name: str, kind: pa.DataType) -> bool:
    """Return True for images as the Hugging Face Hub stores them (structs of bytes and path), for
    bytes in a column with a common name for images, and for lists of either."""
    lists = pa.ListType | pa.LargeListType
    item = kind.value_type if isinstance(kind, lists) else kind
    if pa.types.is_struct(item):
        return {field.name for field in item} == {"bytes", "path"}
    is_binary = pa.types.is_binary(item) or pa.types.is_large_binary(item)
    return bool(is_binary) and name.lower() in _IMAGES


def _is_id(name: str) -> bool:
    return name.lower() in _IDS or name.lower().endswith(("_id", "_uuid"))


def _is_sharegpt(kind: pa.DataType) -> bool:
    item = getattr(kind, "value_type", None)
    if item is None or not pa.types.is_struct(item):
        return False
    return {"from", "value"} <= {field.name for field in item}
