"""A guess at the columns of a dataset that are the prompt and the id, with reasons."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from batchinfer.console.format import did_you_mean, printable
from batchinfer.errors import DataError, UsageError
from batchinfer.job.input.arrow_text import is_conversation, is_text, python_rows
from batchinfer.job.input.dataset import Source
from batchinfer.job.input.unique_ids import check_unique_ids

_LOOKED_AT = 1_000
"""Rows of which values are read."""
_LABEL_BYTES = 40
"""Longest text of a label."""
_MOST_IDS = 1 << 24
"""Longest dataset of which an id column is read whole, to see that no value comes twice."""

_CONVERSATIONS = ("messages", "prompt", "conversation", "conversations", "chat", "dialog")
_TEXTS = (
    *("prompt", "question", "instruction", "query", "input", "text", "problem", "request"),
    *("message", "document", "content", "article", "passage", "body", "review", "comment"),
    *("sentence", "abstract", "goal"),
)
_BESIDE_INSTRUCTION = ("input", "document", "context", "text", "passage", "article", "content")
_TOKEN_IDS = ("prompt_token_ids", "token_ids", "input_ids")
_SYSTEM = ("system", "system_prompt")
_IDS = ("id", "row_id", "custom_id", "uuid", "guid", "uid", "key", "index", "idx", "pk")


@dataclass(frozen=True)
class Guess:
    """Keys of the job file for the prompt, the id column, and reasons for them."""

    prompt: Mapping[str, Any]
    prompt_reasons: Sequence[str]
    id_column: str | None
    id_reason: str
    notes: Sequence[str] = field(default=())
    """Oddities of the data, to be seen before the run."""


def guess_columns(source: Source, *, prompt: str | None = None, row_id: str | None = None) -> Guess:
    """Guess the columns of the prompt and the id.

    Args:
        source: the data.
        prompt: the prompt's column, where it is known.
        row_id: the id column, where it is known.

    Raises:
        UsageError: no column, or none rather than another, can be the prompt.
        DataError: a column that is named is not there or has not the type, or ``row_id`` has a
            value twice or is null somewhere.
    """
    if {"custom_id", "url", "body"} <= set(source.schema.names) and prompt is None:
        where = printable(source.files[0].path, 120)
        raise UsageError(
            f"{where} is an OpenAI batch file, which needs no job file",
            hint="answer it: batchinfer run-batch -i FILE -o ANSWERS.jsonl --model MODEL",
        )
    data = _Data(source)
    keys, reasons = _named_prompt(data, prompt) if prompt is not None else _prompt(data)
    notes = _answered(data, keys.get("column"))
    if row_id is None:
        column, why = _id(data)
    else:
        column, why = data.require(row_id), "as asked"
        check_unique_ids(source, column)
    return Guess(keys, reasons, column, why, notes)


class _Data:
    """The columns, by kind and by name in lower case, and the first rows of those of text."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.types = {f.name: _decoded_type(f.type) for f in source.schema}
        self.texts = [name for name, kind in self.types.items() if is_text(kind)]
        self.conversations = [name for name, kind in self.types.items() if is_conversation(kind)]
        wanted = [*self.texts, *self.conversations]
        self.rows = self._first_rows(wanted) if wanted else []

    def _first_rows(self, columns: Sequence[str]) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for _, batch in self.source.scan(columns, [range(min(_LOOKED_AT, self.source.num_rows))]):
            rows += python_rows(batch)
        return rows

    def first(self, names: Sequence[str], among: Sequence[str]) -> str | None:
        """The first of ``names``, in any case, that is a column ``among`` these."""
        by_name = {name.lower(): name for name in reversed(among)}
        return next((by_name[name] for name in names if name in by_name), None)

    def require(self, name: str) -> str:
        if name not in self.types:
            raise DataError(
                f"{self.where} has no column {printable(name, 60)}"
                f"{did_you_mean(name, list(self.types))}"
            )
        return name

    def repeats(self, name: str) -> bool:
        """Whether a text mostly comes more than once."""
        return len({row[name] for row in self.rows}) * 2 < len(self.rows)

    def prose(self) -> list[str]:
        """Columns of text that are neither ids nor labels, which are short and come again."""
        texts = [name for name in self.texts if not _is_id(name)]
        return [
            name for name in texts if not (self.repeats(name) and self._is_short(name))
        ] or texts

    def mean_length(self, name: str) -> float:
        """Mean bytes of a column's texts, in the rows that were read."""
        lengths = [len(row[name]) for row in self.rows if isinstance(row[name], bytes)]
        return sum(lengths) / max(1, len(lengths))

    def _is_short(self, name: str) -> bool:
        values = (row[name] or b"" for row in self.rows)
        return all(isinstance(v, bytes) and len(v) <= _LABEL_BYTES for v in values)

    @property
    def where(self) -> str:
        return printable(self.source.files[0].path, 120)

    def described(self) -> str:
        """Columns with their types, for a message."""
        shown = [
            f"{printable(name, 40)} ({printable(str(kind), 60)})"
            for name, kind in list(self.types.items())[:16]
        ]
        more = len(self.types) - len(shown)
        return (", ".join(shown) or "(none)") + (f" and {more} more" if more else "")


_Found = tuple[dict[str, Any], list[str]]


def _named_prompt(data: _Data, name: str) -> _Found:
    kind = data.types[data.require(name)]
    if is_text(kind) or is_conversation(kind):
        return {"column": name}, ["as asked"]
    if _is_token_ids(kind):
        return {"token_ids_column": name}, ["as asked: token ids, taken as they are"]
    raise DataError(
        f"{data.where}: column {printable(name, 60)} is {printable(str(kind), 80)}; a prompt is "
        "a string, list<struct<role, content>>, or a list of token ids"
    )


def _prompt(data: _Data) -> _Found:
    found = (
        _conversation(data)
        or _instruction_and_input(data)
        or _question_and_context(data)
        or _text(data)
        or _token_ids(data)
    )
    if found is None:
        raise _no_prompt(data)
    return found


def _conversation(data: _Data) -> _Found | None:
    named = data.first(_CONVERSATIONS, data.conversations)
    if named is None and len(data.conversations) != 1:
        return None
    name = named or data.conversations[0]
    why = "conversations of role and content, written out by the model's chat template"
    return {"column": name}, [f"{printable(name)}: {why}"]


def _instruction_and_input(data: _Data) -> _Found | None:
    task = data.first(("instruction",), data.texts)
    beside = data.first(_BESIDE_INSTRUCTION, data.texts)
    if task is None or beside is None or not (task.isidentifier() and beside.isidentifier()):
        return None
    if data.repeats(task):
        messages = [
            {"role": "system", "content": _place(task)},
            {"role": "user", "content": _place(beside)},
        ]
        return {"messages": messages}, [
            f"{task} has few texts that many rows share, {beside} is the row's own:",
            "what is shared goes first, so that it is computed once",
        ]
    template = f"{_place(task)}{{% if {beside} %}}\n\n{_place(beside)}{{% endif %}}"
    return {"template": template}, [f"{task}, and {beside} where a row has one"]


def _question_and_context(data: _Data) -> _Found | None:
    question, context = data.first(("question",), data.texts), data.first(("context",), data.texts)
    if question is None or context is None:
        return None
    if not (question.isidentifier() and context.isidentifier()):
        return None
    return {"template": f"{_place(context)}\n\n{_place(question)}"}, [f"{context}, then {question}"]


def _text(data: _Data) -> _Found | None:
    name = data.first(_TEXTS, data.texts)
    if name is not None:
        reason = f"{printable(name)}: the column of text with the most telling name"
    elif len(others := data.prose()) == 1:
        name, reason = others[0], f"{printable(others[0])}: the only column of text, but for labels"
    else:
        return None
    system = data.first(_SYSTEM, data.texts)
    if system is None or not system.isidentifier():
        return {"column": name}, [reason]
    return {"column": name, "system": _place(system)}, [reason, f"system message: {system}"]


def _token_ids(data: _Data) -> _Found | None:
    lists = [name for name, kind in data.types.items() if _is_token_ids(kind)]
    name = data.first(_TOKEN_IDS, lists)
    if name is None:
        return None
    return {"token_ids_column": name}, [f"{printable(name)}: token ids, taken as they are"]


def _no_prompt(data: _Data) -> UsageError:
    choices = data.prose() + data.conversations
    what = (
        "holds several columns that could be the prompt, and none with a usual name"
        if len(choices) > 1
        else "holds no text, no conversations (role and content) and no token ids"
    )
    longest = max(choices, key=data.mean_length, default="NAME")
    example = printable(longest, 60)
    hint = f"name it: --prompt-column {json.dumps(example, ensure_ascii=False)}"
    shapes = [
        f"{printable(name, 40)} has from and value (ShareGPT); rename them to role and content, "
        "human to user and gpt to assistant"
        for name, kind in data.types.items()
        if _field_names(kind) >= {"from", "value"}
    ]
    columns = f"its columns are: {data.described()}"
    return UsageError(
        "\n".join([f"{data.where} {what}", columns, *shapes[:1], *[hint] * bool(choices)])
    )


def _answered(data: _Data, name: str | None) -> list[str]:
    """A note that conversations hold their answers already, if they do."""
    if name is None or name not in data.conversations:
        return []
    ends = [row[name][-1] for row in data.rows if isinstance(row[name], list) and row[name]]
    answered = sum(isinstance(end, dict) and end["role"] == b"assistant" for end in ends)
    if not answered:
        return []
    return [
        f"{answered:,} of the first {len(data.rows):,} rows end with a message of the assistant: "
        "the model goes on with it; leave it out of the data to have the model answer anew"
    ]


def _id(data: _Data) -> tuple[str | None, str]:
    named = [name for name, kind in data.types.items() if _may_be_id(kind)]
    exact = [name for name in _IDS if name in (n.lower() for n in named)]
    ends = [name for name in named if _is_id(name)]
    candidates = [data.first((name,), named) for name in exact] + ends
    if candidates and data.source.num_rows > _MOST_IDS:
        return None, f"more than {_MOST_IDS:,} rows were not read to see whether ids differ"
    refused: list[str] = []
    for name in dict.fromkeys(filter(None, candidates)):
        try:
            check_unique_ids(data.source, name)
        except DataError:
            refused.append(printable(name, 60))
            continue
        return name, "a value in every row, none twice"
    if refused:
        return None, f"{', '.join(refused)}: null or twice in some rows; row_id tells rows apart"
    return None, "no column is named like one; row_id, a row's place in the data, tells them apart"


def _place(column: str) -> str:
    return f"{{{{ {column} }}}}"


def _decoded_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _is_token_ids(kind: pa.DataType) -> bool:
    lists = pa.ListType | pa.LargeListType | pa.FixedSizeListType
    return isinstance(kind, lists) and bool(pa.types.is_integer(kind.value_type))


def _may_be_id(kind: pa.DataType) -> bool:
    return bool(is_text(kind) or pa.types.is_integer(kind))


def _is_id(name: str) -> bool:
    return name.lower() in _IDS or name.lower().endswith(("_id", "_uuid"))


def _field_names(kind: pa.DataType) -> set[str]:
    item = getattr(kind, "value_type", None)
    return {f.name for f in item} if item is not None and pa.types.is_struct(item) else set()
