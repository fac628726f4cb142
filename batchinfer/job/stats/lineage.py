"""Makes a run's OpenLineage event, for data catalogs.

The event is a RunEvent of version 2-0-2 of the specification
(openlineage.io/spec/2-0-2/OpenLineage.json) with the facets ``schema``, ``inputStatistics``,
``outputStatistics`` and ``processing_engine``. A run writes the event under ``lineage`` in
``summary.json``, but does not send it anywhere.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import PurePath
from typing import Any

import pyarrow as pa

from batchinfer.job.input.format import InputFile
from batchinfer.job.manifest import Manifest
from batchinfer.job.storage.urls import scheme_of

_SPEC = "https://openlineage.io/spec"
_EVENT = f"{_SPEC}/2-0-2/OpenLineage.json#/$defs/RunEvent"
_FACETS = {
    "schema": "1-0-0/SchemaDatasetFacet",
    "inputStatistics": "1-0-0/InputStatisticsInputDatasetFacet",
    "outputStatistics": "1-0-0/OutputStatisticsOutputDatasetFacet",
    "processing_engine": "1-1-1/ProcessingEngineRunFacet",
}
MOST_DATASETS = 100
"""Maximum number of input files to list one by one. If there are more files, the event lists their
folders instead, because each entry repeats the schema.
"""
NAMESPACE = "batchinfer"
"""Namespace of jobs. The namespace of files is ``file`` or the store's bucket."""


def run_event(
    job_name: str,
    manifest: Manifest,
    *,
    inputs: pa.Schema,
    outputs: pa.Schema,
    output_root: PurePath,
    output_sizes: Iterable[int],
    versions: Mapping[str, str],
    rows_out: int,
    failed: bool,
    ended_at: datetime | None = None,
) -> dict[str, Any]:
    """Make the event for the end of a job.

    Args:
        output_sizes: size of each part in bytes.
        versions: package versions, keyed by name.
        failed: True if more rows failed than the job allows.
        ended_at: time of the end; None for now.
    """
    producer = f"urn:{NAMESPACE}:{versions['batchinfer']}"
    namespace, name = _dataset_name(str(output_root / "data"))

    def facet(facet_name: str, **values: object) -> dict[str, Any]:
        version, _, definition = _FACETS[facet_name].partition("/")
        url = f"{_SPEC}/facets/{version}/{definition}.json#/$defs/{definition}"
        return {facet_name: {"_producer": producer, "_schemaURL": url, **values}}

    def input_dataset(place: str, files: Sequence[InputFile]) -> dict[str, Any]:
        namespace, name = _dataset_name(place)
        rows, size = sum(file.num_rows for file in files), sum(file.size for file in files)
        return {
            "namespace": namespace,
            "name": name,
            "facets": facet("schema", fields=_fields(inputs)),
            "inputFacets": facet("inputStatistics", rowCount=rows, size=size),
        }

    engine = {"version": versions["batchinfer"], "name": NAMESPACE}
    return {
        "eventType": "FAIL" if failed else "COMPLETE",
        "eventTime": (ended_at or datetime.now(UTC)).isoformat(timespec="milliseconds"),
        "producer": producer,
        "schemaURL": _EVENT,
        "run": {
            # A job that was interrupted and resumed keeps its planning time, so it has a single
            # run id.
            "runId": str(uuid.uuid5(uuid.NAMESPACE_URL, f"{output_root}#{manifest.planned_at}")),
            "facets": facet("processing_engine", **engine),
        },
        "job": {"namespace": NAMESPACE, "name": job_name or output_root.name, "facets": {}},
        "inputs": [input_dataset(*dataset) for dataset in _datasets(manifest.inputs)],
        "outputs": [
            {
                "namespace": namespace,
                "name": name,
                "facets": facet("schema", fields=_fields(outputs)),
                "outputFacets": facet(
                    "outputStatistics", rowCount=rows_out, size=sum(output_sizes)
                ),
            }
        ],
    }


def _datasets(files: Sequence[InputFile]) -> Iterable[tuple[str, Sequence[InputFile]]]:
    """Group files into at most ``MOST_DATASETS`` datasets: one per file, per folder, or for all."""
    levels: tuple[Callable[[str], str], ...] = (str, _folder, lambda path: common)
    names = zip(*(_folder(file.path).split("/") for file in files), strict=False)
    common = "/".join(same[0] for same in takewhile(lambda each: len({*each}) == 1, names))
    for level in levels:
        places: dict[str, list[InputFile]] = {}
        for file in files:
            places.setdefault(level(file.path), []).append(file)
        if len(places) <= MOST_DATASETS:
            break
    return places.items()


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def _dataset_name(path: str) -> tuple[str, str]:
    """Return the namespace and name of a path: bucket and key, or ``file`` and the path."""
    scheme = scheme_of(path)
    if scheme is None:
        return "file", path
    bucket, _, key = path.partition("://")[2].partition("/")
    return f"{scheme}://{bucket}", key


def _fields(schema: pa.Schema) -> Sequence[Mapping[str, str]]:
    return [{"name": field.name, "type": str(field.type)} for field in schema]
