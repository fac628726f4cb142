from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from batchinfer.config import PromptConfig, SamplingParams
from batchinfer.errors import RowError
from batchinfer.job.manifest import Part
from batchinfer.job.order import (
    PromptRow,
    by_prefix,
    prompt_rows,
    without_text,
)
from batchinfer.job.row_params import RowParams
from batchinfer.job.source import open_source
from batchinfer.text.prompts import Prompt, PromptBuilder
from tests.job.datasets import write_parquet
from tests.job.fakes import byte_tokenizer

PARTS = [Part(index, range(4 * index, 4 * index + 4)) for index in range(4)]

PARAMS = RowParams(SamplingParams(seed=0), vocab_size=257)


def row(row_id: int, *token_ids: int) -> PromptRow:
    ids = np.asarray(token_ids, dtype=np.int32)
    return PromptRow(row_id, Prompt(ids, "text", truncated=False, has_control_text=False))


def batches(rows: list[PromptRow], size: int) -> Iterator[list[PromptRow]]:
    return (rows[start : start + size] for start in range(0, len(rows), size))


def order(rows: list[PromptRow], parts: list[Part], window: int) -> list[int]:
    return [r.row_id for batch in by_prefix(batches(rows, 2), parts, window) for r in batch]


def test_rows_are_read_and_made_into_prompts(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", {"prompt": ["a", "", "c", "d"], "n": range(4)})
    source = open_source(str(path))
    config = PromptConfig(chat_template="none")
    builder = PromptBuilder(
        config, byte_tokenizer(), max_model_len=100, columns=source.schema.names
    )
    parts = [Part(0, range(2)), Part(2, range(3, 4))]
    rows = [r for batch in prompt_rows(source, parts, builder, PARAMS) for r in batch]
    assert [r.row_id for r in rows] == [0, 1, 3]
    shown = [r.prompt.code if isinstance(r.prompt, RowError) else r.prompt.text for r in rows]
    assert shown == ["a", "empty_prompt", "d"]


def test_token_ids_are_compared_as_numbers_not_as_bytes() -> None:
    rows = [row(0, 256), row(1, 2), row(2, 1, 300), row(3, 1)]
    assert order(rows, PARTS[:1], 4) == [3, 2, 1, 0]


def test_rows_move_within_their_window_only() -> None:
    rows = [row(row_id, 99 - row_id) for row_id in range(16)]
    assert order(rows, PARTS, 8) == [*range(7, -1, -1), *range(15, 7, -1)]


def test_a_window_is_at_least_a_part() -> None:
    rows = [row(row_id, 99 - row_id) for row_id in range(8)]
    assert order(rows, PARTS[:2], 1) == [3, 2, 1, 0, 7, 6, 5, 4]


def test_windows_count_only_the_parts_that_are_left() -> None:
    rows = [row(row_id, 99 - row_id) for row_id in (0, 1, 2, 3, 12, 13, 14, 15)]
    assert order(rows, [PARTS[0], PARTS[3]], 8) == [15, 14, 13, 12, 3, 2, 1, 0]


def test_rows_that_cannot_run_come_first_and_equal_rows_stay_in_order() -> None:
    rows = [row(0, 5), row(1, 5), PromptRow(2, RowError("empty_prompt", "no"))]
    assert order(rows, PARTS[:1], 4) == [2, 0, 1]


def test_text_is_dropped_where_nobody_wants_it() -> None:
    error = PromptRow(1, RowError("empty_prompt", "no"))
    (first, second) = next(without_text(batches([row(0, 1), error], 2)))
    assert isinstance(first.prompt, Prompt)
    assert first.prompt.text is None
    assert second is error
