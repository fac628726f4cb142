"""Made-up contents of reports; ``python -m tests.report.pages`` writes the expected pages."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from batchinfer.report.histograms import COLUMNS as REQUEST_COLUMNS
from batchinfer.report.histograms import Lengths
from batchinfer.report.lanes import Lane, Piece
from batchinfer.report.page import page
from batchinfer.report.report_data import Example, Failure, Price, ReportData, RunFacts
from batchinfer.report.timeline import COLUMNS as STEP_COLUMNS
from batchinfer.report.timeline import Timeline
from tests.report.hostile import HOSTILE

KV = {"block_size": 16, "num_blocks": 1000, "bytes_per_block": 1 << 20}


def some_steps(scale: float = 1.0, count: int = 500) -> Timeline:
    """Return steps of a job whose rows share prefixes, wait, swap and recompute."""
    rng = np.random.default_rng(3)
    used = 700 + 200 * np.sin(np.arange(count) / 40) + rng.integers(0, 60, count)
    steps = dict.fromkeys(STEP_COLUMNS, np.full(count, 3.0))
    steps |= {
        "t_s": np.arange(1.0, count + 1) * scale,
        "step_ms": np.full(count, 900.0 * scale),
        "encode_ms": np.full(count, 60.0 * scale),
        "num_running": np.round(used / 20),
        "num_waiting": np.linspace(3000, 0, count),
        "kv_blocks_total": np.full(count, 1000.0),
        "kv_blocks_used": used,
        "kv_blocks_shared": used * 0.4,
        "kv_blocks_cached": 990 - used,
        "kv_logical_blocks": used * 2,
        "contiguous_blocks": used * 4,
        "kv_waste": np.full(count, 0.07),
        "prefill_tokens": rng.integers(0, 8000, count) * (rng.random(count) > 0.5),
        "decode_tokens": used,
    }
    timeline = Timeline(count * scale)
    timeline.add(steps, 0.0, 0.0, 16, 1 << 20)
    return timeline


def some_lengths(rows: int = 4000) -> Lengths:
    rng = np.random.default_rng(4)
    values = {name: np.floor(rng.lognormal(5, 1, rows)) for name in REQUEST_COLUMNS}
    values |= {"cached_tokens": values["prompt_tokens"] // 2}
    values |= {"distinct_tokens": values["prompt_tokens"] // 3}
    lengths = Lengths()
    lengths.add(values)
    return lengths


def some_data(texts: tuple[str, ...] = ("plain",), scale: float = 1.0) -> ReportData:
    """Return the data of a report that has ``texts`` in every place where a report shows text."""
    return ReportData(
        title=" | ".join(texts),
        state="finished",
        when="2026-11-21 12:00",
        model=" | ".join(texts),
        device=texts[0],
        rows_total=4000,
        rows_done=4000,
        rows_failed=len(texts),
        total_s=600.0 * scale,
        load_s=20.0,
        engine_s=580.0 * scale,
        wall_s=600.0 * scale,
        timeline=some_steps(scale),
        lengths=some_lengths(),
        kv=KV,
        phases=dict.fromkeys(texts, 5.0),
        failures=[Failure(text, 7, [(text, text), ("row 2", text[::-1])]) for text in texts],
        examples=[Example(i, [(t, t)], t, "1 token in", (t, t)) for i, t in enumerate(texts)],
        lanes=[
            Lane(text, [Piece("used", 0.4), Piece("again", 0.6)], 7, 0.9, "died") for text in texts
        ],
        runs=[
            RunFacts(text, text, 10, 1.0, 2.0, 0.0, "not ended") for text in (*texts, "run-00002")
        ],
        job={text: {text: text, "list": [text], text + "x": {text: None}} for text in texts},
        versions={text: text for text in texts},
    )


KINDS: dict[str, Callable[[], ReportData]] = {
    "plain": some_data,
    "hostile": lambda: some_data(HOSTILE),
    "encoder": lambda: replace(some_data(), kv={**KV, "num_blocks": 0}, draws=False, lanes=()),
    "of days": lambda: some_data(scale=1e4),
    "without rows": lambda: replace(
        some_data(),
        state="failed",
        error="the disk\nis full",
        timeline=Timeline(0.0),
        lengths=Lengths(),
        failures=(),
        examples=(),
    ),
}
GOLDEN = ("plain", "encoder", "without rows")
"""Kinds whose expected pages are stored, without styles and drawings."""


@cache
def page_of(kind: str) -> str:
    """Return the page of one of ``KINDS``."""
    return page(KINDS[kind](), Price(2.0, "EUR"))


def words_of(html: str) -> str:
    """Remove the styles of a page, and from its charts everything except the axes."""
    html = re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL)
    return re.sub(r"<rect.*?(</svg>)|<path[^>]*>", r"\1", html, flags=re.DOTALL)


def golden(kind: str) -> Path:
    return Path(__file__).parent / "golden" / f"{kind.replace(' ', '-')}.html"


if __name__ == "__main__":
    for name in GOLDEN:
        golden(name).write_text(words_of(page_of(name)), encoding="utf-8")
