"""The facts of a run as an OpenLineage event, which the specification's schema accepts."""

from __future__ import annotations

import json
import uuid
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import pytest

from batchinfer.errors import ExitCode
from batchinfer.job.input.format import InputFile
from batchinfer.job.run.run_job import run_job
from batchinfer.job.stats.lineage import _dataset_name, _datasets
from tests.job.datasets import write_parquet
from tests.job.fakes import FakeBuild, job
from tests.job.output.test_resume import Build, stop_at


def _object(required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": properties}


TEXT = {"type": "string", "minLength": 1}
FACETS = {
    "type": "object",
    "additionalProperties": _object(("_producer", "_schemaURL"), _producer=TEXT, _schemaURL=TEXT),
}
DATASETS = {
    "type": "array",
    "minItems": 1,
    "items": _object(
        ("namespace", "name"),
        namespace=TEXT,
        name=TEXT,
        facets=FACETS,
        inputFacets=FACETS,
        outputFacets=FACETS,
    ),
}
RUN_EVENT = _object(
    ("eventTime", "producer", "schemaURL", "run", "job"),
    eventType={"enum": ["START", "RUNNING", "COMPLETE", "ABORT", "FAIL", "OTHER"]},
    eventTime=TEXT,
    producer=TEXT,
    schemaURL=TEXT,
    run=_object(("runId",), runId=TEXT, facets=FACETS),
    job=_object(("namespace", "name"), namespace=TEXT, name=TEXT, facets=FACETS),
    inputs=DATASETS,
    outputs=DATASETS,
)
"""JSON Schema of the fields that OpenLineage 2-0-2 requires."""


def lineage(tmp_path: Path) -> dict[str, Any]:
    event: dict[str, Any] = json.loads((tmp_path / "out" / "summary.json").read_bytes())["lineage"]
    jsonschema.validate(event, RUN_EVENT)
    assert datetime.fromisoformat(event["eventTime"]).tzinfo is not None
    assert urlsplit(event["producer"]).scheme == "urn"
    return event


def test_lineage_of_an_interrupted_job_is_one_run(tmp_path: Path) -> None:
    path = tmp_path / "in" / "x.parquet"
    write_parquet(path, {"prompt": [f"{row} asks" for row in range(40)], "n": range(40)})
    spec = job(tmp_path).model_copy(update={"name": "daily"})
    assert run_job(spec, build=Build(stop_at(20)), quiet=True) is ExitCode.INTERRUPTED
    assert run_job(spec, build=FakeBuild(), quiet=True) is ExitCode.OK
    event = lineage(tmp_path)
    assert (event["eventType"], event["job"]["name"]) == ("COMPLETE", "daily")
    [read], [written] = event["inputs"], event["outputs"]
    assert (read["namespace"], read["name"]) == ("file", str(path))
    assert {"name": "n", "type": "int64"} in read["facets"]["schema"]["fields"]
    assert read["inputFacets"]["inputStatistics"]["rowCount"] == 40
    assert read["inputFacets"]["inputStatistics"]["size"] == path.stat().st_size
    data = tmp_path / "out" / "data"
    assert (written["namespace"], written["name"]) == ("file", str(data))
    assert {"name": "row_id", "type": "int64"} in written["facets"]["schema"]["fields"]
    statistics = written["outputFacets"]["outputStatistics"]
    assert statistics["rowCount"] == 40
    assert statistics["size"] == sum(part.stat().st_size for part in data.iterdir())
    (tmp_path / "out" / "_SUCCESS").unlink()
    assert run_job(spec, build=FakeBuild(), quiet=True) is ExitCode.OK
    assert lineage(tmp_path)["run"] == event["run"]
    assert uuid.UUID(event["run"]["runId"]).version == 5


def test_lineage_event_fails_with_too_many_row_errors(tmp_path: Path) -> None:
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": ["one", ""]})
    code = run_job(job(tmp_path), build=FakeBuild(), quiet=True)
    assert code is ExitCode.TOO_MANY_ROW_ERRORS
    assert lineage(tmp_path)["eventType"] == "FAIL"


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("s3://bucket/a/b.parquet", ("s3://bucket", "a/b.parquet")),
        ("hf://datasets/a/b", ("hf://datasets", "a/b")),
        ("/lake/x", ("file", "/lake/x")),
    ],
)
def test_lineage_names_of_datasets(path: str, named: tuple[str, str]) -> None:
    assert _dataset_name(path) == named


@pytest.mark.parametrize(("num_folders", "num_datasets"), [(1, 1), (60, 60), (150, 1)])
def test_lineage_lists_many_files_by_folder(num_folders: int, num_datasets: int) -> None:
    files = [
        InputFile(f"s3://lake/a/dt={at % num_folders:03d}/{at}.parquet", 10, 0, 3, "")
        for at in range(300)
    ]
    found = dict(_datasets(files))
    assert len(found) == num_datasets
    assert sum(map(len, found.values())) == 300
    assert next(iter(found)) in ("s3://lake/a", "s3://lake/a/dt=000")
    assert list(dict(_datasets(files[:100]))) == [file.path for file in files[:100]]
    assert not dict(_datasets([]))
