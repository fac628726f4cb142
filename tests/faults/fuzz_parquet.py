"""Damaged Parquet files yield exactly the original rows, or a message that names the file.

The files have page checksums. The damage excludes one case that checksums cannot detect: two whole
pages of the same kind that change places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from functools import cache
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.cli.program import MAX_MESSAGE_LINES
from batchinfer.errors import DataError
from batchinfer.job.input.dataset import open_source
from batchinfer.job.input.invalid_utf8 import python_rows, python_values, with_valid_text
from tests.faults.failures import JOB
from tests.faults.violation import ViolationError

NUM_ROWS = 60
RUN_EVERY = 20
"""One in this many files is also run as a job."""
_MAX_LINE = 700
_TAIL = 8  # the footer's length and "PAR1"
_LAYOUTS: tuple[dict[str, Any], ...] = (
    {"compression": "none", "data_page_version": "1.0", "use_dictionary": False},
    {"compression": "snappy", "data_page_version": "1.0"},
    {"compression": "zstd", "data_page_version": "2.0"},
    {"compression": "gzip", "data_page_version": "2.0", "write_page_index": True},
)

Rows = list[dict[str, Any]]


def _table() -> pa.Table:
    rows = range(NUM_ROWS)
    began = datetime(2026, 11, 20, tzinfo=UTC)
    talk = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    return pa.table(
        {
            "prompt": [f"Row {row} asks: what is {row} times {row}?" for row in rows],
            "number": pa.array(rows, pa.int64()),
            "kind": pa.array([f"kind {row % 3}" for row in rows]).dictionary_encode(),
            "when": pa.array([began + timedelta(hours=row) for row in rows]),
            "messages": pa.array([[{"role": "user", "content": f"{row}"}] for row in rows], talk),
            "maybe": [None if row % 4 else row / 2 for row in rows],
        }
    )


@cache
def _good_files() -> tuple[bytes, ...]:
    files = []
    for layout in _LAYOUTS:
        file = BytesIO()
        pq.write_table(
            _table(),
            file,
            row_group_size=25,
            data_page_size=100,
            write_page_checksum=True,
            **layout,
        )
        files.append(file.getvalue())
    return tuple(files)


@cache
def _right_rows() -> Rows:
    table = _table().combine_chunks()
    return _rows((name, table[name].chunk(0)) for name in table.schema.names)


def _rows(columns: Iterable[tuple[str, pa.Array]]) -> Rows:
    """Return rows with times as numbers, because no checksum covers the time zone in the footer."""
    names, arrays = zip(*columns, strict=True)
    return [
        dict(zip(names, row, strict=True)) for row in zip(*map(python_values, arrays), strict=True)
    ]


def case(number: int, seed: int, folder: Path) -> str:
    """Read one damaged file; for some numbers, also run a job on the file."""
    random = Random(f"{seed} parquet {number}")
    path = folder / "in.parquet"
    data = random.choice(_good_files())
    change = random.choice(_CHANGES)
    path.write_bytes(change(random, data))
    word = _read(path)
    if number % RUN_EVERY == 0:
        _run(folder, word)
    return f"{change.__name__.strip('_').replace('_', ' ')}: {word}"


def _read(path: Path) -> str:
    """Read all rows of a file as a job does."""
    rows: Rows = []
    try:
        source = open_source(str(path))
        if source.num_rows > 10 * NUM_ROWS:
            raise ViolationError(f"{source.num_rows} rows are reported")
        for first_row, batch in source.scan(source.schema.names, [range(source.num_rows)]):
            if first_row != len(rows):
                raise ViolationError(f"row {first_row} after {len(rows)} rows")
            python_rows(batch)
            columns = map(with_valid_text, batch.columns)
            rows += _rows(zip(source.schema.names, columns, strict=True))
    except DataError as error:
        _check_message(str(error), path)
        return "exit 4"
    if rows != _right_rows():
        wrong = [row for row, right in zip(rows, _right_rows(), strict=False) if row != right]
        raise ViolationError(f"{len(rows)} rows, wrong: {wrong[:1]}, of {_right_rows()[:1]}")
    return "right"


def _check_message(message: str, path: Path) -> None:
    lines = message.splitlines()
    if str(path) not in message or len(lines) > MAX_MESSAGE_LINES:
        raise ViolationError(f"poor message: {message}")
    if max(map(len, lines)) > _MAX_LINE or not all(line.isprintable() for line in lines):
        raise ViolationError(f"poor message: {message!r}")


def _run(folder: Path, word: str) -> None:
    from batchinfer.job.run.run_job import run_job
    from batchinfer.job.spec.load import load_job
    from tests.job.fakes import FakeBuild

    (folder / "job.yaml").write_text(JOB.replace("NAME", "echo"))
    spec = load_job(folder / "job.yaml", overrides=["output.path=out"])
    try:
        code = int(run_job(spec, overwrite=True, quiet=True, build=FakeBuild()))
    except DataError as error:
        _check_message(str(error), folder / "in.parquet")
        code = 4
    if code not in ((0,) if word == "right" else (0, 4)):
        raise ViolationError(f"{word} when read, exit {code} when run")


def _flipped_bits(random: Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(random.choice([1, 1, 1, 2, 8])):
        changed[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return bytes(changed)


def _flipped_in_footer(random: Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(random.choice([1, 1, 1, 3])):
        changed[random.randrange(_footer_start(data), len(data))] ^= 1 << random.randrange(8)
    return bytes(changed)


def _bytes_in_footer(random: Random, data: bytes) -> bytes:
    """Insert, remove or replace bytes in the footer, and correct its length."""
    start = _footer_start(data)
    footer = bytearray(data[start:-_TAIL])
    for _ in range(random.choice([1, 2, 4])):
        at = random.randrange(len(footer))
        what = random.randrange(3)
        if what == 0:
            footer[at] = random.randrange(256)
        elif what == 1:
            del footer[at : at + random.randrange(1, 9)]
        else:
            footer[at:at] = random.randbytes(random.randrange(1, 9))
    return data[:start] + bytes(footer) + len(footer).to_bytes(4, "little") + b"PAR1"


def _truncated(random: Random, data: bytes) -> bytes:
    cut = data[: random.randrange(len(data))]
    return cut if random.random() < 0.5 else cut + data[-random.randrange(1, 400) :]


def _zeroed(random: Random, data: bytes) -> bytes:
    start, length = random.randrange(len(data)), random.choice([1, 16, 512, 4096])
    return data[:start] + bytes(min(length, len(data) - start)) + data[start + length :]


def _moved(random: Random, data: bytes) -> bytes:
    """Exchange two pieces of the file that are not whole pages."""
    length = random.randrange(4, 300)
    first = random.randrange(len(data) - 2 * length)
    second = random.randrange(first + length, len(data) - length)
    middle = data[first + length : second]
    end = data[second + length :]
    return (
        data[:first] + data[second : second + length] + middle + data[first : first + length] + end
    )


def _swapped_chunks(random: Random, data: bytes) -> bytes:
    """Exchange the chunks of two columns of different types."""
    group = pq.ParquetFile(BytesIO(data)).metadata.row_group(0)
    chunks = [group.column(at) for at in random.sample(range(group.num_columns), 2)]
    chunks.sort(key=lambda chunk: _start(chunk))
    (first, one), (second, two) = ((_start(c), c.total_compressed_size) for c in chunks)
    if chunks[0].physical_type == chunks[1].physical_type:
        return _flipped_bits(random, data)
    middle = data[first + one : second]
    return (
        data[:first]
        + data[second : second + two]
        + middle
        + data[first : first + one]
        + data[second + two :]
    )


def _start(chunk: Any) -> int:
    return int(chunk.dictionary_page_offset or chunk.data_page_offset)


def _appended(random: Random, data: bytes) -> bytes:
    return random.choice([data + random.randbytes(50), random.randbytes(50) + data, data * 2])


def _junk(random: Random, data: bytes) -> bytes:
    junk = random.randbytes(random.randrange(300))
    return random.choice([junk, b"PAR1" + junk + b"PAR1", b""])


def _footer_start(data: bytes) -> int:
    return len(data) - _TAIL - int.from_bytes(data[-_TAIL:-4], "little")


_CHANGES: tuple[Callable[[Random, bytes], bytes], ...] = (
    *[_flipped_bits] * 4,
    *[_flipped_in_footer] * 3,
    *[_bytes_in_footer] * 2,
    _truncated,
    _zeroed,
    _moved,
    _swapped_chunks,
    _appended,
    _junk,
)
