"""Calls of an ``LLM``: one engine, one call at a time, the numbers of all."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from batchinfer.builders.context import EngineContext
from batchinfer.console.meter import Counts, Meter
from batchinfer.engine.metrics import KV_FACTS, MetricsCollector
from batchinfer.engine.request import Completion, Request
from batchinfer.llm.outputs import Stats
from batchinfer.report.from_calls import CallLog
from batchinfer.report.report_data import ReportData

_LOG = logging.getLogger(__name__)


class Calls:
    """Runs the requests of one call at a time; its numbers may be asked for meanwhile."""

    def __init__(self, context: EngineContext) -> None:
        self._engine = context.engine
        self._device = context.device
        self._pool: dict[str, int] = {name: getattr(context, name) for name in KV_FACTS}
        self.reset()

    def reset(self) -> None:
        """Begin the numbers anew; of a call that runs, the steps to come count."""
        self._measured = MetricsCollector(self._pool["block_size"])
        self._log = CallLog()

    def add(self, requests: Sequence[Request]) -> None:
        """Have the call that runs run these as well; between two of its completions."""
        for request in requests:
            self._engine.add_request(request)

    def run(self, requests: Sequence[Request], meter: Meter) -> Generator[Completion, None, None]:
        """Run requests to their ends; interrupted, the engine forgets the rest.

        Args:
            meter: counts each step, for a progress bar.
        """
        engine, began = self._engine, time.perf_counter()
        try:
            self.add(requests)
            while engine.num_unfinished:
                outcome = engine.step()
                now = time.perf_counter()
                self._measured.seconds += now - began
                began = now
                rows = [completion.stats for completion in outcome.completions]
                self._measured.add(outcome.stats, rows)
                self._log.add(outcome.stats, rows, self._measured.seconds)
                meter.add(Counts(len(rows), tokens=outcome.output_tokens), outcome.stats)
                if outcome.recovered is not None:
                    _LOG.warning("%s", outcome.recovered)
                yield from outcome.completions
        finally:
            engine.abort_all()
            self._measured.seconds += time.perf_counter() - began

    def stats(self) -> Stats:
        """Tokens, throughput and pool of the calls so far, as ``LLM.stats`` gives them."""
        measures = self._measured.metrics()
        return Stats({**measures, "kv": {**self._pool, **measures["kv"]}})

    def report_data(self, model: str, settings: Mapping[str, Any]) -> ReportData:
        """Return the data of a report about the calls so far.

        Args:
            settings: sections, with their keys and values.
        """
        return self._log.report_data(model, self._device, self._pool, settings)


class OneCall:
    """Lets calls in one after another, from whatever thread they come.

    Args:
        refused: calls that the model is not loaded for, and why.
    """

    def __init__(self, refused: Mapping[str, str] | None = None) -> None:
        self._refused = refused or {}
        self._lock = threading.Lock()
        self._caller: int | None = None

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Wait for the call that runs, then keep others waiting.

        Raises:
            RuntimeError: the call that runs is this thread's own, so that it would wait for ever.
            ValueError: the model is not loaded for it.
        """
        if name in self._refused:
            raise ValueError(f"LLM.{name}: {self._refused[name]}")
        thread = threading.get_ident()
        if self._caller == thread:
            raise RuntimeError(
                f"{name} is called from within another call of the same LLM "
                "(a signal handler or a callback); call it when that one has returned"
            )
        with self._lock:
            self._caller = thread
            try:
                yield
            finally:
                self._caller = None
