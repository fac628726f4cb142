"""Updates killed at each of their named points, and what must be true of the output afterwards."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from random import Random

from batchinfer.errors import ExitCode
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.verify import verify
from batchinfer.job.spec.spec import JobSpec
from tests.faults.children import KILLED, Pace, start
from tests.faults.kills import count_to
from tests.faults.violation import ViolationError
from tests.job.datasets import write_parquet
from tests.job.fakes import FakeBuild, drawn, job

_PACE = Pace(1e9, 4)
Data = dict[str, bytes]


class UpdateKiller:
    """Updates one finished output over and over, in a folder of its own each time.

    The new input has rows more, rows less and other rows; samples are drawn.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self.kills = 0
        prompts = [f"{row if row % 5 else 'x'} asks" for row in range(40)]
        self._write(prompts)
        self._build = FakeBuild(max_num_seqs=8, next_token=drawn)
        self._before = folder / "before"
        self._run(self._before, expected=ExitCode.OK)
        self._old = _data(self._before)
        self._write([*prompts[3:20], "new", *prompts[20:], "another"])
        self._run(folder / "fresh", expected=ExitCode.OK)
        self._new = _data(folder / "fresh")
        self.reached: Counter[str] = Counter()
        self._count_points()

    def points(self) -> list[str]:
        """Each point that an update comes to: its first, middle and last time."""
        times = {name: {1, (last + 1) // 2, last} for name, last in self.reached.items()}
        return [f"{name}:{at}" for name in sorted(times) for at in sorted(times[name])]

    def kill_at(self, point: str, random: Random) -> None:
        """Kill an update at a point, and perhaps the run that goes on; then let it end."""
        out = self._copy()
        self._run(out, point, update=True, expected=KILLED)
        self._check_one_generation(out)
        if random.random() < 0.5:
            self._run(out, random.choice(self.points()), update=_asks(out, random))
            self._check_one_generation(out)
        self._run(out, update=_asks(out, random), expected=ExitCode.OK)
        if _data(out) != self._new:
            raise ViolationError(f"after a kill at {point} the output is not as a fresh one")
        if problems := verify(OutputDir(out)).problems:
            raise ViolationError(f"after a kill at {point}: {problems[0]}")
        if (out / "_batchinfer" / "next").exists() or (out / "_batchinfer" / "swap.json").exists():
            raise ViolationError(f"after a kill at {point} something is left over")
        shutil.rmtree(out)

    def _check_one_generation(self, out: Path) -> None:
        """Check that readers find one generation and ``_SUCCESS``, or that no reader is misled."""
        finished = (out / "_SUCCESS").exists()
        if finished and _data(out) not in (self._old, self._new):
            raise ViolationError(f"{out} has _SUCCESS and files of two generations")
        if not finished and not (out / "_batchinfer" / "swap.json").exists():
            raise ViolationError(f"{out} has lost its _SUCCESS, and no update is half-way there")

    def _count_points(self) -> None:
        out, counts = self._copy(), self._folder / "counts"
        child = start(
            self._job(out),
            self._build,
            _PACE,
            self._folder,
            around=lambda: count_to(counts),
            update=True,
        )
        if child.wait() != ExitCode.OK or _data(out) != self._new:
            raise ViolationError((self._folder / "log").read_text())
        self.reached = Counter(counts.read_text().split())

    def _copy(self) -> Path:
        self._count += 1
        return Path(shutil.copytree(self._before, self._folder / f"out{self._count}"))

    def _run(
        self, out: Path, point: str = "", *, update: bool = False, expected: int | None = None
    ) -> None:
        child = start(self._job(out), self._build, _PACE, self._folder, point, update=update)
        code = child.wait()
        self.kills += code == KILLED
        if code != expected and (expected is not None or code not in (KILLED, ExitCode.OK)):
            log = (self._folder / "log").read_text()
            raise ViolationError(f"{point}: exit {code}, not {expected}:\n{log}")

    def _job(self, out: Path) -> JobSpec:
        sampling = {"max_tokens": 6, "temperature": 1.0}
        output = {"path": str(out), "rows_per_part": 10}
        return job(self._folder, engine={"max_num_seqs": 8}, sampling=sampling, output=output)

    def _write(self, prompts: list[str]) -> None:
        write_parquet(self._folder / "in" / "x.parquet", {"prompt": prompts})


def _asks(out: Path, random: Random) -> bool:
    """Whether to ask for an update: one that was begun is gone on with by any run."""
    is_begun = any(out.glob("_batchinfer/next/*/_batchinfer/manifest*.json"))
    return not is_begun or random.random() < 0.5


def _data(out: Path) -> Data:
    return {path.name: path.read_bytes() for path in sorted((out / "data").iterdir())}
