"""Random job files are accepted, or refused at once with a message of a few lines."""

from __future__ import annotations

from pathlib import Path
from random import Random

from batchinfer.cli.program import MAX_MESSAGE_LINES
from batchinfer.errors import ExitCode, JobError
from batchinfer.job.spec.load import load_job, parse_variables
from tests.faults.job_mutations import WORDS, job_file, options
from tests.faults.violation import ViolationError

MAX_LINE = 1000


def case(number: int, seed: int, folder: Path) -> str:
    """Read one job file with some options."""
    random = Random(f"{seed} job {number}")
    path = folder / "job.yaml"
    path.write_bytes(job_file(random))
    overrides, variables = options(random)
    try:
        output = random.choice(WORDS) if random.random() < 0.1 else None
        given = parse_variables(variables)
        load_job(path, overrides=overrides, variables=given, output=output)
    except JobError as error:
        _check_message(error)
        return f"exit {int(error.exit_code)}"
    return "OK"


def _check_message(error: JobError) -> None:
    lines = str(error).splitlines()
    if error.exit_code != ExitCode.USAGE:
        raise ViolationError(f"exit {error.exit_code}: {error}")
    if not 1 <= len(lines) <= MAX_MESSAGE_LINES or max(map(len, lines)) > MAX_LINE:
        raise ViolationError(f"{len(lines)} lines, {max(map(len, lines))} characters: {error}")
    if not all(character.isprintable() for line in lines for character in line):
        raise ViolationError(f"control characters: {str(error)!r}")
