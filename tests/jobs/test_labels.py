"""The labels, and the model that reads them, are as their README says."""

from __future__ import annotations

import io
import random
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
from PIL import Image

from batchinfer.errors import ExitCode
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.load import load_job
from tests.scripts import load_script

JOBS = Path(__file__).resolve().parents[2] / "jobs"
LABELS = JOBS / "labels"


@cache
def script(name: str) -> ModuleType:
    """Import one of the scripts; their folder is not a package."""
    if str(LABELS) not in sys.path:
        sys.path.append(str(LABELS))
    return load_script(LABELS / f"{name}.py")


def score(out: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the exit code of score.py."""
    monkeypatch.setattr(sys, "argv", ["score.py", str(out)])
    with pytest.raises(SystemExit) as ended:
        script("score").main()
    return ended.value.code


def test_table_is_small_and_is_what_the_script_draws() -> None:
    assert (LABELS / "labels.parquet").stat().st_size < 1_000_000
    table = pq.read_table(LABELS / "labels.parquet")
    drawn = script("draw").labels_table()
    assert drawn.schema == table.schema
    assert drawn.drop_columns("image") == table.drop_columns("image")
    for row, again in zip(table.to_pylist()[:20], drawn.to_pylist(), strict=False):
        levels, others = (
            np.asarray(Image.open(io.BytesIO(one["image"]["bytes"])), dtype=float)
            for one in (row, again)
        )
        assert abs(levels - others).mean() < 2  # versions of Pillow may differ a little


def test_model_never_saw_the_numbers() -> None:
    rng, draw = random.Random(5), script("draw")
    held_out = set(pq.read_table(LABELS / "labels.parquet")["order_number"].to_pylist())
    assert len(held_out) == 256
    assert not any(draw.is_held_out(draw.draw_number(rng, "train")) for _ in range(500))
    assert all(map(draw.is_held_out, held_out))


def test_training_makes_the_pixels_of_the_image_processor() -> None:
    train, rng = script("train"), random.Random(5)
    labels = [script("draw").draw_label(rng, "train") for _ in range(3)]
    processor = train.Qwen2VLImageProcessorPil.from_pretrained(LABELS / "model")
    expected = processor([label.image for label in labels], return_tensors="pt")
    assert train.pixel_values(labels).equal(expected["pixel_values"])


def test_model_is_small_and_reads_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sum(file.stat().st_size for file in (LABELS / "model").iterdir()) <= 5_000_000
    spec = load_job(JOBS / "labels.yaml", output=str(tmp_path), limit=64)
    assert run_job(spec, quiet=True) is ExitCode.OK
    assert score(tmp_path, monkeypatch) == 0
    assert script("score").load(tmp_path)["right"].sum() == 64


@pytest.mark.parametrize(("right", "code"), [(19, 0), (18, 1)])
def test_score_fails_below_95_percent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: int, code: int
) -> None:
    (tmp_path / "data").mkdir()
    texts = [" 1234-5678\n"] * right + [None, "1234-5679"][: 20 - right]
    pl.DataFrame(
        {"id": range(20), "order_number": ["1234-5678"] * 20, "generated_text": texts}
    ).write_parquet(tmp_path / "data" / "part-00000.parquet")
    assert score(tmp_path, monkeypatch) == code


def test_score_says_when_there_is_no_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert score(tmp_path, monkeypatch) == 2
    assert "run the job first" in capsys.readouterr().err
