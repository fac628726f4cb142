"""Jobs of long answers, killed: what was drawn before the last flush is not drawn again."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from batchinfer.engine.stats import StepStats
from batchinfer.job.claims.crashes import crash_history_from
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.stats.recorder import Recorder
from batchinfer.job.tokens.in_flight import TokenUpdate
from batchinfer.job.tokens.token_files import TokenFiles
from tests.faults.children import KILLED, BuildEngine, Pace, start
from tests.faults.kills import Killer
from tests.faults.violation import ViolationError
from tests.job.datasets import write_parquet

LONGEST = 4000
_MEAN = 800
_MAKE_MODEL = "import sys; from pathlib import Path; from tests.models import make_text_model; "
_MAKE_MODEL += f"make_text_model(Path(sys.argv[1]), max_position_embeddings={LONGEST + 96})"
_TO_THE_END = {"ignore_eos": True}
SAMPLES: tuple[dict[str, Any], ...] = (
    {**_TO_THE_END, "temperature": 0.0},
    _TO_THE_END,
    {**_TO_THE_END, "n": 4},
    {**_TO_THE_END, "frequency_penalty": 0.4, "repetition_penalty": 1.1},
    {"min_tokens": 300, "logprobs": 3},
    {**_TO_THE_END, "stop": ["ab~", "zz"], "bad_words": ["q"]},
    {"structured_outputs": {"regex": "(item [a-f]{3,40}; ){20,50}done"}, "n": 2},
)
SEARCHES: tuple[dict[str, Any], ...] = (
    {"beam_width": 2},
    {"beam_width": 4, "n": 2, **_TO_THE_END},
)
"""What rows of a job ask for beside their length."""


def long_job(folder: Path, num_rows: int, *, searches: bool = False) -> JobSpec:
    """A job whose answers have 800 tokens in the mean, at most 4,000: samples of all kinds, with
    log-probabilities, or beam searches."""
    model, kinds = folder / "model", SEARCHES if searches else SAMPLES
    subprocess.run([sys.executable, "-c", _MAKE_MODEL, str(model)], check=True)
    random = Random(1)
    own = []
    for row in range(num_rows):
        most = min(LONGEST, 20 + int(random.expovariate(1 / _MEAN)))
        own.append({"max_tokens": max(most, 320), **kinds[row % len(kinds)]})
    prompts = [f"Row {row} asks at length" for row in range(num_rows)]
    columns = {"prompt": prompts, "sampling_params": list(map(json.dumps, own))}
    write_parquet(folder / "in" / "x.parquet", columns)
    sampling = {"temperature": 0.0} if searches else {"temperature": 1.0, "seed": 3, "logprobs": 0}
    include = ["token_ids"] if searches else ["token_ids", "logprobs"]
    return JobSpec.model_validate(
        {
            "model": {"name": str(model)},
            "input": {"path": str(folder / "in")},
            "prompt": {"column": "prompt", "chat_template": "none"},
            "sampling": {"max_tokens": LONGEST, **sampling},
            "engine": {"num_kv_blocks": 4000, "max_num_seqs": 48},
            "output": {"path": str(folder / "unused"), "rows_per_part": 16, "include": include},
        }
    )


@dataclass
class TokensAgain:
    """What kills cost."""

    tokens: list[int] = field(default_factory=list)
    """Of each kill: tokens drawn after those on disk."""
    seconds: list[float] = field(default_factory=list)
    """Of each kill: since the last turn of the engine whose tokens are on disk."""
    drawn: list[tuple[int, float]] = field(default_factory=list)
    """Of each run: tokens drawn, and seconds from the first to the last of them."""
    bytes_written: list[int] = field(default_factory=list)
    """Of each run: in files of tokens."""
    most_bytes: int = 0
    """Ever in files of tokens."""
    of_suspects: int = 0
    """Kills of runs that began with suspects."""

    @property
    def num_drawn(self) -> int:
        """Tokens of all runs."""
        return sum(tokens for tokens, _ in self.drawn)

    @property
    def seconds_drawn(self) -> float:
        """Seconds in which they were drawn."""
        return sum(seconds for _, seconds in self.drawn)


class LongKiller(Killer):
    """Runs jobs of long answers over and over."""

    def __init__(self, folder: Path, spec: JobSpec, build: BuildEngine | None, pace: Pace) -> None:
        super().__init__(folder, spec, build, pace)
        self.again = TokensAgain()

    def kill_again_and_again(
        self, kills: int, random: Random, least_s: float, most_s: float
    ) -> None:
        """Kill runs some seconds after they began, until there were so many kills."""
        while self.outcome.kills < kills:
            self._begin()
            code = KILLED
            while code == KILLED:
                killing = self.outcome.kills < kills
                code = self._run(random.uniform(least_s, most_s) if killing else 600.0)
            self._check(code)

    def bytes_of_parts(self) -> dict[str, bytes]:
        """The parts of the latest job."""
        return {n: data for n, data in self.output.files().items() if n.startswith("data/")}

    def run_unbroken(self) -> None:
        super().run_unbroken()
        self._unbroken = self.bytes_of_parts()

    def _check(self, code: int) -> None:
        super()._check(code)
        if self.bytes_of_parts() != self._unbroken:
            raise ViolationError(f"{self.output.path}: parts have other bytes")

    def _run(self, kill_after_s: float, failpoint: str = "") -> int:
        told = self._place / "drawn"
        told.unlink(missing_ok=True)
        child = start(
            *(self._job(), self.build, self.pace, self._place, failpoint),
            around=partial(_tell_drawn, told),
        )
        code = child.kill_after(kill_after_s)
        ended = time.monotonic()
        lines = told.read_text().splitlines() if told.exists() else []
        self._note_tokens([line.split() for line in lines if line.endswith(".")], ended, code)
        return code

    def _note_tokens(self, lines: list[list[str]], ended: float, code: int) -> None:
        """Count a run's lines: ``drawn TOKENS AT .`` for each step, ``kept BYTES SIZE .``."""
        again, since, drawn, first, written = 0, None, 0, None, 0
        for what, number, at, _ in lines:
            if what == "kept":
                again, since, written = 0, None, int(number)
                self.again.most_bytes = max(self.again.most_bytes, int(at))
                continue
            first, since = first or float(at), since or float(at)
            again += int(number)
            drawn += int(number)
        self.again.drawn.append((drawn, ended - (first or ended)))
        self.again.bytes_written.append(written)
        if code == KILLED:
            self.outcome.kills += 1
            self.again.tokens.append(again)
            self.again.seconds.append(ended - (since or ended))
            history = self.output.files().get("_batchinfer/suspects.json", b"")
            self.again.of_suspects += bool(crash_history_from(history).groups)


def _tell_drawn(path: Path) -> None:
    """Write down each step's tokens as they are handed to the writing thread, and each flush."""
    file = path.open("ab", buffering=0)
    add, write = Recorder.add, TokenFiles.write

    def add_and_tell(self: Recorder, step: StepStats | None, num_rows: int) -> None:
        if step is not None:
            file.write(b"drawn %d %f .\n" % (step.decode_tokens, time.monotonic()))
        add(self, step, num_rows)

    def write_and_tell(self: TokenFiles, update: TokenUpdate) -> None:
        write(self, update)
        file.write(b"kept %d %d .\n" % (self.bytes_written, self.size))

    Recorder.add = add_and_tell  # type: ignore[method-assign]
    TokenFiles.write = write_and_tell  # type: ignore[method-assign,assignment]
