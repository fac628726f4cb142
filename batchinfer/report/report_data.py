"""The findings that a report shows: numbers and texts, wherever they came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchinfer.report.histograms import Lengths
from batchinfer.report.lanes import Lane
from batchinfer.report.timeline import Timeline


@dataclass(frozen=True)
class Example:
    """An example row. Texts are as they were found: the page cleans them."""

    row_id: int
    inputs: Sequence[tuple[str, str]]
    """Column and value."""
    answer: str | None
    facts: str
    """Tokens, how it ended."""
    error: tuple[str, str] | None = None
    """Code and message."""


@dataclass(frozen=True)
class Failure:
    """Rows that failed for one reason."""

    code: str
    rows: int
    examples: Sequence[tuple[str, str]] = ()
    """The row by its number and id, and the message."""


@dataclass(frozen=True)
class RunFacts:
    """One run of the job."""

    name: str
    device: str
    rows: int
    load_s: float
    total_s: float
    saved_at: float
    """When it ended, or wrote last, in seconds since 1970."""
    end: str
    """``ended``, ``failed``, or how far it is."""


@dataclass(frozen=True)
class Price:
    """What a machine costs."""

    per_hour: float
    currency: str
    """Its code, such as ``USD``."""


@dataclass(frozen=True)
class Findings:
    """All that a report's page shows."""

    title: str
    state: str
    """``running``, ``stopped``, ``failed``, ``finished``, ``finished with too many errors``, or, of
    calls from Python, ``so far``."""
    when: str
    """When that was, and of what else it is."""
    model: str
    device: str
    rows_total: int
    rows_done: int
    rows_failed: int
    total_s: float
    """Of all runs together; those beside each other have more than has passed."""
    load_s: float
    engine_s: float
    """In which an engine ran."""
    wall_s: float
    """In which a run was under way."""
    timeline: Timeline
    lengths: Lengths
    kv: Mapping[str, int]
    """``block_size``, ``num_blocks``, ``bytes_per_block``; empty where nothing ran."""
    unit: str = "rows"
    """What runs side by side: ``rows``, or ``sequences`` where a row has several."""
    draws: bool = True
    """Whether rows draw tokens; else their prompts are only read."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of what was waited for by name, of all runs."""
    out_of_memory: int = 0
    rows_reused: int = 0
    """Of ``rows_done``, rows copied from other outputs."""
    max_error_rate: float = 0.0
    """Share of the rows that may fail."""
    share: float | None = None
    """Of the rows, done; that of running ones by their tokens included, of a job that runs."""
    eta_s: float | None = None
    eta_is_most: bool = False
    phase: str = ""
    """What is waited for, while no rows run."""
    error: str = ""
    """Why the latest run failed."""
    failures: Sequence[Failure] = ()
    examples: Sequence[Example] = ()
    runs: Sequence[RunFacts] = ()
    lanes: Sequence[Lane] = ()
    """The time of workers beside each other."""
    job: Mapping[str, Any] = field(default_factory=dict)
    """Section of the job: its keys and values."""
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_pool(self) -> bool:
        """Whether the model keeps what it computes in a KV pool; an encoder does not."""
        return bool(self.kv.get("num_blocks"))

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens per second; of a job that has ended, as in ``summary.json``."""
        return self.output_tokens / self.engine_s if self.engine_s else 0.0

    @property
    def output_tokens(self) -> int:
        """Output tokens of finished rows; before all are, those that were drawn."""
        finished = self.lengths.sums["output_tokens"]
        if self.rows_done == self.rows_total:
            return finished
        return max(finished, self.timeline.totals.answer_tokens)

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the prompt tokens found in the pool, as in ``summary.json``."""
        return _share(self.lengths.sums["cached_tokens"], self.lengths.sums["prompt_tokens"])

    @property
    def planned_rate(self) -> float:
        """Share of the prompt tokens that rows have in common, as in ``summary.json``."""
        sums = self.lengths.sums
        if not sums["distinct_tokens"]:
            return 0.0
        return 1 - _share(sums["distinct_tokens"], sums["prompt_tokens"])


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
