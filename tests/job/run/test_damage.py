"""Jobs whose parts or input files are damaged or replaced."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchinfer.errors import DataError, ExitCode, LockedError, UsageError
from batchinfer.job.run import run_job as run_module
from batchinfer.job.run.pipeline import run_pipeline
from batchinfer.job.run.run_job import run_job
from tests.job.datasets import flip_bit, rot, write_parquet
from tests.job.fakes import FakeBuild, job
from tests.job.run.outputs import numbered, output


def then(harm: Callable[[], object]) -> Callable[..., bool]:
    """Return a ``run_pipeline`` that calls ``harm`` after the parts are made."""

    def make_and_harm(*arguments: Any) -> bool:
        made = run_pipeline(*arguments)
        harm()
        return made

    return make_and_harm


@pytest.mark.parametrize(
    ("harm", "says"), [(Path.unlink, "is missing"), (rot, r"has changed since .*")]
)
@pytest.mark.parametrize("name", ["data", "_batchinfer/requests"])
def test_part_damaged_during_the_run_withholds_success(
    tmp_path: Path,
    build: FakeBuild,
    monkeypatch: pytest.MonkeyPatch,
    harm: Callable[[Path], None],
    says: str,
    name: str,
) -> None:
    numbered(tmp_path)
    file = tmp_path / "out" / name / "part-00001.parquet"
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "run_pipeline", then(lambda: harm(file)))
        with pytest.raises(DataError, match=rf"part-00001\.parquet {says}\nto make the part again"):
            run_job(job(tmp_path), build=build)
    assert not (tmp_path / "out" / "_SUCCESS").exists()
    assert run_job(job(tmp_path), build=build) is ExitCode.OK
    assert output(tmp_path)["row_id"].to_pylist() == list(range(25))


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes, but "),
        (lambda path: flip_bit(path, 40), "its hash differs"),
        (rot, "its hash differs"),
    ],
)
def test_damaged_part_is_named_with_the_reason(
    tmp_path: Path,
    build: FakeBuild,
    capsys: pytest.CaptureFixture[str],
    harm: Callable[[Path], None],
    says: str,
) -> None:
    numbered(tmp_path)
    run_job(job(tmp_path), build=build)
    path = tmp_path / "out" / "data" / "part-00001.parquet"
    (tmp_path / "out" / "_SUCCESS").unlink()  # an output with _SUCCESS is not checked again
    harm(path)
    capsys.readouterr()
    run_job(job(tmp_path), build=build)
    line, before = capsys.readouterr().err.splitlines()
    assert before == "15 of 25 rows were already finished"
    assert line.startswith(f"rewriting part-00001: {path} ")
    assert says in line


def rewrite(path: Path, *, in_place: bool) -> None:
    """Change a byte of a file, but neither its size nor its modification time."""
    data, stat = bytearray(path.read_bytes()), path.stat()
    data[60] ^= 1
    if not in_place:
        path.unlink()
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_mtime_ns == stat.st_mtime_ns


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda path: os.utime(path, ns=(5, 5)), "was changed while the job was running"),
        (lambda path: rewrite(path, in_place=True), "name, links or permissions were changed"),
        (lambda path: rewrite(path, in_place=False), "name, links or permissions were changed"),
        (Path.unlink, "can no longer be read"),
    ],
)
def test_input_replaced_during_the_run_withholds_success(
    tmp_path: Path,
    build: FakeBuild,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], None],
    says: str,
) -> None:
    numbered(tmp_path)
    path = tmp_path / "in" / "x.parquet"
    monkeypatch.setattr(run_module, "run_pipeline", then(lambda: change(path)))
    with pytest.raises(DataError, match=rf"x\.parquet.* {says}"):
        run_job(job(tmp_path), build=build)
    assert not (tmp_path / "out" / "_SUCCESS").exists()


def test_foreign_part_withholds_success(
    tmp_path: Path, build: FakeBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbered(tmp_path)
    stray = tmp_path / "out" / "data" / "part-00003.parquet"
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "run_pipeline", then(stray.touch))
        with pytest.raises(LockedError, match=r"part-00003\.parquet is not a part of this job"):
            run_job(job(tmp_path), build=build)
    assert not (tmp_path / "out" / "_SUCCESS").exists()


@pytest.mark.parametrize("linked", ["input file", "output data"])
def test_linked_input_in_the_output_is_refused(
    tmp_path: Path, build: FakeBuild, linked: str
) -> None:
    numbered(tmp_path)
    run_job(job(tmp_path), build=build)
    source = tmp_path / "linked" / "part-00000.parquet"
    source.parent.mkdir()
    if linked == "input file":
        source.symlink_to(tmp_path / "out" / "data" / source.name)
    else:
        shutil.rmtree(tmp_path / "out")
        write_parquet(source, {"prompt": ["a"]})
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "data").symlink_to(source.parent)
    spec = job(tmp_path, input={"path": str(source.parent)})
    with pytest.raises(UsageError, match="both an input and an output"):
        run_job(spec, build=build, overwrite=True)
    assert source.exists()


def test_corrupt_row_group_keeps_earlier_parts(tmp_path: Path, build: FakeBuild) -> None:
    prompts = [f"row {row}" for row in range(60)]
    path = tmp_path / "in" / "x.parquet"
    write_parquet(path, {"prompt": prompts, "n": range(60)}, rows_per_group=20)
    chunk = pq.ParquetFile(path).metadata.row_group(2).column(0)
    data = bytearray(path.read_bytes())
    data[chunk.dictionary_page_offset + chunk.total_compressed_size - 3] ^= 1
    path.write_bytes(data)
    spec = job(tmp_path, engine={"order": "input"})
    with pytest.raises(DataError, match=r"x\.parquet: row group 2"):
        run_job(spec, build=build)
    assert output(tmp_path)["row_id"].to_pylist() == list(range(40))
