"""The facts of a run in OpenLineage's shape, for catalogues of data.

A RunEvent of the specification 2-0-2 (openlineage.io/spec/2-0-2/OpenLineage.json) with its facets
``schema``, ``inputStatistics``, ``outputStatistics`` and ``processing_engine``. Nothing is sent: it
is under ``lineage`` in ``summary.json``, for whoever sends it on.
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
"""Facet: its version and definition."""
MOST_DATASETS = 100
"""More input files than that are told of by their folders: each has the whole schema."""
NAMESPACE = "batchinfer"
"""The namespace of jobs; that of files is ``file``, or a store's bucket."""


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
    """The event that ends a job.

    Args:
        inputs: columns of the dataset.
        outputs: columns of the output.
        output_root: the output directory; its rows are in ``data`` there.
        output_sizes: bytes of each part.
        versions: of packages.
        rows_out: rows of the output.
        failed: whether more rows failed than the job allows.
        ended_at: None: now.
    """
    producer = f"urn:{NAMESPACE}:{versions['batchinfer']}"
    facets = _Facets(producer)
    sizes = list(output_sizes)
    namespace, name = _dataset_name(str(output_root / "data"))
    engine = {"version": versions["batchinfer"], "name": NAMESPACE}
    return {
        "eventType": "FAIL" if failed else "COMPLETE",
        "eventTime": (ended_at or datetime.now(UTC)).isoformat(timespec="milliseconds"),
        "producer": producer,
        "schemaURL": _EVENT,
        "run": {
            "runId": _run_id(manifest, output_root),
            "facets": facets.of("processing_engine", **engine),
        },
        "job": {"namespace": NAMESPACE, "name": job_name or output_root.name, "facets": {}},
        "inputs": [
            _input(place, files, inputs, facets) for place, files in _datasets(manifest.inputs)
        ],
        "outputs": [
            {
                "namespace": namespace,
                "name": name,
                "facets": facets.of("schema", fields=_fields(outputs)),
                "outputFacets": facets.of("outputStatistics", rowCount=rows_out, size=sum(sizes)),
            }
        ],
    }


def _run_id(manifest: Manifest, output_root: PurePath) -> str:
    """A job that was interrupted and went on is one run: it keeps the time it was planned at."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"{output_root}#{manifest.planned_at}"))


def _datasets(files: Sequence[InputFile]) -> Iterable[tuple[str, Sequence[InputFile]]]:
    """The files, each a dataset; of many their folders, or the one that all are in."""
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


def _input(
    place: str, files: Sequence[InputFile], schema: pa.Schema, facets: _Facets
) -> dict[str, Any]:
    namespace, name = _dataset_name(place)
    rows, size = sum(file.num_rows for file in files), sum(file.size for file in files)
    return {
        "namespace": namespace,
        "name": name,
        "facets": facets.of("schema", fields=_fields(schema)),
        "inputFacets": facets.of("inputStatistics", rowCount=rows, size=size),
    }


def _dataset_name(path: str) -> tuple[str, str]:
    """Namespace and name of a file or folder: its bucket and key, or ``file`` and its path."""
    scheme = scheme_of(path)
    if scheme is None:
        return "file", path
    bucket, _, key = path.partition("://")[2].partition("/")
    return f"{scheme}://{bucket}", key


def _fields(schema: pa.Schema) -> Sequence[Mapping[str, str]]:
    return [{"name": field.name, "type": str(field.type)} for field in schema]


class _Facets:
    """Makes facets, which all say who made them and by which definition."""

    def __init__(self, producer: str) -> None:
        self._producer = producer

    def of(self, name: str, /, **values: object) -> dict[str, Any]:
        """One facet by its name."""
        version, _, definition = _FACETS[name].partition("/")
        url = f"{_SPEC}/facets/{version}/{definition}.json#/$defs/{definition}"
        return {name: {"_producer": self._producer, "_schemaURL": url, **values}}
