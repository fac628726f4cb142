"""The numbers and texts that a report shows, of a job's output or of calls from Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchinfer.report.histograms import Lengths
from batchinfer.report.lanes import Lane
from batchinfer.report.timeline import Timeline


@dataclass(frozen=True)
class Example:
    """A row. Its texts are unchanged; the page sanitizes them."""

    row_id: int
    inputs: Sequence[tuple[str, str]]
    """Columns and values."""
    answer: str | None
    facts: str
    """Its tokens, and how it ended."""
    error: tuple[str, str] | None = None
    """Code and message."""


@dataclass(frozen=True)
class Failure:
    """Rows that failed with one code."""

    code: str
    rows: int
    examples: Sequence[tuple[str, str]] = ()
    """A row, by its number and id, and its message."""


@dataclass(frozen=True)
class RunFacts:
    """One run of the job."""

    name: str
    device: str
    rows: int
    load_s: float
    total_s: float
    saved_at: float
    """When it ended, or last wrote, in seconds since 1970."""
    end: str
    """``ended``, ``failed`` or ``not ended``."""


@dataclass(frozen=True)
class Price:
    """The price of the machine; ``currency`` is a code such as ``USD``."""

    per_hour: float
    currency: str


@dataclass(frozen=True)
class ReportData:
    """Everything that a report's page shows."""

    title: str
    state: str
    """``running``, ``stopped``, ``failed``, ``finished``, ``finished with too many errors``, or,
    for calls from Python, ``so far``."""
    when: str
    """The time of that state, and how far an update is."""
    model: str
    device: str
    rows_total: int
    rows_done: int
    rows_failed: int
    total_s: float
    """Summed over all runs, also where several ran at a time."""
    load_s: float
    engine_s: float
    """Time in which an engine ran."""
    wall_s: float
    """Time in which any run was under way."""
    timeline: Timeline
    lengths: Lengths
    kv: Mapping[str, int]
    """``block_size``, ``num_blocks``, ``bytes_per_block``; empty if nothing ran."""
    unit: str = "row"
    """What runs side by side: a ``row``, or a ``sequence`` if rows have several."""
    draws: bool = True
    """Whether rows draw tokens; otherwise their prompts are only read."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each named wait, summed over all runs."""
    out_of_memory: int = 0
    rows_reused: int = 0
    """How many of ``rows_done`` were copied from other outputs."""
    max_error_rate: float = 0.0
    share: float | None = None
    """Share of the work that is done, for a job that runs: running rows count by their tokens."""
    eta_s: float | None = None
    eta_is_most: bool = False
    phase: str = ""
    """What the run waits for while no rows run."""
    error: str = ""
    """Why the latest run failed."""
    failures: Sequence[Failure] = ()
    examples: Sequence[Example] = ()
    runs: Sequence[RunFacts] = ()
    lanes: Sequence[Lane] = ()
    """Workers that ran side by side."""
    job: Mapping[str, Any] = field(default_factory=dict)
    """The sections of the job, with their keys and values."""
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_pool(self) -> bool:
        """Whether the model has a KV pool; an encoder has none."""
        return bool(self.kv.get("num_blocks"))

    @property
    def output_tokens(self) -> int:
        """Output tokens of finished rows; before all are finished, all tokens drawn so far."""
        finished = self.lengths.sums["output_tokens"]
        if self.rows_done == self.rows_total:
            return finished
        return max(finished, self.timeline.totals.answer_tokens)

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens per second, as in ``summary.json`` once the job has ended."""
        return self.output_tokens / self.engine_s if self.engine_s else 0.0

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the prompt tokens found in the pool, as in ``summary.json``."""
        return self._prompt_share("cached_tokens")

    @property
    def planned_rate(self) -> float:
        """Share of the prompt tokens that rows have in common, as in ``summary.json``."""
        has_planned = self.lengths.sums["distinct_tokens"]
        return 1 - self._prompt_share("distinct_tokens") if has_planned else 0.0

    def _prompt_share(self, name: str) -> float:
        sums = self.lengths.sums
        return sums[name] / sums["prompt_tokens"] if sums["prompt_tokens"] else 0.0
