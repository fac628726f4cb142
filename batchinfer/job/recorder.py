"""What a run leaves about itself: its steps, its times, its log."""

from __future__ import annotations

import platform
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from batchinfer.job.files import storage_errors
from batchinfer.job.output import OutputDir
from batchinfer.job.stats import STEPS_SCHEMA, StepRow, StepSampler

if TYPE_CHECKING:
    from batchinfer.build import Built

STEPS_PER_FILE = 16384


@dataclass
class Run:
    """One run of a job, as kept in ``_batchinfer/runs``; times in seconds."""

    run_id: str
    model: dict[str, Any]
    device: str | None = None
    load_s: float = 0.0
    total_s: float = 0.0
    kv: dict[str, int] = field(default_factory=dict)
    """block_size, num_blocks, bytes_per_block; empty before the model is loaded."""
    peak_used_blocks: int = 0
    """Of all steps, also those that ``stats.every_steps`` leaves out."""

    @property
    def engine_s(self) -> float:
        """Time after loading."""
        return self.total_s - self.load_s if self.kv else 0.0


class Recorder:
    """Keeps the run's record on disk, at least as far as the finished parts go.

    Args:
        out: the output directory.
        model: what is known of the model before it is loaded.
        every_steps: steps per row of ``steps.parquet``.
    """

    def __init__(self, out: OutputDir, model: dict[str, Any], every_steps: int) -> None:
        self._out = out
        # Ids sort in the order of runs, whatever the clock did.
        self.run = Run(f"run-{len(list(out.runs.iterdir())) + 1:05d}", model)
        self.sampler = StepSampler(self.run.run_id, every_steps)
        """Makes the rows of this run's steps."""
        self._began = time.perf_counter()
        self._steps: list[StepRow] = []
        self._num_files = 0
        self._save()  # takes the id

    def loaded(self, built: Built) -> None:
        """Note that the model is loaded, and what came of it."""
        self.run.load_s = time.perf_counter() - self._began
        self.run.device, self.run.model = built.device, dict(built.model_facts)
        self.run.kv = {
            "block_size": built.block_size,
            "num_blocks": built.num_blocks,
            "bytes_per_block": built.bytes_per_block,
        }
        self._save()  # before the first step: the summary reads them together

    def add(self, steps: list[StepRow]) -> None:
        """Take step rows, in order."""
        self._steps.extend(steps)
        if len(self._steps) >= STEPS_PER_FILE:
            self._flush()

    def checkpoint(self) -> None:
        """Put on disk what has been taken so far."""
        self._flush()
        self._save()

    def log(self, line: str) -> None:
        """Append a line to the run's log."""
        path = self._out.logs / f"{self.run.run_id}.log"
        with storage_errors(path), path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def _save(self) -> None:
        self.run.total_s = time.perf_counter() - self._began
        self.run.peak_used_blocks = self.sampler.peak_used_blocks
        self._out.write_json(self._out.runs / f"{self.run.run_id}.json", asdict(self.run))

    def _flush(self) -> None:
        if self._steps:
            name = f"{self.run.run_id}-{self._num_files:06d}.parquet"
            table = pa.Table.from_pylist(self._steps, schema=STEPS_SCHEMA)
            self._out.write_table(self._out.steps / name, table)
            self._steps, self._num_files = [], self._num_files + 1


def package_versions() -> dict[str, str]:
    """Versions of what decides the output."""
    names = ("batchinfer", "torch", "transformers", "tokenizers", "numpy", "pyarrow")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}
