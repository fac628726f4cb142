"""Makes prompts from rows of the dataset in batches, with sampling parameters and adapters."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from hashlib import blake2b
from itertools import chain
from typing import Protocol

from batchinfer.console.format import did_you_mean, printable
from batchinfer.errors import DataError, RowError
from batchinfer.job.input.format import SAMPLING_COLUMN, Row
from batchinfer.job.rows.sampling_params import RowParams
from batchinfer.job.storage.failpoints import failpoint
from batchinfer.requests.requests import BASE_MODEL, PromptRow, RowSampling
from batchinfer.requests.tool_choice import ToolChoices
from batchinfer.text.prompts import Prompt
from batchinfer.text.tools.row_tools import RowTools, RowToolsReader

InFlight = Callable[[Sequence[int]], AbstractContextManager[None]]

_BATCHES_AHEAD = 1
"""Number of later batches to start before waiting for the prompts of a batch."""
_Prompts = Iterator[list[PromptRow]]


class RowAdapters:
    """Selects the LoRA adapter of each row.

    Args:
        column: column with names of adapters, where null means the base model; None if all rows use
            ``of_all``.
        numbers: maps each adapter's name to its number.
        of_all: adapter of all rows if ``column`` is None; None for the base model.
    """

    def __init__(
        self,
        column: str | None = None,
        numbers: Mapping[str, int] | None = None,
        of_all: str | None = None,
    ) -> None:
        self.column = column
        self._numbers = numbers or {}
        self._of_all = BASE_MODEL if of_all is None else self._numbers[of_all]

    def of(self, row: Mapping[str, object]) -> int | RowError:
        """Return the number of a row's adapter, or an error: unknown_adapter or invalid_utf8."""
        if self.column is None:
            return self._of_all
        value = row.get(self.column)
        if isinstance(value, RowError):
            return value
        if value is None or value == b"":  # an empty CSV cell
            return BASE_MODEL
        try:
            name = value.decode() if isinstance(value, bytes) else str(value)
        except UnicodeDecodeError as error:
            return RowError("invalid_utf8", f"column {self.column}: {error}")
        number = self._numbers.get(name)
        if number is None:
            known = did_you_mean(name, tuple(self._numbers))
            text = f"column {self.column}: there is no adapter {printable(name, 60)!r}{known}"
            return RowError("unknown_adapter", printable(text))
        return number


class Prompts(Protocol):
    @property
    def columns(self) -> tuple[str, ...]:
        """The input columns that ``start`` needs."""
        ...

    def start(self, rows: Sequence[Mapping[str, object]]) -> Callable[[], list[Prompt | RowError]]:
        """Start making the prompts of ``rows``; return a function that waits for the prompts and
        returns each row's prompt or error."""
        ...


class RowReader(Protocol):
    columns: tuple[str, ...]
    """The input columns that ``start`` needs."""

    def start(self, row_ids: Sequence[int], rows: Sequence[Row]) -> Callable[[], list[PromptRow]]:
        """Start making the prompts of ``rows``; return a function that waits for the prompts and
        returns a ``PromptRow`` for each row."""
        ...


class ColumnReader:
    """Reads prompts and parameters from the columns that the job file names.

    Args:
        params: reads the sampling parameters of rows; None for tasks that sample no tokens.
        available: names of the dataset's columns.
        id_column: column whose value selects a row's random stream; None to use the row's position.
        tools: reads the tools of rows; None if rows have no tools.
        tool_choices: makes answers contain the tool calls that ``prompt.tool_choice`` requires.
    """

    def __init__(
        self,
        builder: Prompts,
        params: RowParams | None,
        adapters: RowAdapters,
        available: Sequence[str],
        id_column: str | None = None,
        tools: RowToolsReader | None = None,
        tool_choices: ToolChoices | None = None,
    ) -> None:
        more_columns = (
            [SAMPLING_COLUMN] if params is not None and SAMPLING_COLUMN in available else []
        )
        if adapters.column is not None:
            more_columns.append(adapters.column)
        if id_column is not None:
            more_columns.append(id_column)
        self.columns = tuple(dict.fromkeys((*builder.columns, *more_columns)))
        self._builder = builder
        self._params = params
        self._adapters = adapters
        self._id_column = id_column
        self._tools = tools
        self._tool_choices = tool_choices

    def start(self, row_ids: Sequence[int], rows: Sequence[Row]) -> Callable[[], list[PromptRow]]:
        wait = self._builder.start([row for row in rows if not isinstance(row, RowError)])

        def finish() -> list[PromptRow]:
            prompts = iter(wait())
            return [
                PromptRow(row_id, row)
                if isinstance(row, RowError)
                else self._row(row_id, next(prompts), row)
                for row_id, row in zip(row_ids, rows, strict=True)
            ]

        return finish

    def _row(self, row_id: int, prompt: Prompt | RowError, row: Mapping[str, object]) -> PromptRow:
        sampling = tools = stream = None
        if self._params is not None:
            sampling = self._params.of(row.get(SAMPLING_COLUMN))
        if self._tools is not None and not isinstance(prompt, RowError):
            tools = self._tools.of(row)
        if self._tool_choices is not None:
            sampling = self._tool_choices.applied(sampling, tools)
        if self._id_column is not None:
            stream = stream_of_id(row.get(self._id_column))
        return row_or_error(row_id, prompt, sampling, self._adapters.of(row), stream, tools)


def stream_of_id(value: object) -> int | RowError:
    """Derive a row's random stream from its id: 64 bits of the BLAKE2b hash of the id's text.

    The number 1 and the text "1" have different streams. Texts may be ``str`` or UTF-8 bytes.
    """
    if isinstance(value, RowError):
        return value
    if isinstance(value, str):
        value = value.encode("utf-8", "surrogatepass")
    data = b"text " + value if isinstance(value, bytes) else f"value {value}".encode()
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def row_or_error(
    row_id: int,
    prompt: Prompt | RowError,
    sampling: RowSampling | RowError | None,
    adapter: int | RowError,
    stream: int | RowError | None = None,
    tools: RowTools | None = None,
) -> PromptRow:
    """Make a row from its prompt and settings, or from the first error among them."""
    if isinstance(prompt, RowError):
        return PromptRow(row_id, prompt)
    if isinstance(sampling, RowError):
        return PromptRow(row_id, sampling)
    if isinstance(adapter, RowError):
        return PromptRow(row_id, adapter)
    if isinstance(stream, RowError):
        return PromptRow(row_id, stream)
    return PromptRow(row_id, prompt, sampling, adapter=adapter, stream=stream, tools=tools)


def read_prompts(
    batches: Iterator[tuple[list[int], list[Row]]],
    reader: RowReader,
    in_flight: InFlight = lambda row_ids: nullcontext(),
    *,
    keeps_text: bool = True,
) -> Iterator[list[PromptRow]]:
    """Make the prompts of rows in batches.

    Args:
        batches: row ids and rows, with the columns that ``reader`` needs (``Source.batches``).
        in_flight: returns a context manager that is active while a batch's prompts are made.
        keeps_text: True to keep the text of prompts, which takes memory until the row is finished.
    """
    started: deque[_Prompts] = deque()
    try:
        for row_ids, rows in batches:
            started.append(_prompts(row_ids, rows, reader, in_flight, keeps_text))
            next(started[-1])
            if len(started) > _BATCHES_AHEAD:
                yield from started.popleft()
    except DataError:  # still yield the rows that were read before the error
        yield from chain.from_iterable(started)
        raise
    yield from chain.from_iterable(started)


def _prompts(
    row_ids: list[int], rows: list[Row], reader: RowReader, in_flight: InFlight, keeps_text: bool
) -> _Prompts:
    """Yield an empty list once the prompts are started, then the rows."""
    with in_flight(row_ids):
        for row_id in row_ids:
            failpoint(f"prompt-{row_id}")
        finish = reader.start(row_ids, rows)
        yield []
        batch = finish()
    if not keeps_text:
        for row in batch:
            row.drop_text()
    yield batch
