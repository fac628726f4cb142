"""Serves a run's Prometheus metrics on a port, or writes them to a file for the node exporter.

Names follow prometheus.io/docs/practices/naming: counters end in ``_total``, and times are in
seconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from batchinfer.console.format import first_line, printable
from batchinfer.console.text_view import Display
from batchinfer.errors import StorageError, UsageError, install_command
from batchinfer.job.run.threads import Repeater
from batchinfer.job.stats.live import WatchedRun

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

FILE_EVERY_S = 5.0
_PORT = re.compile(r"(?:(?P<host>[^/:]+|\[[0-9a-fA-F:]+\]):)?(?P<port>-?[0-9]+)")
_COUNTERS = {
    "rows_finished": ("rows", "Rows that this run has finished."),
    "output_tokens": ("tokens", "Output tokens that this run has drawn."),
    "prefill_tokens": (
        "prefill_tokens",
        "Tokens computed for prompts, including recomputed tokens.",
    ),
    "preemptions": ("preemptions", "Sequences that lost their KV blocks."),
}
"""For each metric, the field of ``Counts`` that it shows, and its description."""
_OF_STEP = {
    "kv_blocks": ("kv_blocks_total", "KV blocks in the pool."),
    "kv_blocks_used": ("kv_blocks_used", "KV blocks of unfinished sequences."),
    "kv_blocks_shared": ("kv_blocks_shared", "KV blocks that several sequences share."),
    "kv_blocks_cached": ("kv_blocks_cached", "KV blocks kept for reuse."),
    "sequences_running": ("num_running", "Sequences with KV blocks."),
    "sequences_waiting": ("num_waiting", "Sequences in the queue."),
}
"""For each metric, the field of ``StepStats`` that it shows, and its description."""


def serve_metrics(
    where: str | None, watched: WatchedRun, display: Display
) -> AbstractContextManager[None]:
    """Serve metrics of a run, or write them to a file, while the context is active.

    Args:
        where: a port on this machine, ``host:port``, or a file; None for no metrics.

    Raises:
        UsageError: the port is invalid or taken, or prometheus_client is not installed.
        StorageError: the file cannot be written.
    """
    if where is None:
        return nullcontext()
    try:
        from prometheus_client import CollectorRegistry
    except ImportError:
        raise UsageError(
            f"--metrics needs the package prometheus_client: {install_command('metrics')}"
        ) from None
    registry = CollectorRegistry()
    registry.register(_Collector(watched))
    address = _PORT.fullmatch(where)
    if address is None and ":" in where and "/" not in where:
        raise UsageError(
            f"--metrics {printable(where)!r}: the text after the colon is not a port",
            hint=f"write host:port, or ./{printable(where)} for a file with that name",
        )
    if address is None:
        return _in_file(where, registry)
    return _on_port(address["host"] or "127.0.0.1", int(address["port"]), registry, display)


@contextmanager
def _on_port(host: str, port: int, registry: CollectorRegistry, display: Display) -> Iterator[None]:
    from prometheus_client import start_http_server

    place = f"{host}:{port}"
    if not 0 <= port < 1 << 16:
        raise UsageError(f"--metrics {place}: the port must be from 0 to 65535")
    try:
        server, thread = start_http_server(port, host.strip("[]"), registry)
    except OSError as error:
        raise UsageError(
            f"--metrics {place}: {error.strerror or first_line(error)}",
            hint="give another port, or a file",
        ) from None
    try:
        url = f"http://{host}:{server.server_port}/metrics"
        display.say("metrics", f"metrics are available at {url}", url=url)
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def _in_file(path: str, registry: CollectorRegistry) -> Iterator[None]:
    from prometheus_client import write_to_textfile

    def write() -> None:
        with suppress(OSError):  # a run must not fail because of its metrics
            write_to_textfile(path, registry)

    try:
        if Path(path).exists() and not Path(path).is_file():
            raise ValueError("it is not a regular file")  # otherwise, root could replace /dev/null
        write_to_textfile(path, registry)
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or first_line(error)
        raise StorageError(
            f"--metrics {printable(path)!r} cannot be written: {reason}",
            hint="name a file in an existing folder",
        ) from None
    try:
        with Repeater(write, FILE_EVERY_S):
            yield
    finally:
        write()


class _Collector:
    def __init__(self, watched: WatchedRun) -> None:
        self._watched = watched
        self._job = printable(watched.name, 200)

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        yield from self._phases()
        meter = self._watched.meter
        if meter is None:
            return
        counter = partial(self._family, CounterMetricFamily)
        gauge = partial(self._family, GaugeMetricFamily)
        for name, (field, what) in _COUNTERS.items():
            yield counter(name, what, getattr(meter.counts, field))
        reused = "Rows that this run has copied from other outputs."
        yield counter("rows_reused", reused, meter.reused)
        yield counter("rows_failed", "Rows that ended in an error.", meter.failed)
        yield gauge("rows", "Rows of the job or shard.", meter.before + meter.total)
        before = "Rows that other runs have finished."
        yield gauge("rows_finished_before", before, meter.before)
        yield gauge("rows_running", "Rows in the engine.", meter.rows_running)
        share = "Share of the work that is done; running rows count by their tokens."
        yield gauge("progress_ratio", share, meter.share)
        if meter.eta_s is not None:
            yield gauge("eta_seconds", "Seconds until all rows are finished.", meter.eta_s)
        step = meter.step
        for name, (field, what) in _OF_STEP.items() if step is not None else ():
            yield gauge(name, what, getattr(step, field))

    def _phases(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily

        phases = self._watched.phases
        seconds, current = dict(phases.seconds), phases.current
        if current is not None:
            seconds[current[0]] = seconds.get(current[0], 0.0) + current[2]
        name, what = "batchinfer_phase_seconds", "Seconds of each phase, by the phase's name."
        family = CounterMetricFamily(name, what, labels=("job", "phase"))
        for phase, lasted_s in seconds.items():
            family.add_metric((self._job, phase), lasted_s)
        yield family

    def _family(
        self,
        kind: type[CounterMetricFamily | GaugeMetricFamily],
        name: str,
        what: str,
        value: float,
    ) -> Metric:
        family = kind(f"batchinfer_{name}", what, labels=("job",))
        family.add_metric((self._job,), value)
        return family
