"""The notes and charts, and the model that reads them, are as their README says."""

from __future__ import annotations

import io
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from batchinfer.errors import ExitCode
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.load import load_job
from tests.scripts import load_script

JOBS = Path(__file__).resolve().parents[2] / "jobs"
PAGES = JOBS / "pages"


@cache
def script(name: str) -> ModuleType:
    """Import one of the scripts; their folder is not a package."""
    return load_script(PAGES / f"{name}.py")


@pytest.mark.parametrize("name", ["notes", "charts"])
def test_tables_are_small_and_are_what_the_script_draws(name: str) -> None:
    path, draw = PAGES / f"{name}.parquet", script("draw")
    assert path.stat().st_size < 1_000_000
    table = pq.read_table(path)
    drawn = draw.table({"notes": draw.draw_note, "charts": draw.draw_chart}[name])
    assert drawn.schema == table.schema
    assert drawn.drop_columns("image") == table.drop_columns("image")
    for row, again in zip(table.to_pylist()[:10], drawn.to_pylist(), strict=False):
        levels, others = (
            np.asarray(Image.open(io.BytesIO(one["image"]["bytes"])), dtype=float)
            for one in (row, again)
        )
        assert abs(levels - others).mean() < 2  # versions of Pillow may differ a little


@pytest.mark.long
@pytest.mark.parametrize("name", ["notes", "captions"])
def test_model_is_small_and_reads_pictures(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sum(file.stat().st_size for file in (PAGES / "model").iterdir()) <= 5_000_000
    spec = load_job(JOBS / f"{name}.yaml", output=str(tmp_path), limit=48)
    assert run_job(spec, quiet=True) is ExitCode.OK
    monkeypatch.setattr(sys, "argv", ["score.py", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        script("score").main()
    assert ended.value.code == 0


@pytest.mark.parametrize(
    ("text", "right"),
    [('{"boxes":3,"order":"1"}', True), ('{"order": "1", "boxes": 4}', False), (None, False)],
)
def test_score_compares_json(text: str | None, right: bool) -> None:
    assert script("score").is_right('{"order": "1", "boxes": 3}', text) is right


def test_score_compares_captions() -> None:
    is_right = script("score").is_right
    assert is_right("4 bars.", " 4 bars.\n")
    assert not is_right("4 bars.", "5 bars.")
