"""``input.filter``: which rows it selects, and jobs that run these rows."""

from __future__ import annotations

import gzip
import json
from datetime import date, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.errors import DataError, ExitCode, UsageError
from batchinfer.job.input.dataset import open_source
from batchinfer.job.input.filter import Condition
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.verify import verify
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.stats.status import read_status
from tests.job.datasets import write_parquet
from tests.job.fakes import job
from tests.job.output.test_resume import Build, Model, check_sums, on_disk, stop_at, table

NUM_ROWS = 60
ODD = "n % 2 = 1"
ODD_ROWS = list(range(1, NUM_ROWS, 2))


def dataset(tmp_path: Path) -> list[str]:
    texts = [f"{row} asks" for row in range(NUM_ROWS)]
    for name, rows in (("a", range(25)), ("b", range(25, NUM_ROWS))):
        columns = {"prompt": [texts[row] for row in rows], "n": list(rows)}
        write_parquet(tmp_path / "in" / f"{name}.parquet", columns)
    return texts


def spec(
    tmp_path: Path, condition: str | None = ODD, limit: int | None = None, **sections: Any
) -> JobSpec:
    chosen = {"path": str(tmp_path / "in"), "filter": condition, "limit": limit}
    return job(tmp_path, input=chosen, **sections)


def check(tmp_path: Path, row_ids: list[int], texts: list[str]) -> None:
    """Check that the output has the selected rows once, in order, with their ids in the input."""
    found = table(tmp_path)
    assert found["row_id"].to_pylist() == found["n"].to_pylist() == row_ids
    assert found["generated_text"].to_pylist() == [texts[row][:8] for row in row_ids]
    out = OutputDir(tmp_path / "out")
    verification = verify(out)
    assert (verification.problems, verification.complete) == ([], True)
    assert verification.rows == read_status(out, 0).rows_done == len(row_ids)
    if row_ids:
        check_sums(tmp_path)


@pytest.mark.parametrize("order", ["input", "prefix"])
@pytest.mark.parametrize("rows_per_part", [1, 7, 100])
def test_selected_rows_keep_their_ids(tmp_path: Path, order: str, rows_per_part: int) -> None:
    texts = dataset(tmp_path)
    sizes = {"rows_per_part": rows_per_part}
    build = Build()
    whole = spec(tmp_path, output=sizes, engine={"order": order, "order_window": 8})
    assert run_job(whole, build=build, quiet=True) is ExitCode.OK
    assert sorted(build.ran) == ODD_ROWS
    check(tmp_path, ODD_ROWS, texts)
    parts = sorted((tmp_path / "out" / "data").iterdir())
    assert len(parts) == -(-len(ODD_ROWS) // rows_per_part)
    requests = pq.read_table(tmp_path / "out" / "stats" / "requests.parquet")
    assert sorted(requests["row_id"].to_pylist()) == ODD_ROWS


@pytest.mark.parametrize(("limit", "count"), [(0, 0), (1, 1), (17, 17), (1000, 30)])
def test_limit_counts_selected_rows(tmp_path: Path, limit: int, count: int) -> None:
    texts = dataset(tmp_path)
    assert run_job(spec(tmp_path, limit=limit), build=Build(), quiet=True) is ExitCode.OK
    check(tmp_path, ODD_ROWS[:count], texts)


def test_a_filter_without_rows_completes_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset(tmp_path)
    build = Build()
    for _ in range(2):
        assert run_job(spec(tmp_path, "n > 1000"), build=build) is ExitCode.OK
    assert build.count == 0
    assert capsys.readouterr().err == "input.filter selects none of the 60 rows\n"
    check(tmp_path, [], [])


def test_stopped_run_with_a_filter_resumes(tmp_path: Path) -> None:
    texts = dataset(tmp_path)
    chosen = spec(tmp_path, output={"rows_per_part": 4})
    stopped = Build(stop_at(30))
    assert run_job(chosen, build=stopped, quiet=True) is ExitCode.INTERRUPTED
    data = tmp_path / "out" / "data"
    written = [r for p in data.iterdir() for r in pq.read_table(p)["row_id"].to_pylist()]
    kept = on_disk(tmp_path) + written
    assert 0 < len(kept) < len(ODD_ROWS)
    assert read_status(OutputDir(tmp_path / "out"), 0).rows_done == len(kept)
    second = Build()
    assert run_job(chosen, build=second, quiet=True) is ExitCode.OK
    assert sorted(second.ran + kept) == ODD_ROWS
    check(tmp_path, ODD_ROWS, texts)


def test_retry_errors_runs_only_selected_error_rows(tmp_path: Path) -> None:
    texts = dataset(tmp_path)
    chosen = spec(tmp_path, output={"rows_per_part": 4})
    refusing = Model(3, 8, 31)
    assert run_job(chosen, build=refusing, quiet=True) is ExitCode.TOO_MANY_ROW_ERRORS
    repaired = Model()
    assert run_job(chosen, build=repaired, retry_errors=True, quiet=True) is ExitCode.OK
    assert sorted(repaired.ran) == [3, 31], "row 8 is not selected"
    check(tmp_path, ODD_ROWS, texts)


def test_verify_finds_a_row_in_the_wrong_part(tmp_path: Path) -> None:
    dataset(tmp_path)
    run_job(spec(tmp_path), build=Build(), quiet=True)
    plan = tmp_path / "out" / "_batchinfer" / "manifest.json"
    held = json.loads(plan.read_bytes())
    held["bounds"][1] -= 4
    plan.write_text(json.dumps(held))
    problems = verify(OutputDir(tmp_path / "out")).problems
    assert any("not the rows of the input" in problem for problem in problems)


# Selected rows ---------------------------------------------------------------------------------

CONDITIONS = [
    ("lang = 'en'", pl.col("lang") == "en"),
    ("lang is null or n >= 3", pl.col("lang").is_null() | (pl.col("n") >= 3)),
    ("not (lang = 'en') and score < 0.5", (pl.col("lang") != "en") & (pl.col("score") < 0.5)),
    ("lang in ('de', 'fr')", pl.col("lang").is_in(["de", "fr"])),
    ("length(lang) > 1 and lang like '%n'", pl.col("lang").str.ends_with("n")),
    ("n between 1 and 3", pl.col("n").is_between(1, 3)),
    ("1 = 1", pl.lit(value=True)),
    ("null = 1", pl.lit(value=False)),
]


@given(data=st.data())
def test_selected_rows_equal_those_of_polars(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("lake")
    row = st.fixed_dictionaries(
        {
            "lang": st.sampled_from(["en", "de", "fr", None]),
            "n": st.none() | st.integers(0, 5),
            "score": st.sampled_from([0.0, 0.5, 1.0, None]),
        }
    )
    schema = {"lang": pl.String, "n": pl.Int64, "score": pl.Float64}
    files = data.draw(st.lists(st.lists(row, max_size=12), min_size=1, max_size=3))
    frames = [pl.DataFrame(rows, schema=schema) for rows in files]
    for at, frame in enumerate(frames):
        (folder / str(at)).mkdir()
        frame.write_parquet(folder / f"{at}.parquet", row_group_size=5)
    condition, by_hand = data.draw(st.sampled_from(CONDITIONS))
    limit = data.draw(st.none() | st.integers(0, 8))
    expected = pl.concat(frames).with_row_index("at").filter(by_hand)
    expected = expected if limit is None else expected.head(limit)
    source = open_source(str(folder / "*.parquet"), limit, condition=condition)
    ids, rows = [], []
    for first, batch in source.scan(["score", "lang", "n"], [source.rows_there]):
        ids += range(first, first + len(batch))
        rows += batch.to_pylist()
    assert ids == expected["at"].to_list()
    assert rows == expected.select("score", "lang", "n").to_dicts()
    assert source.num_rows == len(expected) == source.count(source.rows_there)
    some = range(2, 9)
    read = [first + k for first, part in source.rows(["n"], [some]) for k in range(len(part))]
    assert read == [at for at in ids if at in some]


def selected(path: Path, condition: str, **options: Any) -> list[int]:
    source = open_source(str(path), condition=condition, **options)
    rows = [
        first + at
        for first, piece in source.rows(source.schema.names, [source.rows_there])
        for at in range(len(piece))
    ]
    assert len(rows) == source.num_rows
    return rows


def test_filter_selects_scattered_rows_of_a_large_file(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": range(20_000)}), tmp_path / "x.parquet", row_group_size=3000)
    rows = [5, 4000, 4001, 19_999]
    condition = f"n in ({', '.join(map(str, rows))})"
    assert selected(tmp_path / "x.parquet", condition) == rows


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_filter_on_json_lines(tmp_path: Path, suffix: str) -> None:
    lines = ['{"a": 1, "t": "x"}', "", '{"a": null}', "damaged", '{"a": 3, "t": "y"}', '{"t": "x"}']
    data = "\n".join(lines).encode()
    path = tmp_path / f"x.jsonl{suffix}"
    path.write_bytes(gzip.compress(data) if suffix else data)
    assert selected(path, "a >= 1") == [0, 3]
    assert selected(path, "t = 'x'") == [0, 4]
    assert selected(path, "a is null") == [1, 2, 4], "an invalid line has null in all columns"


def test_filter_on_openai_batch_files(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    lines = [
        {"custom_id": f"r{at}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for at in range(4)
    ]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, lines)))
    condition = "custom_id in ('r1', 'r3')"
    assert selected(tmp_path / "x.jsonl", condition, format_name="openai-batch") == [1, 3]


def test_filter_on_columns_from_folder_names(tmp_path: Path) -> None:
    for lang in ("de", "en"):
        write_parquet(tmp_path / "in" / f"lang={lang}" / "x.parquet", {"n": [1, 2, 3]})
    assert selected(tmp_path / "in", "lang = 'en' and n > 1") == [4, 5]
    assert selected(tmp_path / "in", "lang = 'de'") == [0, 1, 2]


# Refused conditions ----------------------------------------------------------------------------

SCHEMA = pa.schema(
    [("lang", pa.string()), ("score", pa.float64()), ("over", pa.int64()), ("a b", pa.int64())]
)


@pytest.mark.parametrize(
    ("condition", "says"),
    [
        ("land = 'en'", 'no column "land"; did you mean lang?'),
        ('lang = "en"', "single quotes"),
        ("lang = 'en", "or a quote is not closed"),
        (
            "lang > 3",
            "cannot compare string with numeric type (i32) (lang is string)\ncast one side",
        ),
        ("score", '"score" is of type Float64, not a condition\ncompare it'),
        (
            'length("a b") > 3',
            "expected `String`, got `i64` for series with name `a b` (a b is int64)\ncast one",
        ),
        ("\"a b\" in ('a')", "cannot check for Int64 values in List(String)"),
        ("cast('x' as int) > 1", 'for 1 out of 1 values: ["x"]\nuse try_cast'),
        ("lang.x = 1", 'no column has a field "x"'),
        ("score > 1)", "unexpected token ')')\nput strings in single quotes"),
        ("score > 1 limit 5", "found 'limit' clause)\nwrite only the part that would follow WHERE"),
        ("upper(lang, 1) = 'x'", "no function matches the given name and arguments"),
        ("score > avg(score)", "avg() is not an allowed function"),
        ("score > avg/**/(score)", "a condition cannot contain"),
        (
            "lang in (select lang from self)",
            "select is not allowed, because a condition sees only one row",
        ),
        ("repeat(lang, 1000000000) = 'x'", "repeat() is not an allowed function"),
        ("(" * 60 + "1 = 1" + ")" * 60, "more than 50 nested brackets"),
        ("1 = 1 and " * 2000 + "1 = 1", "more than 400 words and operators"),
        (f"lang = '{'x' * 100_000}'", "at most 100000 characters"),
        ("not " * 200 + "1 = 1", "cannot be evaluated"),
    ],
)
def test_invalid_conditions_are_refused(condition: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        Condition(condition, SCHEMA).holds(pa.RecordBatch.from_pylist([{"lang": "x"}], SCHEMA))
    message = str(caught.value)
    assert message.startswith("input.filter: ")
    assert says in message
    assert caught.value.exit_code is ExitCode.USAGE


@pytest.mark.parametrize(
    ("condition", "says", "corrected"),
    [
        (
            "cast(lang as int) > 1",
            "'lang' for 1 out of 2 values: [\"x\"]\nuse try_cast",
            "try_cast(lang as int) > 1",
        ),
        (
            '1.0 / "over" > 0',
            "by zero Decimal\ndivide by nullif",
            '1.0 / nullif("over", 0) > 0',
        ),
    ],
)
def test_a_value_that_breaks_the_condition_is_an_error_in_the_data(
    condition: str, says: str, corrected: str
) -> None:
    rows = [{"lang": "7", "over": 3}, {"lang": "x", "over": 0}]
    batch = pa.RecordBatch.from_pylist(rows, SCHEMA)
    meets = Condition(condition, SCHEMA)
    with pytest.raises(DataError) as caught:
        meets.holds(batch.select(meets.columns))
    assert says in str(caught.value)
    meets = Condition(corrected, SCHEMA)
    assert meets.holds(batch.select(meets.columns)).tolist() == [True, False]


def test_division_by_zero_is_as_documented() -> None:
    batch = pa.RecordBatch.from_pylist([{"over": 0}, {"over": 2}], SCHEMA)

    def found(condition: str) -> list[bool]:
        meets = Condition(condition, SCHEMA)
        return meets.holds(batch.select(meets.columns)).tolist()

    assert found('1 / "over" > 0') == [True, True]
    assert found('"over" / "over" > 9') == [True, False]
    assert found('1 / nullif("over", 0) > 0') == [False, True]


@pytest.mark.parametrize(
    "condition", ["d >= '1970-01-02'", "d in ('1970-01-02')", "t < '1970-01-02 10:00:00'"]
)
def test_filter_hint_for_dates_and_timestamps_is_a_valid_condition(condition: str) -> None:
    schema = pa.schema([("d", pa.date32()), ("t", pa.timestamp("us"))])
    with pytest.raises(UsageError, match="write date '2026-11-20' or timestamp '2026-11-20 12:30"):
        Condition(condition, schema)
    literal = "date '" if condition[0] == "d" else "timestamp '"
    meets = Condition(condition.replace("'", literal, 1), schema)
    row = {"d": date(1970, 1, 2), "t": datetime(1970, 1, 2)}
    batch = pa.RecordBatch.from_pylist([row], schema)
    assert meets.holds(batch.select(meets.columns)).tolist() == [True]


@pytest.mark.parametrize(
    "condition", ['"over" = 1 and "a b" = 2', "lang = 'avg(x); it''s --'", "lang <> 'select'"]
)
def test_quoted_texts_and_names_are_not_parsed_as_code(condition: str) -> None:
    row = {"lang": "avg(x); it's --", "over": 1, "a b": 2, "score": None}
    batch = pa.RecordBatch.from_pylist([row, dict.fromkeys(row)], SCHEMA)
    meets = Condition(condition, SCHEMA)
    assert meets.holds(batch.select(meets.columns)).tolist() == [True, False]


def test_a_wrong_filter_is_found_before_the_model_loads(tmp_path: Path) -> None:
    dataset(tmp_path)
    build = Build()
    with pytest.raises(UsageError, match=r"input\.filter.*did you mean prompt"):
        run_job(spec(tmp_path, "promt = 'x'"), build=build, quiet=True)
    assert build.count == 0
    assert not (tmp_path / "out").exists()
