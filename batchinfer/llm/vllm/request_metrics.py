"""Times of a request, under the names that vLLM's outputs have for them."""

from __future__ import annotations

from dataclasses import dataclass

from batchinfer.engine.request import RequestStats


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """When a prompt came, began and ended, and how many tokens were made of it.

    Times are in seconds. ``arrival_time`` is of the wall clock (``time.time``); those that end in
    ``_ts`` are of a clock that begins when the prompt is queued. The last token is that of the
    sample which ended last. Of a prompt that never ran, all but the arrival are 0.
    """

    arrival_time: float
    queued_ts: float
    scheduled_ts: float
    first_token_ts: float
    last_token_ts: float
    num_generation_tokens: int

    @property
    def first_token_latency(self) -> float:
        """From the queue to the first token."""
        return self.first_token_ts - self.queued_ts

    @property
    def time_in_queue(self) -> float:
        """From the queue to the first step."""
        return self.scheduled_ts - self.queued_ts

    @property
    def first_scheduled_time(self) -> float:
        """When the first step began, by the wall clock."""
        return self.arrival_time + self.scheduled_ts

    @property
    def first_token_time(self) -> float:
        """When the first token was there, by the wall clock."""
        return self.arrival_time + self.first_token_ts

    @property
    def last_token_time(self) -> float:
        """When the last token was there, by the wall clock."""
        return self.arrival_time + self.last_token_ts

    finished_time = last_token_time


def request_metrics(arrival_time: float, stats: RequestStats, num_tokens: int) -> RequestMetrics:
    """The metrics of a prompt that the engine is done with.

    Args:
        arrival_time: by the wall clock.
        num_tokens: of all its samples.
    """
    scheduled = stats.queue_ms / 1e3
    first = scheduled + stats.prefill_ms / 1e3
    return RequestMetrics(
        arrival_time, 0.0, scheduled, first, max(stats.latency_ms / 1e3, first), num_tokens
    )
