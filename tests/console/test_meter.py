"""Progress while rows run, and the time left."""

from __future__ import annotations

from random import Random

import pytest

from batchinfer.console.meter import Counts, Meter
from tests.console.conftest import Clock
from tests.console.steps import a_step


def test_tokens_count_before_a_row_is_finished(clock: Clock) -> None:
    meter = Meter(500, clock=clock)
    assert meter.eta_s is None
    meter.add(Counts(begun=500, most_tokens=500 * 32_000), None)
    assert meter.eta_s is None
    clock.now = 4.0
    meter.add(Counts(tokens=500 * 32), None)
    assert meter.expects_most
    assert meter.share == pytest.approx(0.001)
    assert meter.eta_s == pytest.approx(4.0 * 999)
    assert meter.tokens_per_s == pytest.approx(4000)


def test_eta_is_not_biased_by_short_answers(clock: Clock) -> None:
    meter = Meter(500, clock=clock)
    clock.now = 10.0
    meter.add(Counts(begun=500, most_tokens=500 * 32_000, tokens=500 * 100), None)
    meter.add(Counts(rows=1, ended=1, settled_tokens=100), None)
    assert not meter.expects_most
    assert meter.share < 0.01  # with the finished row's length as the mean, the share would be 1


def test_rows_of_earlier_runs_count_in_the_share_but_not_in_the_time(clock: Clock) -> None:
    meter = Meter(3_800, before=1_200, clock=clock)
    clock.now = 60.0
    meter.add(Counts(rows=380), None)
    assert meter.rows_line == "1,580 of 5,000 rows"
    assert meter.share == pytest.approx(1_580 / 5_000)
    assert meter.eta_s == pytest.approx(60 * 9)
    assert Meter(0, before=1).rows_line == "1 of 1 row"
    assert Meter(0).share == 1.0


def test_tokens_of_earlier_runs_count_in_the_share_but_not_in_the_time(clock: Clock) -> None:
    meter = Meter(10, before=10, clock=clock)
    clock.now = 8.0
    meter.add(Counts(begun=10, most_tokens=1000, kept_tokens=600), None)
    assert meter.share == pytest.approx(0.5 + 0.5 * 0.6)
    assert (meter.tokens_per_s, meter.eta_s) == (0.0, None)
    meter.add(Counts(tokens=200), None)
    assert meter.share == pytest.approx(0.5 + 0.5 * 0.8)
    assert (meter.tokens_per_s, meter.eta_s) == (25.0, pytest.approx(8.0))
    meter.add(Counts(rows=8, ended=8, settled_tokens=640), None)  # 80 tokens each
    assert meter.share == pytest.approx(0.5 + 0.5 * (0.8 + 160 / 1000))


def test_share_stays_between_0_and_1() -> None:
    random = Random(7)
    for _ in range(200):
        meter, last = Meter(random.randrange(1, 50), before=random.randrange(3)), 0.0
        lengths = [random.choice([0, 1, 30, 400]) for _ in range(meter.total)]
        left = dict(enumerate(lengths))
        meter.add(Counts(begun=len(left), most_tokens=400 * len(left)), None)
        while left:
            finished = [row for row, tokens in left.items() if tokens <= 0]
            drawn, rows = sum(lengths[row] for row in finished), len(finished)
            left = {row: tokens - 1 for row, tokens in left.items() if tokens > 0}
            added = Counts(rows=rows, ended=rows, settled_tokens=drawn, tokens=len(left))
            meter.add(added, None)
            assert last <= meter.share <= 1.0
            assert meter.eta_s is None or meter.eta_s >= 0
            last = meter.share
        assert (meter.share, meter.eta_s, meter.rows_running) == (1.0, 0.0, 0)


def test_rows_of_a_dead_worker_are_not_running() -> None:
    worker = Counts(rows=3, begun=10, ended=3, most_tokens=1000, tokens=500, settled_tokens=300)
    meter = Meter(10)
    meter.add(worker, None)
    assert (meter.rows_running, meter.rows_done) == (7, pytest.approx(3 + 200 / 100))
    meter.add(Counts.lost_with(worker), None)
    assert (meter.rows_running, meter.rows_done) == (0, 3)
    assert meter.counts.tokens == 500
    assert meter.counts - worker == Counts.lost_with(worker)


def test_time_before_the_clock_starts_does_not_count(clock: Clock) -> None:
    meter = Meter(10, clock=clock)
    clock.now = 60.0
    meter.begin()
    clock.now = 62.0
    meter.add(Counts(rows=5, tokens=100), None)
    assert (meter.tokens_per_s, meter.eta_s) == (50.0, 2.0)


@pytest.mark.parametrize(
    ("draws", "blocks", "rates"),
    [
        (True, 200, "30 tokens/s, pool 25%, shared 10%"),
        (False, 200, "2.5 rows/s, 400 input tokens/s, pool 25%, shared 10%"),
        (False, 0, "2.5 rows/s, 400 input tokens/s"),
    ],
)
def test_rates_depend_on_the_task(clock: Clock, draws: bool, blocks: int, rates: str) -> None:
    meter = Meter(50, draws=draws, clock=clock)
    clock.now = 4.0
    done = Counts(rows=10, begun=20, ended=10, tokens=120, prefill_tokens=1600)
    step = a_step(kv_blocks_total=blocks, kv_blocks_used=blocks // 4, kv_blocks_shared=blocks // 40)
    meter.add(done, step)
    assert meter.rates == rates
    facts = meter.facts()
    assert (facts["rows_per_s"], facts["prefill_tokens"]) == (2.5, 1600)
    assert facts["output_tokens"] == (120 if draws else 0)
    assert facts["pool_use"] == (0.25 if blocks else None)
    meter.note = "2 of 2 workers running"
    assert meter.rates == f"{', '.join(meter.speeds)}, 2 of 2 workers running"


def test_eta_of_encoders_is_not_biased_by_long_texts(clock: Clock) -> None:
    meter = Meter(1000, before=200, draws=False, clock=clock)
    meter.add(Counts(begun=400, prompt_tokens=8_000), None)  # 20 tokens per row
    meter.add(Counts(rows=5), None)  # 5 refused rows
    clock.now = 10.0
    meter.add(Counts(rows=10, ended=10, prefill_tokens=1_000), None)
    assert meter.rows_done == pytest.approx(5 + 1_000 / 20)
    assert meter.eta_s == pytest.approx(10 * 945 / 55)
    assert meter.share == pytest.approx(255 / 1200)
    # Nearly all tokens of these rows are already in the KV pool.
    meter.add(Counts(rows=985, begun=585, ended=985, prefill_tokens=1), None)
    assert (meter.share, meter.eta_s) == (1.0, 0.0)
