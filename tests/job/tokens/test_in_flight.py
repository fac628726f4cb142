from __future__ import annotations

from batchinfer.job.tokens.in_flight import TokensInFlight


def test_tokens_are_due_before_so_many_seconds_are_lost() -> None:
    """A step and a write come after that, within the seconds."""
    now = [100.0]
    tokens = TokensInFlight(5.0, clock=lambda: now[0])
    for _ in range(2):
        assert not tokens.are_due(1)
        now[0] += 3.5
        assert not tokens.are_due(1)
        now[0] += 0.75
        assert tokens.are_due(1)
        tokens.take([], [])


def test_tokens_of_a_row_that_runs_alone_are_due_a_second_after_the_first() -> None:
    """However long its prompt has taken: a step later it may kill, each time."""
    now = [100.0]
    for most_lost_s in (5.0, 60.0):
        tokens = TokensInFlight(most_lost_s, clock=lambda: now[0])
        tokens.is_row_alone = True
        for _ in range(2):
            now[0] += 99.0
            assert not tokens.are_due(0)
            assert not tokens.are_due(1)
            now[0] += 0.75
            assert not tokens.are_due(1)
            now[0] += 0.25
            assert tokens.are_due(1)
            tokens.take([], [])
