"""Decisions before a run: options that cannot be combined."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchinfer.errors import UsageError
from batchinfer.job.claims.shard import Shard
from batchinfer.job.claims.shared_claim import Role
from batchinfer.job.run.decide import REFUSED
from batchinfer.job.run.run_job import run_job
from tests.job.fakes import job

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
