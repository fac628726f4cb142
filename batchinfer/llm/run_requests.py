"""Runs the requests of calls on an ``LLM``'s engine, one call at a time, with statistics."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, Literal

from tqdm.auto import tqdm

from batchinfer.builders.context import EngineContext
from batchinfer.console.meter import Counts, Meter
from batchinfer.engine.metrics import KV_FACTS, MetricsCollector
from batchinfer.engine.request import Completion, Request
from batchinfer.llm.outputs import Stats
from batchinfer.process.process import gc_frozen
from batchinfer.report.from_calls import CallLog
from batchinfer.report.report_data import ReportData
from batchinfer.requests.branch_points import with_branch_points

OnError = Literal["raise", "return"]
"""What happens if a prompt cannot run: the call raises, or the prompt's output has an ``error``.
"""
ProgressBar = bool | Callable[..., Any]
"""True to show a progress bar, or a function that takes tqdm's arguments and returns a bar."""

_LOG = logging.getLogger(__name__)


class RequestRunner:
    """Runs the requests of one call at a time. Statistics can be read at any time.

    Args:
        refused: names of calls that the model does not support, with the reasons.
    """

    def __init__(self, context: EngineContext, refused: Mapping[str, str]) -> None:
        self._engine = context.engine
        self._keeps_states = context.slots_per_state > 0
        self._device = context.device
        self._pool: dict[str, int] = {name: getattr(context, name) for name in KV_FACTS}
        self._refused = refused
        self._lock = threading.Lock()
        self._caller: int | None = None
        self.reset()

    @contextmanager
    def one_call(self, name: str) -> Iterator[None]:
        """Wait until the active call has ended, and make later calls wait for this call.

        Raises:
            RuntimeError: the active call belongs to this thread, so waiting would never end.
            ValueError: the model does not support this call.
        """
        if name in self._refused:
            raise ValueError(f"LLM.{name}: {self._refused[name]}")
        thread = threading.get_ident()
        if self._caller == thread:
            raise RuntimeError(
                f"{name} was called during another call of the same LLM (from a "
                "signal handler or a callback); call it after that call has "
                "returned"
            )
        with self._lock:
            self._caller = thread
            try:
                yield
            finally:
                self._caller = None

    @contextmanager
    def completions(
        self, requests: Sequence[Request], num_prompts: int, use_tqdm: ProgressBar
    ) -> Iterator[tuple[Iterator[Completion], Meter, Any]]:
        """Run requests until they finish; if the ``with`` block ends early, abort the others.

        Yields:
            The completions in the order in which they finish, a meter of the rates so far, and a
            progress bar of ``num_prompts`` steps, which the caller advances.
        """
        meter = Meter(num_prompts)
        if callable(use_tqdm):
            bar = use_tqdm(total=num_prompts, desc="prompts", dynamic_ncols=True)
        else:
            bar = tqdm(total=num_prompts, disable=not use_tqdm, unit=" prompts")
        with closing(bar), closing(self._run(requests, meter)) as completions, gc_frozen():
            yield completions, meter, bar

    def add(self, requests: Sequence[Request]) -> None:
        """Add requests to the active call, between two of its completions."""
        for request in requests:
            self._engine.add_request(request)

    def _run(self, requests: Sequence[Request], meter: Meter) -> Generator[Completion, None, None]:
        engine, began = self._engine, time.perf_counter()
        try:
            self.add(with_branch_points(requests) if self._keeps_states else requests)
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

    def reset(self) -> None:
        """Reset the statistics; if a call is active, its later steps are still counted."""
        self._measured = MetricsCollector(self._pool["block_size"])
        self._log = CallLog()

    def stats(self) -> Stats:
        """Return tokens, throughput and KV cache use of the calls so far."""
        measures = self._measured.metrics()
        return Stats({**measures, "kv": {**self._pool, **measures["kv"]}})

    def report_data(self, model: str, settings: Mapping[str, Any]) -> ReportData:
        """Return the data of a report on the calls so far."""
        return self._log.report_data(model, self._device, self._pool, settings)
