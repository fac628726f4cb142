"""``verify`` names all damage in an output directory."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import pyarrow.parquet as pq
import pytest

from batchinfer.errors import DataError, ExitCode
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.verify import Verification, verify
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.spec import JobSpec
from batchinfer.report import write
from tests.job.datasets import flip_bit, rot, write_parquet
from tests.job.fakes import FakeBuild, job
from tests.job.output.test_resume import Build, stop_at

PART = "data/part-00001.parquet"
RECORD = "_batchinfer/parts/part-00001.json"
KEYS = "_batchinfer/keys/part-00001.parquet"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished job."""
    folder = tmp_path_factory.mktemp("finished")
    prompts = [f"{row} asks" if row != 13 else "" for row in range(25)]
    write_parquet(folder / "in" / "x.parquet", {"prompt": prompts})
    run_job(finished_job(folder), build=FakeBuild(), quiet=True)
    return folder


@pytest.fixture
def root(finished: Path, tmp_path: Path) -> Path:
    """Return a copy of the finished job's output."""
    return shutil.copytree(finished, tmp_path, dirs_exist_ok=True) / "out"


@pytest.fixture
def older(root: Path) -> Path:
    """Return the output of a job that an older version finished, without a record of files."""
    for path in OutputDir(root).file_records:
        Path(path).unlink()
    return root


def finished_job(tmp_path: Path) -> JobSpec:
    sampling = {"logit_bias": {"10": 1.0, "9": 1.0}}
    return job(tmp_path, errors={"max_error_rate": 1}, sampling=sampling)


def found(root: Path) -> Verification:
    return verify(OutputDir(root))


def rewrite(root: Path, change: Callable[[Path], None]) -> None:
    """Change a part, and update its record to match."""
    part, record = root / PART, root / RECORD
    change(part)
    fields = json.loads(record.read_bytes())
    fields["size"], fields["mtime_ns"] = part.stat().st_size, part.stat().st_mtime_ns
    fields["sha256"] = hashlib.sha256(part.read_bytes()).hexdigest()
    record.write_text(json.dumps(fields))


def other_rows(path: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(table.slice(1), path)


def other_order(path: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(table.take(list(range(table.num_rows))[::-1]), path)


def other_columns(path: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(table.append_column("zork", table["row_id"]), path)


def other_job(path: Path) -> None:
    pq.write_table(pq.read_table(path).replace_schema_metadata({}), path)


def test_verify_of_a_finished_job(root: Path) -> None:
    done = found(root)
    assert done == Verification(True, 3, 3, 25, [])
    assert list(done.lines()) == ["finished: 3 of 3 parts, 25 rows; everything matches its record"]
    assert done.data()["ok"] is True


def test_verify_of_the_output_of_an_older_version(older: Path) -> None:
    done = found(older)
    assert done == Verification(True, 3, 3, 25, [], lacks_hashes=True)
    note, line = done.lines()
    assert note.startswith("an older version finished this job and stored no hashes")
    assert line == "finished: 3 of 3 parts, 25 rows; everything matches its record"
    (older / "_SUCCESS").unlink()
    (line,) = found(older).lines()
    assert (
        line == "not finished (no _SUCCESS): 3 of 3 parts, 25 rows; everything matches its record"
    )


def test_verify_of_a_stopped_job(tmp_path: Path) -> None:
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": [f"{row}" * 9 for row in range(40)]})
    run_job(job(tmp_path), build=Build(stop_at(40)), quiet=True)
    done = found(tmp_path / "out")
    assert not done.complete
    assert done.problems == []
    assert done.parts_done < done.parts_total == 4


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda root: (root / PART).unlink(), f"{PART} is missing"),
        (lambda root: (root / PART).write_bytes(b""), f"{PART} has 0 bytes"),
        (lambda root: flip_bit(root / PART, 50), f"{PART} has changed since it was written"),
        (lambda root: rot(root / PART), "its hash differs"),
        (lambda root: flip_bit(root / KEYS, 50), f"{KEYS} has changed since it was written"),
        (lambda root: (root / RECORD).write_bytes(b"{"), f"{RECORD} is damaged"),
        (lambda root: (root / RECORD).unlink(), f"{PART} has no record despite _SUCCESS"),
        (lambda root: rewrite(root, lambda path: flip_bit(path, 50)), f"{PART}: "),
        (lambda root: rewrite(root, other_rows), f"{PART}: it has 9 rows, not 10"),
        (
            lambda root: rewrite(root, other_order),
            f"{PART}: its rows are not the rows of the input",
        ),
        (lambda root: rewrite(root, other_columns), f"{PART} has different columns"),
        (lambda root: rewrite(root, other_job), f"{PART} was made by another job"),
        (
            lambda root: (root / RECORD).write_text(
                (root / RECORD).read_text().replace('"empty_prompt": 1', '"empty_prompt": 2')
            ),
            f"{PART} has 1 failed rows, but its record says 2",
        ),
        (lambda root: (root / "data" / "x.csv").touch(), "data/x.csv is not a part of this job"),
        (
            lambda root: (root / "data/part-00003.parquet").touch(),
            "data/part-00003.parquet is not a part of this job",
        ),
        (
            lambda root: (root / "_batchinfer/requests/part-00001.parquet").write_bytes(b"zork"),
            "requests/part-00001.parquet has changed",
        ),
        (
            lambda root: (root / "_batchinfer/segments/segment-000000.parquet").write_bytes(b"z"),
            "segment-000000.parquet cannot be read",
        ),
        (lambda root: (root / "summary.json").write_text("{}"), "summary.json is damaged"),
        (
            lambda root: (root / "_batchinfer/manifest.json").write_bytes(b""),
            "manifest.json is damaged",
        ),
        (
            lambda root: (root / "_batchinfer/manifest.json").write_text(
                (root / "_batchinfer/manifest.json").read_text().replace("generate", "zork")
            ),
            "manifest.json: its fingerprint does not match the job in it",
        ),
    ],
)
def test_verify_names_damage(older: Path, harm: Callable[[Path], None], says: str) -> None:
    harm(older)
    done = found(older)
    assert len(done.problems) == 1
    assert says in done.problems[0]
    assert done.data()["ok"] is False
    assert list(done.lines())[-1].endswith("run the job again to repair the output")


@pytest.mark.parametrize(
    "name", [PART, KEYS, "_batchinfer/manifest.json", "_batchinfer/requests/part-00001.parquet"]
)
def test_the_repair_that_verify_suggests_works(tmp_path: Path, root: Path, name: str) -> None:
    rot(root / name)
    (root / "_batchinfer/manifest.json").write_bytes(b"")
    advice = list(found(root).lines())[-1]
    assert advice.endswith("move the damaged files away and run the job again to repair the output")
    (root / name).unlink()
    (root / "_batchinfer/manifest.json").unlink(missing_ok=True)
    advice = list(found(root).lines())[-1]
    assert advice.endswith("rows; run the job again to repair the output")
    run_job(finished_job(tmp_path), build=FakeBuild(), quiet=True)
    assert found(root) == Verification(True, 3, 3, 25, [])


def test_every_flip_and_deletion_is_noticed_and_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "page", lambda *_: "<p>A report without charts is fast.")
    columns = {"prompt": ["a asks", "", "b asks"], "id": [1, 1, 2], "lang": ["en"] * 3}
    write_parquet(tmp_path / "in" / "x.parquet", columns)
    spec = job(
        tmp_path,
        input={"id_column": "id"},
        output={"partition_by": ["lang"]},
        errors={"max_error_rate": 1},
    )

    def run() -> None:
        code = run_job(spec, build=FakeBuild(), quiet=True, report=write.report_at_end)
        assert code is ExitCode.OK

    run()
    root = tmp_path / "out"
    names = [str(path.relative_to(root)) for path in sorted(root.rglob("*")) if path.is_file()]
    one_of_each_kind = {re.sub(r"\d+", "", name): name for name in names}
    del one_of_each_kind["_batchinfer/lock"]
    for name in one_of_each_kind.values():
        file = root / name
        data = file.read_bytes()
        for at in {0, len(data) - 1} if data else ():
            flip_bit(file, at)
            assert [name in problem for problem in found(root).problems] == [True], (name, at)
            file.write_bytes(data)
        file.unlink()
        problems = found(root).problems
        assert any(name in problem for problem in problems), name
        run()
        assert found(root).problems == [], name


def test_verify_shows_the_first_problems(root: Path) -> None:
    for number in range(30):
        (root / "data" / f"{number}.csv").touch()
    lines = list(found(root).lines())
    assert len(lines) == 12
    assert lines[10] == "and 20 more problems"


def test_verify_without_a_plan(root: Path) -> None:
    for name in ("manifest.json", "manifest-copy.json"):
        (root / "_batchinfer" / name).write_bytes(b"{")
    with pytest.raises(DataError, match="damaged"):
        found(root)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads its peak from /proc")
def test_verify_streams_large_parts(tmp_path: Path) -> None:
    """The large part has 72 MiB of incompressible data, more than the reader prefetches."""
    blobs = [Random(row).randbytes(1 << 20) for row in range(72)]
    columns = {"prompt": ["asks"] * len(blobs), "blob": blobs}
    write_parquet(tmp_path / "in" / "x.parquet", columns)
    small, large = tmp_path / "small", tmp_path / "large"
    for root, kept in ((small, []), (large, ["blob"])):
        output = {"path": str(root), "rows_per_part": len(blobs)}
        spec = job(tmp_path, input={"keep_columns": kept}, output=output)
        assert run_job(spec, build=FakeBuild(), quiet=True) is ExitCode.OK
    assert (large / "data" / "part-00000.parquet").stat().st_size > 72 << 20

    assert peak_of_verify(large) - peak_of_verify(small) < 40 << 20


def peak_of_verify(root: Path) -> int:
    """Return the peak memory in bytes of a process that verifies an output."""
    code = (
        "import sys; from pathlib import Path; "
        "from batchinfer.job.output.directory import OutputDir; "
        "from batchinfer.job.output.verify import verify; "
        "assert not verify(OutputDir(Path(sys.argv[1]))).problems; "
        "print(Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0])"
    )
    command = [sys.executable, "-c", code, str(root)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout) * 1024
