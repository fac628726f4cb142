"""Generated files match the code, and pages name every key, code and command."""

from __future__ import annotations

import re
from types import ModuleType

import pytest

from batchinfer.errors import ExitCode
from batchinfer.job.output.stats_tables import REQUESTS_SCHEMA, STEPS_SCHEMA
from tests.docs.pages import ROOT
from tests.scripts import load_script

OUTPUT = (ROOT / "docs" / "output.md").read_text()
TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text()


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    return load_script(ROOT / "docs" / "make_reference.py")


def test_job_file_reference_is_up_to_date(generator: ModuleType) -> None:
    assert generator.REFERENCE.read_text() == generator.reference_text(), "run make reference"


def test_job_schema_is_up_to_date(generator: ModuleType) -> None:
    assert generator.SCHEMA.read_text() == generator.schema_text(), "run make reference"


def test_every_statistics_column_is_documented() -> None:
    named = set(re.findall(r"`(\w+)`", OUTPUT))
    assert {*STEPS_SCHEMA.names, *REQUESTS_SCHEMA.names} <= named


def test_every_exit_code_is_documented() -> None:
    table = TROUBLES.partition("## Rows that failed")[0]
    assert {int(n) for n in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)} == set(ExitCode)


def test_every_row_error_code_is_documented() -> None:
    """Row error codes are the codes that the source passes to ``RowError`` and ``error_code``."""
    sources = "\n".join(path.read_text() for path in (ROOT / "batchinfer").rglob("*.py"))
    codes = set(re.findall(r'RowError\(\s*"([a-z_0-9]+)"', sources))
    codes |= set(re.findall(r'error_code = "([a-z_0-9]+)"', sources))
    assert codes
    explained = set(re.findall(r"^\| `([a-z_0-9]+)` \|", TROUBLES, re.MULTILINE))
    assert codes <= explained
