"""When and in which order rows reach the engine, and which prefixes they share."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from batchinfer.errors import DataError, RowError
from batchinfer.job.row_ranges import Part
from batchinfer.job.rows import row_order
from batchinfer.job.rows.row_order import plan_windows
from batchinfer.requests.requests import PromptRow
from batchinfer.text.prompts import Prompt

PARTS = [Part(index, range(4 * index, 4 * index + 4)) for index in range(4)]


def row(row_id: int, *token_ids: int) -> PromptRow:
    ids = np.asarray(token_ids, dtype=np.int32)
    return PromptRow(row_id, Prompt(ids, "text", truncated=False, has_control_text=False))


def batches(rows: Iterable[PromptRow], size: int) -> Iterator[list[PromptRow]]:
    coming = iter(rows)
    return iter(lambda: list(islice(coming, size)), [])


def plan(
    rows: list[PromptRow],
    parts: list[Part],
    window_rows: int,
    *,
    by_prefix: bool = True,
    size: int = 2,
    is_starved: Callable[[], bool] = lambda: False,
) -> Iterator[list[PromptRow]]:
    return plan_windows(
        batches(rows, size), parts, window_rows, by_prefix=by_prefix, is_starved=is_starved
    )


def order(rows: list[PromptRow], parts: list[Part], window: int) -> list[int]:
    return [row.row_id for lot in plan(rows, parts, window) for row in lot]


def tokens(row: PromptRow) -> list[int]:
    assert isinstance(row.prompt, Prompt)
    return row.prompt.token_ids.tolist()


def random_rows(count: int) -> list[PromptRow]:
    """Return rows of a few different tokens, so that many share prefixes."""
    draw = random.Random(0)
    return [
        row(at, *(draw.randrange(3) for _ in range(draw.randrange(1, 9)))) for at in range(count)
    ]


def tree_size(rows: list[PromptRow]) -> int:
    """Return the number of distinct prefixes."""
    return len({tuple(tokens(r)[:n]) for r in rows for n in range(1, len(tokens(r)) + 1)})


def test_token_ids_are_compared_as_numbers_not_as_bytes() -> None:
    rows = [row(0, 256), row(1, 2), row(2, 1, 300), row(3, 1)]
    assert order(rows, PARTS[:1], 4) == [3, 2, 1, 0]


def test_rows_move_within_their_window_only() -> None:
    rows = [row(row_id, 99 - row_id) for row_id in range(16)]
    assert order(rows, PARTS, 8) == [*range(7, -1, -1), *range(15, 7, -1)]


def test_rows_share_prefixes_only_within_an_adapter() -> None:
    rows = [row(0, 1, 2, 3), row(1, 1, 2, 4), row(2, 1, 2, 3), row(3, 1, 2)]
    rows = [replace(one, adapter=adapter) for one, adapter in zip(rows, (1, 0, 1, 0), strict=True)]
    (lot,) = plan(rows, PARTS[:1], 4)
    assert [(r.row_id, r.adapter) for r in lot] == [(3, 0), (1, 0), (0, 1), (2, 1)]
    assert [r.reused_prefix_len for r in lot] == [2, 0, 3, 0]
    assert [r.distinct_tokens for r in lot] == [2, 1, 3, 0]
    (lot,) = plan(rows, PARTS[:1], 4, by_prefix=False)
    assert [r.row_id for r in lot] == [0, 1, 2, 3]
    assert [r.reused_prefix_len for r in lot] == [3, 2, 0, 0]


def test_windows_count_only_unfinished_parts() -> None:
    rows = [row(row_id, 99 - row_id) for row_id in (0, 1, 2, 3, 12, 13, 14, 15)]
    assert order(rows, [PARTS[0], PARTS[3]], 8) == [15, 14, 13, 12, 3, 2, 1, 0]


def test_rows_that_cannot_run_come_first_and_equal_rows_stay_in_order() -> None:
    error = RowError("empty_prompt", "no")
    rows = [row(0, 5), row(1, 5), PromptRow(2, error)]
    assert order(rows, PARTS[:1], 4) == [2, 0, 1]
    (lot,) = plan(rows, PARTS[:1], 4)
    assert lot[0].prompt is error
    assert (lot[0].reused_prefix_len, lot[0].distinct_tokens) == (0, 0)


def test_reused_prefixes_are_those_of_later_rows_in_the_window() -> None:
    rows = [row(0, 1, 2, 3), row(1, 9), row(2, 1, 2, 4), row(3, 1, 2, 3, 3), row(4, 1, 2)]
    parts = PARTS[:2]
    (first, second) = plan(rows, parts, 4)
    assert [(r.row_id, r.reused_prefix_len) for r in first] == [(0, 3), (3, 2), (2, 0), (1, 0)]
    assert [(r.row_id, r.reused_prefix_len) for r in second] == [(4, 0)], (
        "rows share no prefixes with the previous window"
    )
    (first, second) = plan(rows, parts, 4, by_prefix=False)
    assert [(r.row_id, r.reused_prefix_len) for r in first] == [(0, 3), (1, 0), (2, 2), (3, 0)]


@pytest.mark.parametrize("by_prefix", [True, False])
def test_distinct_tokens_equal_the_size_of_the_prefix_tree(by_prefix: bool) -> None:
    rows = random_rows(16)
    planned_rows = [r for lot in plan(rows, PARTS, 8, by_prefix=by_prefix) for r in lot]
    assert sum(r.distinct_tokens for r in planned_rows) == tree_size(rows[:8]) + tree_size(rows[8:])


LARGE = [Part(0, range(8192))]


def test_a_plan_takes_few_bytes_per_row() -> None:
    rows = random_rows(8192)
    tracemalloc.start()
    try:
        assert len(next(plan(rows, LARGE, 8192, size=256))) == 8192
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 120 * 8192


@pytest.mark.parametrize("by_prefix", [True, False])
def test_an_idle_engine_gets_a_head_start(by_prefix: bool) -> None:
    rows, read = random_rows(8192), 0

    def reading() -> Iterator[PromptRow]:
        nonlocal read
        for one in rows:
            read += 1
            yield one

    lots = plan_windows(
        batches(reading(), 512), LARGE, 8192, by_prefix=by_prefix, is_starved=lambda: True
    )
    seen, after = [], []
    for lot in lots:
        seen += lot
        after.append((read, len(seen)))
    if by_prefix:
        assert after == [(1024, 64), (2048, 128), (4096, 256), (8192, 512), (8192, 8192)]
        rest = [tokens(r) for r in seen[512:]]
        assert rest == sorted(rest), "rows that share prefixes with the head start come first"
    else:
        assert after == [(1024, 1024), (2048, 2048), (4096, 4096), (8192, 8192)]
        assert [r.row_id for r in seen] == list(range(8192))
    assert sorted(r.row_id for r in seen) == list(range(8192))
    assert sum(r.distinct_tokens for r in seen) == tree_size(rows)


@pytest.mark.parametrize("by_length", [False, True])
def test_a_window_ends_early_with_long_prompts(
    monkeypatch: pytest.MonkeyPatch, by_length: bool
) -> None:
    monkeypatch.setattr(row_order, "MOST_TOKENS", 10)
    rows = [row(at, *[99 - at] * length) for at, length in enumerate([3, 3, 2, 2, 1, 9, 40, 1])]
    lots = plan_windows(
        batches(rows, 2), [Part(0, range(8))], 8, by_prefix=True, by_length=by_length
    )
    ids = [[r.row_id for r in lot] for lot in lots]
    assert ids == ([[0, 1, 2, 3], [5, 4], [6, 7]] if by_length else [[3, 2, 1, 0], [5, 4], [7, 6]])


def test_each_further_window_is_announced_before_it_is_read() -> None:
    events: list[str] = []

    def reading() -> Iterator[PromptRow]:
        for one in random_rows(16):
            events.append(f"read {one.row_id}")
            yield one

    def announced(reading_s: float) -> None:
        assert reading_s >= 0
        events.append("wait")

    lots = plan_windows(batches(reading(), 4), PARTS, 8, by_prefix=True, before_next=announced)
    assert len(list(lots)) == 2
    # The first batch of a window shows that the window before it is complete.
    assert events.index("wait") == 12
    assert events.count("wait") == 1


def test_rows_before_an_unreadable_place_still_run() -> None:
    def broken() -> Iterator[list[PromptRow]]:
        yield [row(0, 5), row(1, 3)]
        raise DataError("row group 1 cannot be read")

    lots = plan_windows(broken(), PARTS, 8, by_prefix=True)
    assert [r.row_id for r in next(lots)] == [1, 0]
    with pytest.raises(DataError, match="row group 1"):
        next(lots)
