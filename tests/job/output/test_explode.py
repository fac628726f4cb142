"""``output.explode``: one output row per sample, even in jobs that are stopped and retried."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.errors import ExitCode
from batchinfer.job.output import explode
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.explode import METADATA, exploded, first_of_rows, is_exploded, whole_rows
from batchinfer.job.output.verify import verify
from batchinfer.job.row_ranges import Part
from batchinfer.job.run.run_job import run_job
from tests.job.datasets import write_parquet
from tests.job.fakes import FakeBuild, job
from tests.job.output.test_resume import Build, stop_at

SAMPLE = pa.struct(
    [
        ("index", pa.int32()),
        ("text", pa.string()),
        ("num_tokens", pa.int32()),
        ("reasoning", pa.string()),
        ("num_reasoning_tokens", pa.int32()),
        ("tool_calls", pa.list_(pa.string())),
    ]
)
SCHEMA = pa.schema(
    [
        ("kept", pa.list_(pa.string())),
        ("row_id", pa.int64()),
        ("generated_text", pa.string()),
        ("reasoning", pa.string()),
        ("tool_calls", pa.list_(pa.string())),
        ("outputs", pa.list_(SAMPLE)),
        ("num_output_tokens", pa.int32()),
        ("num_reasoning_tokens", pa.int32()),
        ("status", pa.string()),
    ],
    metadata={METADATA: "true"},
)
NUM_ROWS = 40


def row(row_id: int, samples: int, failed: bool) -> dict[str, Any]:
    outputs = [
        {
            "index": i,
            "text": f"{row_id}-{i}",
            "num_tokens": i + 1,
            "reasoning": None if i % 2 else f"why {i}",
            "num_reasoning_tokens": i % 2,
            "tool_calls": [f"call {i}"] if i < 2 else None,
        }
        for i in range(samples)
    ]
    failed = failed or not samples
    return {
        "kept": [str(row_id)] * (row_id % 3),
        "row_id": row_id,
        "generated_text": None if failed else f"{row_id}-0",
        "reasoning": None if failed else "why 0",
        "tool_calls": None if failed else ["call 0"],
        "outputs": outputs,
        "num_output_tokens": sum(output["num_tokens"] for output in outputs),
        "num_reasoning_tokens": sum(output["num_reasoning_tokens"] for output in outputs),
        "status": "error" if failed else "ok",
    }


@given(kinds=st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=8))
def test_explode_round_trip(kinds: list[tuple[int, bool]]) -> None:
    table = pa.Table.from_pylist([row(at, *kind) for at, kind in enumerate(kinds)], schema=SCHEMA)
    apart = exploded(table)
    assert apart.schema == table.schema
    assert is_exploded(apart)
    assert whole_rows(apart).to_pylist() == table.to_pylist()
    assert first_of_rows(apart)["row_id"].to_pylist() == table["row_id"].to_pylist()
    found = iter(apart.to_pylist())
    for whole in table.to_pylist():
        for sample in whole["outputs"] or [None]:
            one = next(found)
            assert one["outputs"] == ([sample] if sample else [])
            assert one["num_output_tokens"] == (sample["num_tokens"] if sample else 0)
            good = sample and whole["status"] == "ok"
            assert one["generated_text"] == (sample["text"] if good else None)
            for name in ("reasoning", "tool_calls"):
                assert one[name] == (sample[name] if good else None)
            assert one["num_reasoning_tokens"] == (sample["num_reasoning_tokens"] if sample else 0)
            assert (one["row_id"], one["kept"]) == (whole["row_id"], whole["kept"])
    assert next(found, None) is None


@pytest.mark.parametrize("piece_bytes", [1, 100, 1000])
def test_explode_splits_large_columns_into_chunks(
    monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    rows = [row(at, at % 5, failed=at % 7 == 0) for at in range(NUM_ROWS)]
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    wanted = exploded(table)
    monkeypatch.setattr(explode, "_PIECE_BYTES", piece_bytes)
    apart = exploded(pa.concat_tables([table[:7], table[7:]]))
    assert apart.equals(wanted)
    assert apart["kept"].num_chunks > 4
    assert whole_rows(apart).equals(table)


def test_first_of_rows_works_with_over_2_gib_of_text() -> None:
    text = pa.array(["x" * (1 << 26)])
    kept = pa.chunked_array([text] * 40)  # one chunk of 64 MiB, repeated to over 2 GiB
    row_ids = pa.array([0] * 30 + [1] * 10)
    table = pa.table({"kept": kept, "row_id": row_ids}).replace_schema_metadata({METADATA: "true"})
    assert first_of_rows(table)["row_id"].to_pylist() == [0, 1]


def spec(tmp_path: Path, **output: Any) -> Any:
    """Return a job with three samples per row; every tenth prompt is empty."""
    path = tmp_path / "in" / "x.parquet"
    if not path.exists():
        prompts = ["" if at % 10 == 9 else f"{at} asks" for at in range(NUM_ROWS)]
        write_parquet(path, {"prompt": prompts, "k": range(NUM_ROWS)})
    return job(
        tmp_path,
        sampling={"n": 3},
        output={"explode": True, **output},
        errors={"max_error_rate": 0.2},
    )


def check(tmp_path: Path) -> None:
    rows = pq.read_table(sorted((tmp_path / "out" / "data").iterdir())).to_pylist()
    expected = [at for at in range(NUM_ROWS) for _ in range(1 if at % 10 == 9 else 3)]
    assert [row["row_id"] for row in rows] == [row["k"] for row in rows] == expected
    for found in rows:
        bad = found["row_id"] % 10 == 9
        assert found["status"] == ("error" if bad else "ok")
        assert found["generated_text"] == (None if bad else found["prompt"][:8])
        assert len(found["outputs"]) == (0 if bad else 1)
    indices = [found["outputs"][0]["index"] for found in rows if found["outputs"]]
    assert indices == [0, 1, 2] * (NUM_ROWS * 9 // 10)
    checked = verify(OutputDir(tmp_path / "out"))
    assert not checked.problems
    assert (checked.complete, checked.rows) == (True, NUM_ROWS)


def test_exploded_job_is_stopped_and_resumed(tmp_path: Path) -> None:
    assert run_job(spec(tmp_path), build=Build(stop_at(20)), quiet=True) is ExitCode.INTERRUPTED
    assert run_job(spec(tmp_path), build=Build(), quiet=True) is ExitCode.OK
    check(tmp_path)
    assert run_job(spec(tmp_path), build=None, quiet=True) is ExitCode.OK


def test_retry_errors_of_an_exploded_job(tmp_path: Path) -> None:
    run_job(spec(tmp_path), build=FakeBuild(), quiet=True)
    again = Build()
    assert run_job(spec(tmp_path), build=again, quiet=True, retry_errors=True) is ExitCode.OK
    assert not again.ran  # all failed rows have empty prompts
    check(tmp_path)


def test_only_an_exploded_part_may_repeat_a_row(tmp_path: Path) -> None:
    from batchinfer.job.output.commit import check_part
    from batchinfer.job.output.parquet_bytes import parquet_bytes

    twice = pa.table({"row_id": [0, 0, 1]})
    with pytest.raises(ValueError, match="3 rows, not 2"):
        check_part(pa.BufferReader(parquet_bytes([twice])), Part(0, range(2)))
    marked = twice.replace_schema_metadata({METADATA: "true"})
    check_part(pa.BufferReader(parquet_bytes([marked])), Part(0, range(2)))
