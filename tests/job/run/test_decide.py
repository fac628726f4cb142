"""Decisions before a run: options that cannot be combined."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from batchinfer.errors import ExitCode, UsageError
from batchinfer.job.claims.shard import Shard
from batchinfer.job.claims.shared_claim import Role
from batchinfer.job.run.decide import REFUSED
from batchinfer.job.run.run_job import run_job
from tests.job.datasets import write_parquet
from tests.job.fakes import FakeBuild, job

OPTIONS: dict[str, dict[str, Any]] = {
    "--overwrite": {"overwrite": True},
    "--retry-errors": {"retry_errors": True},
    "--update": {"update": True},
    "--shard": {"role": Role(Shard(0, 2))},
    "--worker": {"role": Role(is_worker=True)},
    "--workers": {"fleet": lambda *_: True},
}


@pytest.mark.parametrize("pair", REFUSED)
def test_contradicting_options_are_refused(tmp_path: Path, pair: tuple[str, str]) -> None:
    first, second = pair
    with pytest.raises(UsageError, match=f"{first} .*{second}"):
        run_job(job(tmp_path), **OPTIONS[first], **OPTIONS[second])


@pytest.mark.parametrize("output", ["model", "model/out", "linked/out", "."])
@pytest.mark.parametrize("key", ["name", "tokenizer", "adapters.one"])
def test_output_in_a_folder_of_the_model_is_refused(tmp_path: Path, output: str, key: str) -> None:
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": ["a"]})
    (tmp_path / "model").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "model")
    folder = str(tmp_path / "model")
    model = {"name": "org/model"} | ({"adapters": {"one": folder}} if "." in key else {key: folder})
    spec = job(tmp_path, model=model, output={"path": str(tmp_path / output)})
    with pytest.raises(UsageError, match=f"output.path: .* the folder of model.{key}, "):
        run_job(spec, build=FakeBuild(), overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["in", "linked", "model"]
    assert not os.listdir(folder)


def test_output_beside_the_model_is_accepted(tmp_path: Path) -> None:
    write_parquet(tmp_path / "in" / "x.parquet", {"prompt": ["a"]})
    (tmp_path / "model").mkdir()
    spec = job(
        tmp_path,
        model={"name": str(tmp_path / "model")},
        output={"path": str(tmp_path / "model-out")},
    )
    assert run_job(spec, build=FakeBuild(), quiet=True) is ExitCode.OK
