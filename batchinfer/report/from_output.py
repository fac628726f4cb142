"""Reads the data of a report from an output directory; the job may still run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from batchinfer.errors import DataError
from batchinfer.job.manifest import Manifest
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.part_record import PartRecord
from batchinfer.job.output.resume import plan_of
from batchinfer.job.row_ids import Part
from batchinfer.job.rows.tasks import TASKS
from batchinfer.job.stats.first_errors import id_column
from batchinfer.job.stats.recorder import Run, engine_wall_s, package_versions, runs_of, wall_s
from batchinfer.job.stats.status import Status, read_status
from batchinfer.job.stats.summary import phase_seconds
from batchinfer.report.examples import find_examples, find_failures
from batchinfer.report.lanes import lanes_of
from batchinfer.report.report_data import ReportData, RunFacts
from batchinfer.report.sanitize import without_secrets
from batchinfer.report.stored_stats import FinishedRows, read_lengths, read_timeline
from batchinfer.report.units import moment

_MOST_FILES = 12
_MAX_ERROR_RATE = 0.01  # used if no run has recorded its job


def from_output(out: OutputDir, now: float) -> ReportData:
    """Read the finished rows of ``out``, a batch at a time; ``now`` is in seconds since 1970.

    Raises:
        DataError: ``out`` holds no job's output, or its plan is damaged.
    """
    plan = plan_of(out)
    status = read_status(out, now)
    # Read first, because rows move from segments to parts.
    segments = out.files.entries(out.segments)
    records = list(_records(out, plan))
    done = FinishedRows([part.rows for part, _ in records])
    runs = list(runs_of(out))
    latest = ([run for run in runs if run.kv] or runs or [Run("", {})])[-1]
    job = latest.job or plan.job
    sampling = job.get("sampling") or {}
    merged = len(records) == len(plan.parts()) and out.files.stat(out.summary) is not None
    steps, requests = [out.stats / "steps.parquet"], [out.stats / "requests.parquet"]
    if not merged:
        steps = list(out.files.entries(out.steps))
        requests = [out.request_stats(part) for part, _ in records]
    timeline = read_timeline(out, steps, runs, merged)
    max_error_rate = (job.get("errors") or {}).get("max_error_rate", _MAX_ERROR_RATE)
    running = {worker.worker for worker in status.workers if worker.state == "running"}
    task = TASKS.get(plan.job.get("task", "generate"))
    return ReportData(
        title=without_secrets(str(job.get("name") or out.root.name)),
        state=_state(status, max_error_rate, merged),
        when=", ".join(filter(None, [moment(runs[-1].saved_at if runs else 0.0), _update(status)])),
        model=without_secrets(str(latest.model.get("name", ""))),
        device=_device(latest),
        rows_total=status.rows_total,
        rows_done=status.rows_done,
        rows_failed=status.rows_error,
        total_s=sum(run.total_s for run in runs),
        load_s=sum(run.load_s for run in runs),
        engine_s=engine_wall_s(runs),
        wall_s=wall_s(runs),
        timeline=timeline,
        lengths=read_lengths(out, requests, segments, done),
        kv=latest.kv,
        unit="sequence" if (sampling.get("n") or 1) > 1 or sampling.get("beam_width") else "row",
        draws=task is None or task.spec.draws,
        phases=phase_seconds(runs),
        rows_reused=sum(record.num_reused for _, record in records),
        max_error_rate=max_error_rate,
        share=status.share,
        eta_s=status.eta_s,
        eta_is_most=status.eta_is_most,
        phase=status.phase or "",
        error=without_secrets(status.error or ""),
        out_of_memory=sum(run.out_of_memory for run in runs),
        failures=find_failures(out, records, segments, done, id_column(plan)),
        examples=find_examples(out, records, task),
        runs=[_facts(run) for run in runs],
        lanes=lanes_of(runs, timeline, set() if merged else running),
        job=_sections(job, plan),
        versions=package_versions(),
    )


def _records(out: OutputDir, plan: Manifest) -> Iterator[tuple[Part, PartRecord]]:
    for part in plan.parts():
        with suppress(DataError):
            record = out.read_record(part)
            if record is not None:
                yield part, record


def _state(status: Status, max_error_rate: float, merged: bool) -> str:
    """Return the job's state. A run writes its report at its end, before it writes ``_SUCCESS``."""
    if merged or status.state == "finished_with_errors":
        too_many = status.rows_error > max_error_rate * status.rows_total
        return "finished with too many errors" if too_many else "finished"
    return status.state


def _update(status: Status) -> str:
    line = None if status.update is None else status.update.line
    return "" if line is None else f"{line.label}: {line.value}{line.note}"


def _facts(run: Run) -> RunFacts:
    end = "failed" if run.error else "ended" if run.ended else "not ended"
    times = (run.load_s, run.total_s, run.saved_at)
    return RunFacts(run.run_id, _device(run), run.rows, *times, end)


def _device(run: Run) -> str:
    """Return a run's device, and each kernel library with the layers that it computed."""
    computed: dict[str, list[str]] = {}
    for what, name in run.kernels.items():
        computed.setdefault(name, []).append(what)
    used = [f"{name} ({', '.join(what)})" for name, what in computed.items()]
    return ", ".join(filter(None, [run.device, *used]))


def _sections(job: Mapping[str, Any], plan: Manifest) -> dict[str, dict[str, Any]]:
    """Return the sections of the job; keys outside a section come first."""
    plain = {key: value for key, value in job.items() if not isinstance(value, dict) or not value}
    sections = {key: value for key, value in job.items() if key not in plain}
    files = {file.path: f"{file.num_rows:,} rows" for file in plan.inputs[:_MOST_FILES]}
    if len(plan.inputs) > _MOST_FILES:
        files["and"] = f"{len(plan.inputs) - _MOST_FILES:,} more files"
    sections.pop("model_facts", None)  # contains only hashes
    shown: dict[str, dict[str, Any]] = without_secrets(
        {"job": plain, **sections, "input files": files}
    )
    return shown
