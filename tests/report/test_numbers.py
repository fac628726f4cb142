"""The numbers of a report equal those of ``summary.json`` and of the stored steps."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.errors import ExitCode, StorageError
from batchinfer.job.output import part_writer
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.run import pipeline
from batchinfer.job.run.run_job import run_job
from batchinfer.job.stats.status import read_status
from batchinfer.report.charts import all_series
from batchinfer.report.from_output import from_output
from batchinfer.report.histograms import COLUMNS as REQUEST_COLUMNS
from batchinfer.report.histograms import SUMS, Lengths
from batchinfer.report.report_data import ReportData
from batchinfer.report.timeline import COLUMNS as STEP_COLUMNS
from batchinfer.report.timeline import FLOWS, POINTS, Timeline
from tests.job.datasets import write_parquet
from tests.job.fakes import AtOnce, FakeBuild, job
from tests.job.output.test_resume import Build, fail_at, stop_at

LENIENT: dict[str, Any] = {"errors": {"max_error_rate": 1}}


def dataset(path: Path, rows: int = 40) -> None:
    """Write rows with a common prefix, one of them bad."""
    prompts = [f"The same instruction for every row. {row * 37 % 101}" for row in range(rows)]
    prompts[11] = ""
    write_parquet(path / "in" / "x.parquet", {"prompt": prompts})


def data_of(path: Path) -> ReportData:
    return from_output(OutputDir(path / "out"), time.time())


@pytest.mark.parametrize("num_blocks", [128, 30])
@pytest.mark.parametrize("every_steps", [1, 7])
def test_numbers_equal_the_summary(tmp_path: Path, num_blocks: int, every_steps: int) -> None:
    dataset(tmp_path)
    spec = job(tmp_path, stats={"every_steps": every_steps}, sampling={"n": 2}, **LENIENT)
    assert run_job(spec, build=FakeBuild(num_blocks), quiet=True) is ExitCode.OK
    summary = json.loads((tmp_path / "out" / "summary.json").read_bytes())
    found, kv, tokens = data_of(tmp_path), summary["kv"], summary["tokens"]
    totals, sums = found.timeline.totals, found.lengths.sums
    for name in ("mean_utilization", "mean_waste", "contiguous_waste", "sharing_saving"):
        assert totals.mean(name) == pytest.approx(kv[name], rel=1e-9), name
    assert found.prefix_hit_rate == pytest.approx(kv["prefix_hit_rate"])
    assert found.planned_rate == pytest.approx(summary["sharing"]["planned_rate"])
    assert totals.cow_copies == kv["cow_copies"]
    assert sums["preemptions"] == kv["preemptions"]
    assert (sums["prompt_tokens"], sums["output_tokens"]) == (tokens["prompt"], tokens["output"])
    times = summary["time_s"]
    assert (found.total_s, found.load_s, found.engine_s) == pytest.approx(
        (times["total"], times["load"], times["engine"])
    )
    assert found.phases == times["phases"]
    assert found.output_tokens_per_s == pytest.approx(summary["throughput"]["output_tokens_per_s"])
    assert (found.state, found.rows_done, found.rows_failed) == ("finished", 40, 1)
    assert found.unit == "sequence"


def test_device_names_the_kernels(tmp_path: Path) -> None:
    class Build(FakeBuild):
        def __call__(self, *arguments: Any, **options: Any) -> Any:
            built = super().__call__(*arguments, **options)
            built.kernels = {"float32": "own AVX2", "int8": "own int8", "attention": "own AVX2"}
            return built

    dataset(tmp_path)
    run_job(job(tmp_path, **LENIENT), build=Build(), quiet=True)
    assert data_of(tmp_path).device == "fake, own AVX2 (float32, attention), own int8 (int8)"


def test_numbers_grow_while_the_job_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset(tmp_path)
    monkeypatch.setattr(part_writer, "FLUSH_ROWS", 1)
    monkeypatch.setattr(pipeline, "BackgroundConsumer", AtOnce)
    seen: list[ReportData] = []
    build = Build(lambda step: seen.append(data_of(tmp_path)))
    spec = job(tmp_path, engine={"order": "input"}, stats={"every_steps": 5}, **LENIENT)
    assert run_job(spec, build=build, quiet=True) is ExitCode.OK
    assert {found.state for found in seen} == {"running"}
    rows = [found.rows_done for found in seen]
    assert rows == sorted(rows)
    assert rows[-1] > 20
    # Lengths cover all finished rows except the failed one, whether in parts or in segments.
    assert [found.lengths.rows for found in seen[1:]] == [max(0, done - 1) for done in rows[1:]]
    steps = [found.timeline.totals.steps for found in seen]
    assert steps == sorted(steps)
    assert seen[-1].failures[0].code == "empty_prompt"
    assert seen[-1].failures[0].rows == 1


def test_timeline_joins_consecutive_runs(tmp_path: Path) -> None:
    dataset(tmp_path)
    sections: dict[str, Any] = {"output": {"rows_per_part": 100}, "stats": {"every_steps": 7}}
    run_job(job(tmp_path, **sections, **LENIENT), build=Build(stop_at(20)), quiet=True)
    first = data_of(tmp_path)
    assert first.state == "stopped"
    run_job(job(tmp_path, **sections, **LENIENT), build=Build(), quiet=True)
    found = data_of(tmp_path)
    steps = pq.read_table(tmp_path / "out" / "stats" / "steps.parquet")
    spans = steps.group_by("run_id").aggregate([("t_s", "max")])["t_s_max"].to_pylist()
    assert len(spans) == 2
    assert found.timeline.span_s == pytest.approx(sum(spans))
    for name in FLOWS:
        over_time = found.timeline.mean(name).mean() * found.timeline.span_s
        assert over_time == pytest.approx(pc.sum(steps[name]).as_py()), name
    assert [run.end for run in found.runs] == ["ended", "ended"]


def test_error_of_a_failed_run_is_shown_until_another_run_goes_on(tmp_path: Path) -> None:
    dataset(tmp_path)
    error = StorageError("the disk is full", hint="free some space")
    with pytest.raises(StorageError):
        run_job(job(tmp_path, **LENIENT), build=Build(fail_at(9, error)), quiet=True)
    failed = data_of(tmp_path)
    assert (failed.state, failed.error) == ("failed", "the disk is full\nfree some space")
    assert [run.end for run in failed.runs] == ["failed"]
    status = read_status(OutputDir(tmp_path / "out"), time.time())
    assert status.state == "failed"
    assert "error    the disk is full" in status.lines()
    run_job(job(tmp_path, **LENIENT), build=Build(stop_at(9)), quiet=True)
    stopped = data_of(tmp_path)
    assert (stopped.state, stopped.error) == ("stopped", "")
    assert [run.end for run in stopped.runs] == ["failed", "ended"]
    with pytest.raises(ZeroDivisionError):
        run_job(job(tmp_path, **LENIENT), build=Build(fail_at(1, ZeroDivisionError())), quiet=True)
    found = data_of(tmp_path)
    assert found.error == "a bug in batchinfer (ZeroDivisionError); see its crash log"


@pytest.mark.parametrize("num_blocks", [128, 30])
def test_chart_areas_equal_sums_over_the_steps(tmp_path: Path, num_blocks: int) -> None:
    dataset(tmp_path)
    sections: dict[str, Any] = {"sampling": {"n": 2}, **LENIENT}
    run_job(job(tmp_path, **sections), build=FakeBuild(num_blocks), quiet=True)
    found = data_of(tmp_path)
    table = pq.read_table(tmp_path / "out" / "stats" / "steps.parquet")
    steps = {name: table[name].to_numpy().astype(float) for name in STEP_COLUMNS}
    lasted = np.diff(steps["t_s"], prepend=0.0)
    held, logical = steps["kv_blocks_used"], steps["kv_logical_blocks"]
    waste, again = held * steps["kv_waste"], steps["recomputed_tokens"]
    areas = {
        ("memory", "contiguous"): steps["contiguous_blocks"] @ lasted,
        ("memory", "logical"): logical @ lasted,
        ("memory", "used"): held @ lasted,
        ("held", "waste"): waste @ lasted,
        ("held", "saved"): (logical - held) @ lasted,
        ("pool", "used"): held @ lasted,
        ("pool", "cached"): steps["kv_blocks_cached"] @ lasted,
        ("running", "used"): steps["num_running"] @ lasted,
        ("waiting", "idle"): steps["num_waiting"] @ lasted,
        ("tokens", "used"): steps["decode_tokens"].sum(),
        ("tokens", "shared"): (steps["prefill_tokens"] - again).sum(),
    }
    series = all_series(found)
    width, block_bytes = found.timeline.span_s / POINTS, found.kv["bytes_per_block"]
    for (chart, color), expected in areas.items():
        (layer,) = (layer for layer in series[chart].layers if layer.color == color)
        area = layer.values.sum() * width
        assert area == pytest.approx(
            expected * (block_bytes if series[chart].unit == "bytes" else 1)
        ), (chart, color)
    in_use = sum(layer.values for layer in series["held"].layers[:3])
    assert in_use == pytest.approx(found.timeline.mean("kv_blocks_used"))
    assert {layer.color for layer in series["held"].layers[:3]} == {"used", "waste", "shared"}


def test_job_without_good_rows_has_no_numbers(tmp_path: Path) -> None:
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": [""]})
    run_job(job(tmp_path, **LENIENT), build=FakeBuild(), quiet=True)
    found = data_of(tmp_path)
    assert (found.timeline.totals.steps, found.lengths.rows) == (0, 0)
    assert found.lengths.bars("prompt_tokens") is None
    assert found.lengths.time_s("latency_ms", 0.5) == 0.0


@pytest.mark.parametrize("stop", [-1, 60])
def test_columns_missing_in_old_outputs_count_as_zero(tmp_path: Path, stop: int) -> None:
    dataset(tmp_path)
    run_job(job(tmp_path, **LENIENT), build=Build(stop_at(stop)), quiet=True)
    before = data_of(tmp_path)
    for path in (tmp_path / "out").rglob("*.parquet"):
        table = pq.read_table(path)
        if "request" in table.column_names:
            at = table.column_names.index("request")
            taken = table["request"].combine_chunks()
            fields = [field for field in taken.type if field.name != "deduplicated"]
            values = [taken.field(field.name) for field in fields]
            older = pa.StructArray.from_arrays(values, fields=fields, mask=taken.is_null())
            pq.write_table(table.set_column(at, "request", older), path)
        for name in {"deduplicated", "swapped_blocks"}.intersection(table.column_names):
            table = table.drop_columns([name])
            pq.write_table(table, path)
    found = data_of(tmp_path)
    assert found.lengths.rows == before.lengths.rows > 0
    assert found.timeline.totals.steps == before.timeline.totals.steps > 0
    assert found.lengths.sums["deduplicated"] == 0


def test_damaged_files_are_left_out(tmp_path: Path) -> None:
    dataset(tmp_path)
    run_job(job(tmp_path, **LENIENT), build=Build(stop_at(60)), quiet=True)
    out = tmp_path / "out"
    for path in (out / "_batchinfer" / "segments").iterdir():
        path.write_bytes(b"zork")
    for folder in ("steps", "requests", "runs"):
        for path in (out / "_batchinfer" / folder).iterdir():
            path.write_bytes(path.read_bytes()[:-30])
    for path in (out / "data").iterdir():
        path.write_bytes(b"")
    found = data_of(tmp_path)
    assert (found.state, found.timeline.totals.steps, found.lengths.rows) == ("stopped", 0, 0)


def test_resolved_job_has_no_secrets(tmp_path: Path) -> None:
    dataset(tmp_path)
    name = "s3://key:secret@store/x?X-Amz-Signature=secret"
    spec = job(tmp_path, **LENIENT).model_copy(update={"name": name})
    run_job(spec, build=FakeBuild(), quiet=True)
    found = data_of(tmp_path)
    assert "secret" not in str(found.job)
    assert "secret" not in found.title
    assert found.job["engine"]["max_num_seqs"] == spec.engine.max_num_seqs
    assert found.job["sampling"]["max_tokens"] == 8


@st.composite
def steps(draw: st.DrawFn) -> dict[str, Any]:
    count = draw(st.integers(1, 900))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    columns = {name: rng.integers(0, 1000, count).astype(float) for name in STEP_COLUMNS}
    columns["step_ms"] = rng.exponential(1e3, count) * (rng.random(count) > 0.1)
    columns["t_s"] = np.cumsum(columns["step_ms"] / 1e3)
    columns["kv_waste"] = rng.random(count)
    return columns


@given(columns=steps(), cut=st.floats(0, 1))
def test_timeline_points_are_means_of_their_slices(columns: dict[str, Any], cut: float) -> None:
    span = float(columns["t_s"][-1])
    at = int(cut * len(columns["t_s"]))
    parts = [{name: values[:at] for name, values in columns.items()}]
    parts.append({name: values[at:] for name, values in columns.items()})
    timeline = Timeline(span)
    began = 0.0
    for part in parts:
        timeline.add(part, began, 0.0, 16, 2)
        began = float(part["t_s"][-1]) if len(part["t_s"]) else began
    lasted = np.diff(columns["t_s"], prepend=0.0)
    width = max(span, 1e-9) / POINTS
    area = timeline.mean("num_running").sum() * width
    assert area == pytest.approx(float(columns["num_running"] @ lasted), abs=1e-6)
    area = timeline.mean("kv_blocks_used").sum() * width
    assert area == pytest.approx(2 * float(columns["kv_blocks_used"] @ lasted), abs=1e-6)
    for name in FLOWS:
        assert timeline.mean(name).sum() * width == pytest.approx(columns[name].sum(), abs=1e-6)
    longest = columns["num_running"].max()
    assert timeline.mean("num_running").max() <= longest * (1 + 1e-9)
    assert timeline.peak.running == longest


@given(lengths=st.lists(st.integers(0, 5000), min_size=1, max_size=300), scale=st.integers(1, 500))
def test_histogram_counts_every_row_once(lengths: list[int], scale: int) -> None:
    collected = Lengths()
    values = np.array([length * scale for length in lengths], dtype=float)
    collected.add(dict.fromkeys(REQUEST_COLUMNS, values))
    bars = collected.bars("prompt_tokens")
    assert sum(bars.counts) == len(lengths)
    assert 1 <= len(bars.counts) <= 40
    assert bars.most == values.max()
    assert bars.median == np.sort(values)[(len(values) - 1) // 2]
    assert collected.time_s("latency_ms", 1.0) == pytest.approx(values.max() / 1e3, rel=0.02)
    assert collected.sums["prompt_tokens"] == values.sum()
    assert set(SUMS) == set(collected.sums)
