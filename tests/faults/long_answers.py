"""Kill jobs with long answers, and check that no flushed token is drawn again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from batchinfer.engine.stats import StepStats
from batchinfer.job.claims.crashed_rows import crash_history_from
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.stats.run_record import RunRecorder
from batchinfer.job.tokens.in_flight import TokenUpdate
from batchinfer.job.tokens.token_files import TokenFiles
from tests.faults.kills import KILLED, Killer
from tests.job.datasets import write_parquet

LONGEST = 4000
_MEAN = 800
_MAKE_MODEL = "import sys; from pathlib import Path; from tests.models import make_text_model; "
_MAKE_MODEL += f"make_text_model(Path(sys.argv[1]), max_position_embeddings={LONGEST + 96})"
_FULL_LENGTH = {"ignore_eos": True}
SAMPLES: tuple[dict[str, Any], ...] = (
    {**_FULL_LENGTH, "temperature": 0.0},
    _FULL_LENGTH,
    {**_FULL_LENGTH, "n": 4},
    {**_FULL_LENGTH, "frequency_penalty": 0.4, "repetition_penalty": 1.1},
    {"min_tokens": 300, "logprobs": 3},
    {**_FULL_LENGTH, "stop": ["ab~", "zz"], "bad_words": ["q"]},
    {"structured_outputs": {"regex": "(item [a-f]{3,40}; ){20,50}done"}, "n": 2},
)
SEARCHES: tuple[dict[str, Any], ...] = (
    {"beam_width": 2},
    {"beam_width": 4, "n": 2, **_FULL_LENGTH},
    {"beam_width": 3, "min_tokens": 300, "repetition_penalty": 1.1, "stop": ["ab~"]},
)
"""Sampling parameters of beam searches."""


def long_job(folder: Path, num_rows: int, *, searches: bool = False) -> JobSpec:
    """Return a job with answers of 800 tokens on average and 4,000 at most.

    Args:
        searches: use beam search; otherwise samples with all kinds of parameters.
    """
    folder.mkdir(exist_ok=True)
    model, kinds = folder / "model", SEARCHES if searches else SAMPLES
    subprocess.run([sys.executable, "-c", _MAKE_MODEL, str(model)], check=True)
    random = Random(1)
    params = []
    for row in range(num_rows):
        most = min(LONGEST, 20 + int(random.expovariate(1 / _MEAN)))
        params.append({"max_tokens": max(most, 320), **kinds[row % len(kinds)]})
    prompts = [f"Row {row} asks at length" for row in range(num_rows)]
    columns = {"prompt": prompts, "sampling_params": list(map(json.dumps, params))}
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
class LostTokens:
    """Tokens that kills lost, and sizes of token files."""

    tokens: list[int] = field(default_factory=list)
    """Number of tokens lost by each kill."""
    seconds: list[float] = field(default_factory=list)
    """Seconds between each kill and the first token that it lost."""
    num_drawn: int = 0
    """Number of tokens drawn by all runs."""
    seconds_drawn: float = 0.0
    """Seconds in which all runs drew tokens."""
    bytes_written: list[int] = field(default_factory=list)
    """Bytes of token files written by each run."""
    most_bytes: int = 0
    """Largest size of all token files at any time, in bytes."""
    num_with_suspects: int = 0
    """Number of killed runs that suspected rows of crashing the engine."""


class LongKiller(Killer):
    """Kills jobs with long answers and counts the tokens that kills lose."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.lost = LostTokens()

    def _run(self, kill_after_s: float, failpoint: str = "", *, update: bool = False) -> int:
        log = self._place / "tokens.log"
        log.unlink(missing_ok=True)
        child = self._start(failpoint, prepare=partial(_log_tokens, log))
        code, _ = child.signal_after(kill_after_s, signal.SIGKILL)
        ended = time.monotonic()
        lines = log.read_text().splitlines() if log.exists() else []
        self._note_tokens([line.split() for line in lines if line.endswith(".")], ended, code)
        return code

    def _note_tokens(self, lines: list[list[str]], ended: float, code: int) -> None:
        """Evaluate a log: ``drawn TOKENS TIME .`` per step, and ``kept BYTES SIZE .`` per write."""
        lost, lost_since, began, written = 0, None, None, 0
        for what, number, at, _ in lines:
            if what == "kept":
                lost, lost_since, written = 0, None, int(number)
                self.lost.most_bytes = max(self.lost.most_bytes, int(at))
                continue
            began, lost_since = began or float(at), lost_since or float(at)
            lost += int(number)
            self.lost.num_drawn += int(number)
        self.lost.seconds_drawn += ended - (began or ended)
        self.lost.bytes_written.append(written)
        if code == KILLED:
            self.outcome.kills += 1
            self.lost.tokens.append(lost)
            self.lost.seconds.append(ended - (lost_since or ended))
            history = self.output.files().get("_batchinfer/suspects.json", b"")
            self.lost.num_with_suspects += bool(crash_history_from(history).groups)


def _log_tokens(path: Path) -> None:
    """Log the tokens of each step and each write of token files."""
    file = path.open("ab", buffering=0)
    add, write = RunRecorder.add, TokenFiles.write

    def add_and_log(self: RunRecorder, step: StepStats | None, num_rows: int) -> None:
        if step is not None:
            file.write(b"drawn %d %f .\n" % (step.decode_tokens, time.monotonic()))
        add(self, step, num_rows)

    def write_and_log(self: TokenFiles, update: TokenUpdate) -> None:
        write(self, update)
        file.write(b"kept %d %d .\n" % (self.bytes_written, self.size))

    RunRecorder.add = add_and_log  # type: ignore[method-assign]
    TokenFiles.write = write_and_log  # type: ignore[method-assign,assignment]
