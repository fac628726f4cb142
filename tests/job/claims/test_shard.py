"""The parts of a shard, and the option ``--shard``."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.errors import UsageError
from batchinfer.job.claims.shard import Shard, parse_shard
from batchinfer.job.claims.writers import Writer, writer_named


@given(st.integers(1, 50), st.integers(0, 200))
def test_shards_cover_all_parts_once_and_evenly(count: int, num_parts: int) -> None:
    shares = [Shard(at, count).parts(num_parts) for at in range(count)]
    assert [index for share in shares for index in share] == list(range(num_parts))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    makers = [Shard(0, count).maker(index, num_parts).index for index in range(num_parts)]
    assert makers == [at for at, share in enumerate(shares) for _ in share]


def test_writer_names_round_trip() -> None:
    writers = [Writer(), Writer(number=2), Writer(Shard(1, 4)), Writer(Shard(1, 4), 12)]
    names = ["workers", "w02", "s0001of4", "s0001of4w12"]
    assert [writer.name for writer in writers] == names
    assert [writer_named(name) for name in names] == writers
    assert writer_named("") is writer_named("s0001of2.json") is writer_named("fleet") is None
    assert [writer.team for writer in writers] == ["workers", "workers", "4 shards", "4 shards"]


def array(task: int, first: int, last: int, count: int) -> dict[str, str]:
    values = {"TASK_ID": task, "TASK_MIN": first, "TASK_MAX": last, "TASK_COUNT": count}
    return {f"SLURM_ARRAY_{name}": str(value) for name, value in values.items()}


@pytest.mark.parametrize(
    ("text", "environment", "shard"),
    [
        ("0/4", {}, Shard(0, 4)),
        ("3/4", array(1, 0, 1, 2), Shard(3, 4)),
        ("auto", array(0, 0, 3, 4), Shard(0, 4)),
        ("auto", array(4, 1, 4, 4), Shard(3, 4)),
        ("auto", array(8, 0, 12, 4), Shard(2, 4)),
        ("auto", array(7, 7, 7, 1), Shard(0, 1)),
    ],
)
def test_parse_shard(text: str, environment: dict[str, str], shard: Shard) -> None:
    assert parse_shard(text, environment) == shard


@pytest.mark.parametrize(
    ("text", "environment", "says"),
    [
        ("0/0", {}, r"--shard 0/0: I must be from 0 to N - 1\n"),
        ("-1/4", {}, "neither I/N nor auto"),
        ("1", {}, "neither I/N nor auto"),
        ("\N{ARABIC-INDIC DIGIT ONE}/4", {}, "neither I/N nor auto"),
        ("auto", {}, r"not a task of a Slurm array .*not set"),
        ("auto", {"JOB_COMPLETION_INDEX": "3"}, r'"\$\(JOB_COMPLETION_INDEX\)/8"'),
        ("auto", {"SLURM_ARRAY_TASK_ID": "3"}, "does not say how many tasks"),
        ("auto", array(3, 1, 7, 3), "not evenly spaced"),
        ("auto", array(5, 0, 9, 3), "not evenly spaced"),
    ],
)
def test_parse_shard_errors(text: str, environment: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse_shard(text, environment)
