from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

import pytest

from batchinfer.job.run.threads import BackgroundConsumer, Prefetcher


def drain(ahead: Prefetcher[int]) -> list[int]:
    items = []
    while not ahead.exhausted:
        item = ahead.take(60)
        if item is not None:
            items.append(item)
    return items


def test_prefetcher_depth() -> None:
    made = []

    def numbers() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            yield number

    with Prefetcher(numbers(), depth=2) as ahead:
        for taken in range(50):
            assert ahead.take(60) == taken
            assert len(made) <= taken + 1 + 2, "one item is made for each item taken"


def test_prefetcher_raises_after_earlier_items() -> None:
    def numbers() -> Iterator[int]:
        yield 1
        raise ValueError("bad row group")

    with Prefetcher(numbers(), depth=5) as ahead:
        assert ahead.take(60) == 1
        with pytest.raises(ValueError, match="bad row group"):
            drain(ahead)
        assert not ahead.exhausted


def test_prefetcher_stops_its_thread() -> None:
    before = set(threading.enumerate())
    with Prefetcher(iter(int, 1), depth=1) as endless:
        assert endless.take(60) == 0
    # There may be fewer threads than before: threads of earlier tests may have ended.
    assert set(threading.enumerate()) <= before


def put_numbers(behind: BackgroundConsumer[int], numbers: Iterable[int]) -> None:
    with behind:
        for number in numbers:
            behind.put(number)


def refuse(number: int) -> None:
    raise OSError(f"no room for {number}")


def test_consumer_error_is_raised_by_put() -> None:
    endless = iter(int, 1)
    with pytest.raises(OSError, match="no room for 0"):
        put_numbers(BackgroundConsumer(refuse, depth=1), endless)


def test_consumer_error_of_the_last_item_is_raised_on_exit() -> None:
    leaving = threading.Event()

    def refuse_later(number: int) -> None:
        leaving.wait()
        refuse(number)

    def one_number() -> Iterator[int]:
        yield 7
        leaving.set()

    with pytest.raises(OSError, match="no room for 7"):
        put_numbers(BackgroundConsumer(refuse_later, depth=1), one_number())


def test_consumer_finishes_when_the_body_raises() -> None:
    consumed: list[int] = []

    def broken() -> Iterator[int]:
        yield 1
        raise KeyError("body")

    with pytest.raises(KeyError, match="body"):
        put_numbers(BackgroundConsumer(consumed.append, depth=5), broken())
    assert consumed == [1]


def test_prefetcher_sets_starved() -> None:
    wanted, go_on = threading.Event(), threading.Event()

    def numbers() -> Iterator[int]:
        yield 1
        go_on.wait()
        yield 2

    with Prefetcher(numbers(), depth=3, starved=wanted) as ahead:
        assert ahead.take(60) == 1
        assert not wanted.is_set(), "an item was available"
        assert ahead.take(0) is None
        assert wanted.is_set()
        go_on.set()
        assert ahead.take(60) == 2
        assert not wanted.is_set()
