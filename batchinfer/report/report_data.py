"""Defines the data that a report shows, from a job's output or from calls in Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchinfer.report.histograms import Lengths
from batchinfer.report.lanes import Lane
from batchinfer.report.timeline import Timeline


@dataclass(frozen=True)
class Example:
    """A row to show. The texts are unchanged, and the page sanitizes them."""

    row_id: int
    inputs: Sequence[tuple[str, str]]
    answer: str | None
    facts: str
    """Number of tokens of the row, and its finish reasons."""
    error: tuple[str, str] | None = None
    pictures: Sequence[str] = ()
    """Data URLs of small copies of the row's images."""


@dataclass(frozen=True)
class Failure:
    code: str
    rows: int
    examples: Sequence[tuple[str, str]] = ()
    """Names of some of the rows (number and id), each with its error message."""


@dataclass(frozen=True)
class RunFacts:
    name: str
    device: str
    rows: int
    load_s: float
    total_s: float
    saved_at: float
    """Time of the run's end or last write, in seconds since 1970."""
    end: str
    """``ended``, ``failed`` or ``not ended``."""


@dataclass(frozen=True)
class Price:
    """The price of the machine; ``currency`` is a code such as ``USD``."""

    per_hour: float
    currency: str


@dataclass(frozen=True)
class ReportData:
    title: str
    state: str
    """``running``, ``stopped``, ``failed``, ``finished``, ``finished with too many errors``, or,
    for calls from Python, ``so far``."""
    when: str
    """Time at which the data was current, and the progress of an update."""
    model: str
    device: str
    rows_total: int
    rows_done: int
    rows_failed: int
    total_s: float
    """Sum of the seconds of all runs, including parallel runs."""
    load_s: float
    engine_s: float
    """Seconds during which at least one engine ran."""
    wall_s: float
    """Seconds during which at least one run was active."""
    timeline: Timeline
    lengths: Lengths
    kv: Mapping[str, int]
    """Values of ``block_size``, ``num_blocks`` and ``bytes_per_block``; empty if nothing ran."""
    unit: str = "row"
    """Unit that the charts count: ``row``, or ``sequence`` if a row has several sequences."""
    draws: bool = True
    """True if rows draw tokens; otherwise the model only reads their prompts."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each phase, such as loading the model, summed over all runs."""
    out_of_memory: int = 0
    rows_reused: int = 0
    """Number of rows copied from other outputs; ``rows_done`` includes them."""
    replaced_cells: int = 0
    """Number of input cells with bytes that were read as U+FFFD."""
    max_error_rate: float = 0.0
    share: float | None = None
    """Finished share of a running job's work; running rows count in part, by their tokens."""
    eta_s: float | None = None
    eta_is_most: bool = False
    phase: str = ""
    """Name of the phase while no rows run."""
    error: str = ""
    failures: Sequence[Failure] = ()
    examples: Sequence[Example] = ()
    runs: Sequence[RunFacts] = ()
    lanes: Sequence[Lane] = ()
    job: Mapping[str, Any] = field(default_factory=dict)
    """The sections of the job, with their keys and values."""
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_pool(self) -> bool:
        """True if the model has a KV cache; an encoder has no KV cache."""
        return bool(self.kv.get("num_blocks"))

    @property
    def output_tokens(self) -> int:
        """Output tokens of finished rows; before the job is finished, all tokens drawn so far."""
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
        """Share of the prompt tokens found in the KV cache, as in ``summary.json``."""
        return self._prompt_share("cached_tokens")

    @property
    def planned_rate(self) -> float:
        """Share of the prompt tokens that rows have in common, as in ``summary.json``."""
        has_planned = self.lengths.sums["distinct_tokens"]
        return 1 - self._prompt_share("distinct_tokens") if has_planned else 0.0

    def _prompt_share(self, name: str) -> float:
        sums = self.lengths.sums
        return sums[name] / sums["prompt_tokens"] if sums["prompt_tokens"] else 0.0
