"""Whole jobs that reuse rows: only new rows run, and the output equals that of a full run.

The fake engine answers with the prompt, or with a hash of everything that a sample may depend on.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from typer.testing import CliRunner

from batchinfer.cli.commands import app
from batchinfer.errors import DataError, ExitCode, UsageError
from batchinfer.job.output.open import output_at
from batchinfer.job.output.verify import verify
from batchinfer.job.reuse.reuse import FinishedFile, FoundRows, RowReuse
from batchinfer.job.rows.read_prompts import stream_of_id
from batchinfer.job.run import run_job as run_module
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.spec import JobSpec
from tests.job.datasets import flip_bit, write_parquet
from tests.job.fakes import TellingBuild, drawn, echo, job
from tests.job.output.test_resume import Build, stop_at
from tests.models import make_text_model

LONG = "x" * 300
"""A prompt that is too long for the fake model, which takes 256 tokens."""
DRAW = {"temperature": 1.0, "max_tokens": 6}


class Story:
    """Runs several jobs, one after the other, on the rows of ``tmp_path/in``."""

    def __init__(self, tmp_path: Path) -> None:
        self.path = tmp_path

    def write(self, prompts: list[str], name: str = "a", **columns: Any) -> None:
        columns = {"prompt": prompts, "n": list(range(len(prompts))), **columns}
        write_parquet(self.path / "in" / f"{name}.parquet", columns)

    def spec(self, out: str, reuse: tuple[str, ...] = (), **sections: Any) -> JobSpec:
        output = {
            "path": str(self.path / out),
            "reuse": [str(self.path / name) for name in reuse],
            **sections.pop("output", {}),
        }
        return job(self.path, output=output, **sections)

    def run(
        self, out: str, *reuse: str, build: TellingBuild | None = None, **sections: Any
    ) -> list[int]:
        """Run a job with the output ``out``; return the ids of the rows that its engine ran."""
        build = build or TellingBuild()
        spec = self.spec(out, reuse, **sections)
        assert run_job(spec, build=build, quiet=True) is ExitCode.OK
        return sorted(build.ran)

    def check(self, out: str, **sections: Any) -> None:
        """Check that the output is complete and equals that of a run that computes every row."""
        build = sections.pop("build", None)
        self.run(f"{out}-fresh", build=build, **sections)
        assert self.data(out) == self.data(f"{out}-fresh")
        assert not verify(output_at(str(self.path / out))).problems

    def data(self, out: str) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (self.path / out / "data").iterdir()}

    def summary(self, out: str) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.path / out / "summary.json").read_bytes())
        return summary


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path)


def numbered(count: int, start: int = 0) -> list[str]:
    return [f"{row} is a number" for row in range(start, start + count)]


def test_appended_rows_and_files_are_computed(story: Story) -> None:
    story.write(numbered(25))
    assert story.run("one") == list(range(25))
    story.write(numbered(28))
    story.write(numbered(5, start=100), name="b")
    assert story.run("two", "one") == list(range(25, 33))
    story.check("two")
    rows = story.summary("two")["rows"]
    assert (rows["total"], rows["ok"], rows["reused"]) == (33, 33, 25)


def test_counts_include_only_computed_rows(story: Story) -> None:
    story.write(numbered(25))
    story.run("out")
    story.write(numbered(28))
    (story.path / "out").rename(story.path / "one")
    story.run("out", "one")
    tokens = story.summary("out")["tokens"]
    assert tokens["prompt"] == sum(map(len, numbered(28)[25:]))
    assert tokens["prompt"] == tokens["prompt_computed"] + tokens["prompt_cached"]
    steps = pq.read_table(story.path / "out" / "stats" / "steps.parquet")
    computed = tokens["prompt_computed"] + tokens["recomputed"]
    assert sum(steps["prefill_tokens"].to_pylist()) == computed
    assert tokens["output"] == 3 * 8
    requests = pq.read_table(story.path / "out" / "stats" / "requests.parquet")
    assert requests["row_id"].to_pylist() == [25, 26, 27]


def test_corrected_prompts_are_computed(story: Story) -> None:
    prompts = numbered(25)
    prompts[3] = ""
    story.write(prompts)
    lenient = {"errors": {"max_error_rate": 1.0}}
    story.run("one", **lenient)
    prompts[3], prompts[7] = "corrected", "other"
    story.write(prompts)
    assert story.run("two", "one", **lenient) == [3, 7]
    story.check("two", **lenient)


def test_outputs_with_other_parts_filter_order_or_explode_are_reused(story: Story) -> None:
    story.write(numbered(25))
    n = {"sampling": {"n": 2}}
    story.run("one", output={"rows_per_part": 4}, **n)
    story.write(numbered(25)[::-1])
    assert story.run("two", "one", output={"rows_per_part": 7, "explode": True}, **n) == []
    story.check("two", output={"rows_per_part": 7, "explode": True}, **n)
    filtered = {"input": {"filter": "n % 3 = 1"}}
    assert story.run("three", "two", **n, **filtered) == []  # copied from an exploded output
    story.check("three", **n, **filtered)


def test_samples_of_moved_rows_are_drawn_again(story: Story) -> None:
    """By default, a row's position seeds its samples; a row with its own seed keeps its samples."""
    story.write(numbered(20), sampling_params=[None] * 18 + ['{"seed": 5}'] * 2)
    draw = {"sampling": DRAW}
    story.run("one", build=TellingBuild(next_token=drawn), **draw)
    story.write(["new", *numbered(20)], sampling_params=[None] * 19 + ['{"seed": 5}'] * 2)
    build = TellingBuild(next_token=drawn)
    assert story.run("two", "one", build=build, **draw) == list(range(19))
    story.check("two", build=TellingBuild(next_token=drawn), **draw)


def test_samples_keyed_by_id_follow_their_rows(story: Story) -> None:
    ids = [f"id {row}" for row in range(20)]
    by_id = {"sampling": {**DRAW, "key": "id"}, "input": {"id_column": "id"}}
    story.write(numbered(20), id=ids)
    story.run("one", build=TellingBuild(next_token=drawn), **by_id)
    story.write(["new", *numbered(20)], id=["other", *ids])
    assert story.run("two", "one", build=TellingBuild(next_token=drawn), **by_id) == [0]
    story.check("two", build=TellingBuild(next_token=drawn), **by_id)
    moved = pq.read_table(story.path / "two" / "data")["outputs"].slice(1)
    assert moved.equals(pq.read_table(story.path / "one" / "data")["outputs"])
    story.write(numbered(20), id=[f"renamed {row}" for row in range(20)])
    assert len(story.run("three", "one", build=TellingBuild(next_token=drawn), **by_id)) == 20


def test_a_number_and_its_text_are_different_ids() -> None:
    assert stream_of_id("5") == stream_of_id(b"5") != stream_of_id(5)
    assert stream_of_id("id 0") == 17039562199256788580, "samples of today's jobs would change"


def test_key_by_id_needs_an_id_column(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"key: id needs input\.id_column"):
        job(tmp_path, sampling={"key": "id"})


def test_rows_of_two_outputs_are_reused(story: Story) -> None:
    story.write(numbered(10))
    story.run("one")
    story.write(numbered(10, start=5))
    story.run("two")
    story.write(numbered(20))
    assert story.run("three", "one", "two") == list(range(15, 20))
    story.check("three")
    assert story.run("four", "two", "three") == []  # rows that were copied can be copied again


def test_finished_rows_of_an_interrupted_run_are_reused(story: Story) -> None:
    story.write(numbered(40))
    stopped = Build(stop_at(60))
    one = story.spec("one", output={"rows_per_part": 16}, engine={"order": "input"})
    assert run_job(one, build=stopped, quiet=True) is ExitCode.INTERRUPTED
    segments = sorted((story.path / "one" / "_batchinfer" / "segments").iterdir())
    parts = sorted((story.path / "one" / "data").iterdir())
    assert segments
    assert parts
    done = pa.concat_tables(pq.read_table(path, columns=["row_id"]) for path in (*segments, *parts))
    expected = sorted(set(range(40)) - set(done["row_id"].to_pylist()))
    assert 0 < len(expected) < 40
    assert story.run("two", "one") == expected
    story.check("two")


def test_a_resumed_run_still_reuses(story: Story) -> None:
    story.write(numbered(40))
    story.run("one", input={"limit": 20})
    two = story.spec("two", ("one",))
    stopped = Build(stop_at(12))
    assert run_job(two, build=stopped, quiet=True) is ExitCode.INTERRUPTED
    again = Build()
    assert run_job(two, build=again, quiet=True) is ExitCode.OK
    assert {*stopped.ran, *again.ran} == set(range(20, 40))
    story.check("two")


def test_a_resumed_run_does_not_say_that_nothing_was_reused(
    story: Story, capsys: pytest.CaptureFixture[str]
) -> None:
    story.write(numbered(40))
    story.run("one", input={"limit": 10})
    two = story.spec("two", ("one",), output={"rows_per_part": 10}, engine={"order": "input"})
    assert run_job(two, build=Build(stop_at(25)), quiet=True) is ExitCode.INTERRUPTED
    capsys.readouterr()
    assert run_job(two, build=TellingBuild()) is ExitCode.OK
    assert "rows reused" not in capsys.readouterr().err
    assert story.summary("two")["rows"]["reused"] == 10


def test_a_run_can_be_stopped_while_it_copies(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    story.write(numbered(40))
    story.run("one", output={"rows_per_part": 16})
    copied, stop = RowReuse.copied, threading.Event()

    def stopping(self: RowReuse, found: FoundRows) -> Iterator[pa.Table]:
        tables = copied(self, found)
        yield next(tables)
        stop.set()
        yield from tables

    monkeypatch.setattr(run_module, "stop_signals", lambda: nullcontext(stop))
    monkeypatch.setattr(RowReuse, "copied", stopping)
    two = story.spec("two", ("one",))
    assert run_job(two, build=TellingBuild(), quiet=True) is ExitCode.INTERRUPTED
    monkeypatch.undo()
    assert story.run("two", "one") == []
    story.check("two")


@pytest.mark.parametrize(
    ("file", "damage"), [("data", "flip"), ("data", "delete"), ("keys", "flip")]
)
def test_damaged_files_are_not_reused(
    story: Story, file: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    story.write(numbered(25))
    story.run("one")
    folder = story.path / "one" if file == "data" else story.path / "one" / "_batchinfer"
    path = folder / file / "part-00001.parquet"
    if damage == "flip":
        flip_bit(path, 40)
    else:
        path.unlink()
    build = TellingBuild()
    assert run_job(story.spec("two", ("one",)), build=build) is ExitCode.OK
    assert sorted(build.ran) == list(range(10, 20))
    assert (str(path) in capsys.readouterr().err) == (file == "data")
    story.check("two")


def test_a_file_damaged_during_the_run_ends_it_but_not_the_next(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    story.write(numbered(25))
    story.run("one")
    check = FinishedFile.check

    def rot_after(self: FinishedFile) -> None:
        check(self)
        flip_bit(Path(self.path), 40)

    monkeypatch.setattr(FinishedFile, "check", rot_after)
    with pytest.raises(DataError, match=r"part-00000\.parquet.* hash differs"):
        story.run("two", "one")
    monkeypatch.undo()
    assert story.run("two", "one") == list(range(25))
    story.check("two")


def test_outputs_of_earlier_versions_have_no_keys(
    story: Story, capsys: pytest.CaptureFixture[str]
) -> None:
    story.write(numbered(25))
    story.run("one")
    for path in (story.path / "one" / "_batchinfer" / "parts").iterdir():
        record = json.loads(path.read_bytes())
        del record["keys_sha256"], record["num_reused"]
        path.write_text(json.dumps(record))
    build = TellingBuild()
    assert run_job(story.spec("two", ("one",)), build=build) is ExitCode.OK
    assert len(build.ran) == 25
    assert "0 of 25 rows reused" in (said := capsys.readouterr().err)
    assert "earlier version" in said


def test_output_whose_first_row_is_not_finished(
    story: Story, capsys: pytest.CaptureFixture[str]
) -> None:
    story.write(numbered(5))
    assert run_job(story.spec("one"), build=Build(stop_at(1)), quiet=True) is ExitCode.INTERRUPTED
    capsys.readouterr()
    assert run_job(story.spec("two", ("one",)), build=TellingBuild()) is ExitCode.OK
    said = capsys.readouterr().err.replace("\n", " ")
    assert f"0 of 5 rows reused from {story.path / 'one'}: the output has no finished rows" in said


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"engine": {"deterministic": True}}, "job differs: engine.deterministic"),
        ({"model": {"dtype": "float16"}}, "model differs: model.dtype"),
        ({"sampling": {"n": 2}}, "prompts or sampling parameters differ"),
    ],
)
def test_nothing_is_reused_from_another_model_and_a_line_says_why(
    story: Story, sections: Any, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    story.write(numbered(5))
    story.run("one")
    assert run_job(story.spec("two", ("one",), **sections), build=TellingBuild()) is ExitCode.OK
    said = capsys.readouterr().err.replace("\n", " ")
    assert f"0 of 5 rows reused from {story.path / 'one'}: {named}" in said
    assert story.summary("two")["rows"]["reused"] == 0


def test_a_folder_that_is_not_an_output_is_refused(story: Story) -> None:
    story.write(numbered(5))
    (story.path / "empty").mkdir()
    build = TellingBuild()
    for name in ("empty", "missing"):
        with pytest.raises(UsageError, match=f"{name} holds no batchinfer output"):
            run_job(story.spec("two", (name,)), build=build, quiet=True)
    story.run("one")
    assert not (story.path / "two").exists()
    with pytest.raises(UsageError, match="one is the output of this job"):
        run_job(story.spec("one", ("one",), input={"limit": 3}), build=build, overwrite=True)
    assert not build.count


_EDITS = st.tuples(
    st.sampled_from(["insert", "delete", "change", "move", "none"]),
    st.integers(0, 19),
    st.integers(0, 19),
)
_KEYS: list[dict[str, Any]] = [
    {},
    {"output": {"rows_per_part": 7}},
    {"engine": {"order": "input", "max_num_seqs": 2}},
    {"sampling": {"max_tokens": 5}},
    {"sampling": {"temperature": 1.0}},
    {"input": {"limit": 11}},
]


@pytest.mark.long
@settings(max_examples=20)
@given(
    edits=st.lists(_EDITS, max_size=4), before=st.sampled_from(_KEYS), now=st.sampled_from(_KEYS)
)
def test_random_edits_compute_exactly_the_new_rows(
    tmp_path_factory: pytest.TempPathFactory,
    edits: list[tuple[str, int, int]],
    before: dict[str, Any],
    now: dict[str, Any],
) -> None:
    story = Story(tmp_path_factory.mktemp("edits"))
    prompts = numbered(20)
    story.write(prompts)
    story.run("one", build=_engine(before), **before)
    known = _identities(prompts, before)
    for count, (what, at, to) in enumerate(edits):
        if what in ("delete", "move", "change") and at < len(prompts):
            moved = prompts.pop(at)
            if what != "delete":
                prompts.insert(to, moved if what == "move" else f"changed {count}")
        elif what == "insert":
            prompts.insert(at, f"new {count}")
    story.write(prompts)
    ran = story.run("two", "one", build=_engine(now), **now)
    assert ran == [row for row, one in enumerate(_identities(prompts, now)) if one not in known]
    story.check("two", build=_engine(now), **now)


def _engine(sections: dict[str, Any]) -> TellingBuild:
    return TellingBuild(next_token=drawn if _draws(sections) else echo)


def _draws(sections: dict[str, Any]) -> bool:
    return bool(sections.get("sampling", {}).get("temperature", 0.0) > 0)


def _identities(prompts: list[str], sections: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return what each row's answer depends on, for the rows within the limit."""
    most = sections.get("sampling", {}).get("max_tokens", 8)
    limit = sections.get("input", {}).get("limit", len(prompts))
    return [
        (text, most, row if _draws(sections) else None) for row, text in enumerate(prompts[:limit])
    ]


def test_reuse_on_the_command_line_with_a_model(tmp_path: Path) -> None:
    model = make_text_model(tmp_path / "model")
    prompts = [f"Tell me of the number {row}" for row in range(12)]
    write_parquet(tmp_path / "in.parquet", {"prompt": prompts})
    (tmp_path / "job.yaml").write_text(
        f"model: {model}\n"
        "input: {path: in.parquet}\n"
        "sampling: {max_tokens: 6, temperature: 0.9, n: 2, seed: 3}\n"
        "output: {path: out, rows_per_part: 5, include: [token_ids, prompt], "
        "rename: {prompt: asked}}\n"
    )

    def run(*options: str) -> str:
        arguments = ["run", str(tmp_path / "job.yaml"), "--no-report", *options]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        return result.output

    def parts(name: str) -> list[bytes]:
        return [path.read_bytes() for path in sorted((tmp_path / name / "data").iterdir())]

    run("--limit", "5", "--output", str(tmp_path / "some"))
    said = run("--reuse", str(tmp_path / "some"))
    assert re.search("reused +5 rows", said)
    requests = pq.read_table(tmp_path / "out" / "stats" / "requests.parquet")
    assert requests["row_id"].to_pylist() == list(range(5, 12))
    run("--output", str(tmp_path / "fresh"))
    assert parts("out") == parts("fresh")
