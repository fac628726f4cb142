from __future__ import annotations

from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.config import PromptConfig
from batchinfer.errors import DataError
from batchinfer.job.input.dataset import Source, open_source
from batchinfer.job.input.unify_schemas import united, widened
from batchinfer.job.output.schema import output_table
from batchinfer.job.rows.column_checks import check_prompt_columns
from tests.job.datasets import strings, write_parquet
from tests.job.fakes import job

union = partial(open_source, mode="union")
NESTED = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


def write(folder: Path, *files: dict[str, Any]) -> str:
    for at, columns in enumerate(files):
        write_parquet(folder / f"{at}.parquet", columns)
    return str(folder)


def column(source: Source, name: str) -> list[Any]:
    """Return a column of all rows as kept in the output; check that prompts get the same values."""
    batches = [batch for _, batch in source.scan([name], [source.rows_there])]
    kept = pa.Table.from_batches(batches, pa.schema([source.schema.field(name)]))[name]
    seen = [row[name] for _, rows in source.rows([name], [source.rows_there]) for row in rows]
    texts = [v.decode() if isinstance(v, bytes) else v for v in seen]
    assert texts == kept.to_pylist() or not pa.types.is_string(kept.type)
    return kept.to_pylist()


def test_union_fills_a_missing_column_with_null(tmp_path: Path) -> None:
    path = write(tmp_path, {"a": [1], "b": ["x"]}, {"b": ["y", "z"]}, {"c": [True], "a": [2]})
    source = union(path)
    assert source.schema.names == ["a", "b", "c"]
    assert column(source, "a") == [1, None, None, 2]
    assert column(source, "b") == ["x", "y", "z", None]
    assert column(source, "c") == [None, None, None, True]


TEXT = pa.array(["é", None])
WIDER = [
    (pa.array([1], pa.int32()), pa.array([2**40]), pa.int64()),
    (pa.array([1], pa.uint32()), pa.array([-1], pa.int8()), pa.int64()),
    (pa.array([0.5], pa.float32()), pa.array([0.1]), pa.float64()),
    (pa.array([2**31 - 1], pa.int32()), pa.array([0.5], pa.float32()), pa.float64()),
    (TEXT, TEXT.cast(pa.large_string()), pa.large_string()),
    (TEXT.dictionary_encode(), TEXT, pa.string()),
    (TEXT.dictionary_encode(), TEXT.cast(pa.string_view()), pa.large_string()),
    (pa.nulls(1), pa.array([[1]]), pa.list_(pa.int64())),
    (pa.array([[1]], pa.list_(pa.int32())), pa.array([[2]]), pa.list_(pa.int64())),
    (pa.array([[1]], pa.list_(pa.int64(), 1)), pa.array([[2, 3]]), pa.list_(pa.int64())),
    (
        pa.array([[{"content": "a"}]]),
        pa.array([[{"role": "user", "content": None}], None], NESTED),
        pa.list_(pa.struct([("content", pa.string()), ("role", pa.string())])),
    ),
]


@pytest.mark.parametrize(("one", "other", "kind"), WIDER, ids=lambda value: str(value)[:20])
def test_union_widens_types(tmp_path: Path, one: pa.Array, other: pa.Array, kind: Any) -> None:
    source = union(write(tmp_path, {"x": one}, {"x": other}))
    assert source.schema.field("x").type == kind
    found = column(source, "x")
    assert found == pa.concat_arrays([one.cast(kind), other.cast(kind)]).to_pylist()
    with pytest.raises(DataError, match=r"set input\.schema: union"):
        open_source(str(tmp_path)).require_alike(["x"])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["a"], [1]),
        ([2**60], [0.5]),
        (pa.array([2**63], pa.uint64()), [-1]),
        ([True], [1]),
        ([b"a"], ["a"]),
        ([["a"]], ["a"]),
        ([{"a": 1}], [{"a": "b"}]),
        (pa.array([0], pa.timestamp("s")), pa.array([0], pa.timestamp("s", "UTC"))),
    ],
)
def test_conflicting_types_are_shown_with_their_files(tmp_path: Path, one: Any, other: Any) -> None:
    rows = {"prompt": ["a"]}
    path = write(tmp_path, {**rows, "x": one}, {**rows, "x": one}, {**rows, "x": other})
    for open_files in (open_source, union):
        source = open_files(path)
        with pytest.raises(DataError, match=r'"x":\n .*0\.parquet: .*\n .*2\.parquet: ') as caught:
            source.require_alike(["x"])
        assert "union" not in str(caught.value)
        source.require_alike(["prompt"])
        assert column(source, "prompt") == ["a"] * 3


def test_the_error_names_the_two_files_that_conflict(tmp_path: Path) -> None:
    path = write(tmp_path, {"x": pa.nulls(1)}, {"y": [1]}, {"x": ["t"]}, {"x": [1]})
    with pytest.raises(DataError, match=r"2\.parquet: string\n.*3\.parquet: int64"):
        union(path).require_alike(["x"])


@pytest.mark.parametrize(
    ("input_", "prompt", "message"),
    [
        ({}, {}, "leave it out of input.keep_columns: the prompt does not need it"),
        ({"keep_columns": ["prompt"]}, {}, None),
        ({"keep_columns": ["prompt", "x"]}, {}, "the prompt does not need it"),
        ({"keep_columns": ["prompt"], "id_column": "x"}, {}, "set input.schema: union"),
        ({"keep_columns": []}, {"column": None, "template": "{{ x }}"}, "set input.schema: union"),
        ({"keep_columns": []}, {"system": "{{ x }}"}, "set input.schema: union"),
    ],
)
def test_strict_requires_equal_columns_only_where_they_are_used(
    tmp_path: Path, input_: dict[str, Any], prompt: dict[str, Any], message: str | None
) -> None:
    path = write(tmp_path / "in", {"prompt": ["a"], "x": [1]}, {"prompt": ["b"]})

    def check(mode: str) -> Source:
        spec = job(tmp_path, input={**input_, "schema": mode}, prompt=prompt)
        source = open_source(path, mode=spec.input.schema_mode)
        check_prompt_columns(PromptConfig(**{"column": "prompt", **prompt}), source)
        output_table(source, spec)
        return source

    check("union")
    if message is None:
        check("strict")
        return
    with pytest.raises(DataError, match=r'"x":\n.*: int64\n.*: no such column') as caught:
        check("strict")
    assert message in str(caught.value)
    assert ("prompt does not need" in str(caught.value)) == ("need" in message)


def test_a_filter_reads_united_columns(tmp_path: Path) -> None:
    path = write(tmp_path, {"x": pa.array([1, 7], pa.int8())}, {"y": [1]}, {"x": [2**40]})
    source = union(path, condition="x > 5 or y = 1")
    assert column(source, "x") == [7, None, 2**40]
    with pytest.raises(DataError, match="differ in column"):
        open_source(path, condition="y = 1")


def test_a_folder_gives_the_column_that_a_file_does_not_have(tmp_path: Path) -> None:
    write_parquet(tmp_path / "lang=de" / "a.parquet", {"prompt": ["a"]})
    write_parquet(tmp_path / "lang=en" / "b.parquet", {"prompt": ["b"], "lang": ["it"]})
    write_parquet(tmp_path / "lang=fr" / "c.parquet", {"other": [1]})
    source = union(str(tmp_path))
    assert column(source, "lang") == ["de", "it", "fr"]
    assert column(source, "prompt") == ["a", "b", None]


def test_a_cast_keeps_invalid_text(tmp_path: Path) -> None:
    path = write(tmp_path, {"x": strings([b"\xff"])}, {"x": pa.array(["a"], pa.large_string())})
    rows = [row for _, rows in union(path).rows(["x"], [range(2)]) for row in rows]
    assert rows == [{"x": b"\xff"}, {"x": b"a"}]


def test_uniting_ten_thousand_equal_files_is_fast() -> None:
    """Comparing equal schemas by identity takes a moment. Comparing them by value takes minutes."""
    schema = pa.schema([(f"c{at}", pa.int64()) for at in range(100)])
    schemas = {str(at): schema for at in range(10_000)}
    assert united(schemas, "union", widened) == (schema, {})


WHOLE = [pa.int8(), pa.int16(), pa.int32(), pa.int64()]
UNSIGNED = [pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
TEXTS = [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string()), pa.binary()]
OTHERS = [pa.null(), pa.bool_(), pa.date32(), pa.float32(), pa.float64()]
SIMPLE = st.sampled_from([*WHOLE, *UNSIGNED, *TEXTS, *OTHERS])
KINDS = st.recursive(
    SIMPLE,
    lambda inner: (
        inner.map(pa.list_)
        | inner.map(pa.large_list)
        | st.dictionaries(st.sampled_from("ab"), inner, min_size=1).map(
            lambda f: pa.struct([*f.items()])
        )
    ),
    max_leaves=4,
)


@given(st.lists(KINDS, min_size=1, max_size=4))
def test_widening_does_not_depend_on_order_and_holds_each_type(kinds: list[Any]) -> None:
    found = [widened(order) for order in permutations(kinds)]
    assert len({kind is None for kind in found}) == 1
    if found[0] is None:
        return
    assert all(widened([kind, found[0]]) is not None for kind in found)
    assert widened([found[0]]) == widened([*kinds, found[0]])
    for kind in kinds:
        assert pa.nulls(2, kind).cast(found[0]).to_pylist() == [None, None]


VALUES = {"i": st.integers(-5, 5), "f": st.floats(-1, 1, width=32), "t": st.text(max_size=3)}
TYPES = {
    "i": [pa.int8(), pa.int64(), pa.int32()],
    "f": [pa.float32(), pa.float64()],
    "t": [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())],
}


@st.composite
def tables(draw: st.DrawFn) -> list[pa.Table]:
    """Draw files with some of three columns; the types of a column differ between files."""
    made = []
    for _ in range(draw(st.integers(1, 4))):
        names = draw(st.lists(st.sampled_from("ift"), min_size=1, unique=True))
        rows = draw(st.integers(1, 3))
        columns = {}
        for name in names:
            values = draw(st.lists(st.none() | VALUES[name], min_size=rows, max_size=rows))
            columns[name] = pa.array(values).cast(draw(st.sampled_from(TYPES[name])))
        made.append(pa.table(columns))
    return made


@given(files=tables())
def test_every_value_of_every_file_is_unchanged(tmp_path: Path, files: list[pa.Table]) -> None:
    for at, table in enumerate(files):
        pq.write_table(table, tmp_path / f"{at}.parquet")
    source = union([str(tmp_path / f"{at}.parquet") for at in range(len(files))])
    assert not source.differences
    names = source.schema.names
    found = [row for _, b in source.scan(names, [source.rows_there]) for row in b.to_pylist()]
    assert found == [{n: row.get(n) for n in names} for f in files for row in f.to_pylist()]
