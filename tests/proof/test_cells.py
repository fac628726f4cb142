"""The matrix of faults notices each way in which an output can be wrong."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.proof.__main__ import only_user_of
from tests.proof.cells import Result, compare
from tests.proof.checkpoints import CHECKPOINTS
from tests.proof.faults import FAULTS
from tests.proof.jobs import SCHEDULES
from tests.proof.picture import draw

ROWS = {0: "a", 1: "b", 2: "c"}


def parts(rows: dict[int, str] | list[tuple[int, str]]) -> dict[str, bytes]:
    pairs = [*rows.items()] if isinstance(rows, dict) else rows
    file = io.BytesIO()
    table = {"row_id": [row for row, _ in pairs], "text": [text for _, text in pairs]}
    pq.write_table(pa.table(table), file)
    return {"data/part-00000.parquet": file.getvalue()}


@pytest.mark.parametrize(
    ("rows", "lost", "doubled", "differing"),
    [
        ([(0, "a"), (2, "c")], 1, 0, 0),
        ([(0, "a"), (1, "b"), (1, "b"), (2, "c")], 0, 1, 0),
        ([(0, "a"), (1, "B"), (2, "c")], 0, 0, 1),
        ([(0, "a"), (2, "c"), (1, "b")], 0, 0, 0),
    ],
    ids=["lost", "doubled", "changed", "reordered"],
)
def test_wrong_rows_are_counted(
    rows: list[tuple[int, str]], lost: int, doubled: int, differing: int
) -> None:
    found = compare(parts(ROWS), parts(rows), "")
    assert (found["lost"], found["doubled"], found["differing"]) == (lost, doubled, differing)
    assert found["verdict"] == "differs"


def test_rows_of_a_damaged_part_are_lost() -> None:
    found = compare(parts(ROWS), dict.fromkeys(parts(ROWS), b"PAR1"), "exit status 4")
    assert (found["verdict"], found["lost"]) == ("stuck", 3)


def test_equal_outputs_are_equal_unless_the_job_is_stuck() -> None:
    assert compare(parts(ROWS), parts(ROWS), "")["verdict"] == "equal"
    assert compare(parts(ROWS), parts(ROWS), "exit status 1")["verdict"] == "stuck"


def test_picture_has_a_square_for_each_cell() -> None:
    cell = ("qwen3", "sigterm", "small-pool")
    result = Result(*cell, "differs", 24, 0, 0, 1, False, [75, 0], 1.0)
    svg = draw([result])
    assert svg.count("<title>") == len(CHECKPOINTS) * len(FAULTS) * len(SCHEDULES) == 720
    assert "qwen3.sigterm.small-pool: differs" in svg
    assert "differs: 1 cells" in svg
    assert "not run: 719 cells" in svg


def test_two_processes_do_not_use_the_same_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.proof", "--models", "qwen3", "--folder", str(tmp_path)]
    with only_user_of(tmp_path):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"{tmp_path} is in use by another" in done.stderr
    with only_user_of(tmp_path):
        assert not (tmp_path / "now").exists()


@pytest.mark.long
def test_one_cell_of_each_kind_of_output(tmp_path: object) -> None:
    cells = ["qwen3.damaged-tokens.two-workers", "llama.store-503.small-pool"]
    command = [sys.executable, "-m", "tests.proof", *cells, "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, "2 of 2 cells equal" in done.stdout) == (0, True), done.stdout
