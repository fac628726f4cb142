"""From the dataset to prompts, in input order."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby

from batchinfer.errors import RowError
from batchinfer.job.input.dataset import Source
from batchinfer.job.input.format import BATCH_ROWS, Row, Rows
from batchinfer.job.row_ids import Part
from batchinfer.job.rows.reader import BASE, Read, RowReader
from batchinfer.job.rows.sampling_params import RowSampling
from batchinfer.job.storage.failpoints import failpoint
from batchinfer.text.prompts import Prompt


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A row of the input, ready for the engine, or why it can never be."""

    row_id: int
    prompt: Prompt | RowError
    sampling: RowSampling | None = None
    """None for a row that cannot run, or that draws nothing."""
    reused_prefix_len: int = 0
    """Prompt tokens that a row after it, in the order they run, begins with as well."""
    distinct_tokens: int = 0
    """Prompt tokens after the longest prefix that it has in common with a row before it, and those
    given after the prompt."""
    adapter: int = BASE
    """Number of the adapter it runs through."""


def prompt_rows(
    source: Source,
    parts: Sequence[Part],
    reader: RowReader,
    ranges: Iterable[range] | None = None,
    making: Callable[[Sequence[int]], AbstractContextManager[None]] = lambda row_ids: nullcontext(),
) -> Iterator[list[PromptRow]]:
    """Prompts of the rows of ``parts``, in input order, a batch of one part's rows at a time.

    Args:
        source: the dataset.
        parts: parts that hold the rows, in order.
        reader: makes the prompts, and knows how rows are sampled and through which adapter.
        ranges: only these rows, in order, each range in one part; None: all.
        making: entered with the rows of each batch while their prompts are made.
    """
    wanted = [part.rows for part in parts] if ranges is None else list(ranges)
    first_rows = [part.rows.start for part in parts]
    pieces = source.rows(reader.columns, wanted)
    for _, of_part in groupby(wanted, key=lambda rows: bisect_right(first_rows, rows.start)):
        missing = sum(map(source.count, of_part))
        while missing:
            row_ids, rows = _batch(pieces, min(missing, BATCH_ROWS))
            missing -= len(rows)
            with making(row_ids):
                for row_id in row_ids:
                    failpoint(f"prompt-{row_id}")
                made = reader.read(rows)
            yield [_prompt_row(row_id, read) for row_id, read in zip(row_ids, made, strict=True)]


def _batch(pieces: Iterator[Rows], num_rows: int) -> tuple[list[int], list[Row]]:
    """Row ids and rows of ``num_rows`` or more: prompts of scattered rows are built together."""
    row_ids: list[int] = []
    rows: list[Row] = []
    while len(rows) < num_rows:
        first_row, piece = next(pieces)
        row_ids.extend(range(first_row, first_row + len(piece)))
        rows.extend(piece)
    return row_ids, rows


def _prompt_row(row_id: int, read: Read) -> PromptRow:
    if isinstance(read, RowError):
        return PromptRow(row_id, read)
    prompt, sampling, adapter = read
    return PromptRow(row_id, prompt, sampling, adapter=adapter)


def without_text(batches: Iterator[list[PromptRow]]) -> Iterator[list[PromptRow]]:
    """Drop the prompts' text, which else stays in memory until its row is finished."""
    for rows in batches:
        yield [
            row
            if isinstance(row.prompt, RowError)
            else replace(row, prompt=replace(row.prompt, text=None))
            for row in rows
        ]
