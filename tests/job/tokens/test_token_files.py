"""Token files return what was written, as far as the files are intact."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from batchinfer.engine.output_tracker import OutputIncrement
from batchinfer.engine.request import (
    PartialSample,
    RequestStats,
    SampleOutput,
    TokenIds,
    TokenLogprobs,
)
from batchinfer.job.manifest import Manifest
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.parquet_bytes import parquet_bytes
from batchinfer.job.tokens.in_flight import TokenUpdate
from batchinfer.job.tokens.resume_pace import RunPace, StepTimes
from batchinfer.job.tokens.token_files import TokenFiles
from batchinfer.protocols import StopMatch
from tests.job.fakes import begin

PLAN = Manifest("f", {}, (), (), 1000, 100, "2026-11-20T10:00:00")
ALL = [range(0, 1000)]
PACE = RunPace(7.5, StepTimes(3, 6, 0.3, 12, 0.6))
KEY = b"sixteen bytes...."[:16]


@pytest.fixture
def out(tmp_path: Path) -> OutputDir:
    out = OutputDir(tmp_path / "out")
    begin(out, PLAN)
    return out


def array(token_ids: Sequence[int]) -> TokenIds:
    return np.array(token_ids, dtype=np.int32)


def increment(
    row_id: int, samples: Sequence[tuple[int, Sequence[int]]], chain: int = 0
) -> OutputIncrement:
    """Return an increment; ``samples`` are pairs of the first token's position and new tokens."""
    parts = [
        (start, PartialSample(index, array(token_ids), -1.0 * len(token_ids), None))
        for index, (start, token_ids) in enumerate(samples)
    ]
    return OutputIncrement(row_id, 0, KEY, chain, RequestStats(prompt_tokens=2), [*parts])


def write(files: TokenFiles, *increments: OutputIncrement, replaces_all: bool = False) -> None:
    files.write(TokenUpdate(increments, replaces_all, PACE))


def tokens_of(out: OutputDir, row_id: int) -> list[list[int]]:
    """Return the tokens from which a run would resume each sample of a row."""
    kept = TokenFiles(out, PLAN, {}, "run-00009").recover(ALL)[0].get((row_id, 0))
    return [] if kept is None else [one.token_ids.tolist() for one in kept.partial().samples]


def test_increments_after_a_lost_token_file_are_ignored(out: OutputDir) -> None:
    files = TokenFiles(out, PLAN, {}, "run-00001")
    write(files, increment(3, [(0, [5, 6]), (0, [7])]))
    write(files, increment(3, [(2, [7])]))
    write(files, increment(3, [(3, [8, 9]), (1, [8])]))
    assert tokens_of(out, 3) == [[5, 6, 7, 8, 9], [7, 8]]
    out.files.delete(out.files.entries(out.tokens)[1])
    assert tokens_of(out, 3) == [[5, 6], [7, 8]]


def test_restarted_row_has_no_old_tokens(out: OutputDir) -> None:
    files = TokenFiles(out, PLAN, {}, "run-00001")
    write(files, increment(3, [(0, [5, 6])]))
    write(files, increment(3, [], chain=1))
    assert tokens_of(out, 3) == []
    write(files, increment(3, [(0, [8])], chain=1))
    assert tokens_of(out, 3) == [[8]]
    write(TokenFiles(out, PLAN, {}, "run-00002"), increment(3, [(0, [9])], chain=1))
    assert tokens_of(out, 3) == [[9]], "the chain belongs to another run"


@pytest.mark.parametrize("dies", [False, True])
def test_token_file_with_all_tokens_replaces_older_files(out: OutputDir, dies: bool) -> None:
    files = TokenFiles(out, PLAN, {}, "run-00001")
    write(files, increment(3, [(0, [5, 6])]), increment(4, [(0, [7])]))
    write(files, increment(3, [(2, [8])]))
    old = {path: out.files.open(path).read() for path in out.files.entries(out.tokens)}
    write(files, increment(3, [(0, [5, 6, 8])], chain=1), replaces_all=True)
    (path,) = out.files.entries(out.tokens)
    assert files.size == Path(path).stat().st_size
    for name, data in old.items() if dies else ():  # as if the run died before deleting them
        Path(name).write_bytes(data)
    assert tokens_of(out, 3) == [[5, 6, 8]]
    write(files, replaces_all=True)
    assert len(out.files.entries(out.tokens)) == (2 if dies else 0)


def test_token_files_keep_samples_unchanged(out: OutputDir) -> None:
    logprobs = [TokenLogprobs(5, -0.5, 1, ()), TokenLogprobs(6, -1.5, 2, ((7, -0.25), (6, -1.5)))]
    ends = [("stop", 7, None), ("stop", "###", StopMatch("###", 12)), ("length", None, None)]
    ended = [SampleOutput(at, array([5, 6]), *end, -2.0, logprobs) for at, end in enumerate(ends)]
    ended.append(SampleOutput(3, array([5]), "stop", None, None, -1.0, None, score=-0.25))
    going = PartialSample(4, array([5, 6]), -2.0, logprobs)
    stats = RequestStats(prompt_tokens=2, cached_tokens=1)
    samples = [(0, one) for one in (*ended, going)]
    files = TokenFiles(out, PLAN, {}, "run-00001")
    write(files, OutputIncrement(3, 1, KEY, 0, stats, samples))
    kept = TokenFiles(out, PLAN, {}, "run-00002").recover(ALL)[0][3, 1]
    partial = kept.partial()
    assert (kept.key, partial.stats) == (KEY, stats)
    for before, after in zip((*ended, going), (*partial.finished, *partial.samples), strict=True):
        assert before.token_ids.tolist() == after.token_ids.tolist()
        for name in ("index", "cumulative_logprob", "logprobs"):
            assert getattr(before, name) == getattr(after, name)
    for before, after in zip(ended, partial.finished, strict=True):
        for name in ("finish_reason", "stop_reason", "stop_match", "score"):
            assert getattr(before, name) == getattr(after, name)


def test_token_files_with_other_adapter_numbers_are_ignored(out: OutputDir) -> None:
    first = TokenFiles(out, PLAN, {"formal": 1, "short": 2}, "run-00001")
    write(first, increment(3, [(0, [5])]))
    assert not TokenFiles(out, PLAN, {"formal": 2, "short": 1}, "run-00002").recover(ALL)[0]


def test_token_files_keep_nothing_of_finished_rows(out: OutputDir) -> None:
    files = TokenFiles(out, PLAN, {}, "run-00001")
    for row_id in (3, 4):
        write(files, increment(row_id, [(0, [5])]))
    later = TokenFiles(out, PLAN, {}, "run-00002")
    assert set(later.recover([range(0, 4), range(5, 1000)])[0]) == {(3, 0)}
    assert not later.recover([range(5, 1000)])[0]
    assert not out.files.entries(out.tokens)


def test_next_run_knows_the_pace_of_the_last_one(out: OutputDir) -> None:
    files = TokenFiles(out, PLAN, {}, "run-00001")
    assert files.recover(ALL) == ({}, None)
    write(files, increment(3, [(0, [5])]))
    assert TokenFiles(out, PLAN, {}, "run-00002").recover(ALL)[1] == PACE


@pytest.mark.parametrize("stored", [None, b'{"life": 5}'])
def test_tokens_of_other_versions_are_kept(out: OutputDir, stored: bytes | None) -> None:
    """Older versions did not store the pace of a run."""
    write(TokenFiles(out, PLAN, {}, "run-00001"), increment(3, [(0, [5])]))
    (path,) = out.files.entries(out.tokens)
    table = pq.read_table(path)
    metadata = {key: value for key, value in table.schema.metadata.items() if b"pace" not in key}
    metadata |= {} if stored is None else {b"batchinfer.pace": stored}
    data = parquet_bytes([table.replace_schema_metadata(metadata)])
    digest = hashlib.sha256(data).hexdigest()[:16]
    out.write(out.tokens / f"run-00001-000000-{digest}.parquet", data)
    out.files.delete(path)
    kept, pace = TokenFiles(out, PLAN, {}, "run-00002").recover(ALL)
    assert kept[3, 0].num_tokens == 1
    assert pace is None
