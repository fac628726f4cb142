"""A misspelt key gets the nearest known one, wherever it is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchinfer.config import SAMPLING_ALIASES
from batchinfer.errors import UsageError
from batchinfer.job.spec.errors import known_keys
from batchinfer.job.spec.load import load_job
from batchinfer.near_names import nearest
from tests.job.job_files import MINIMAL, write_job

SECTIONS = sorted(known_keys())
"""Sections whose keys are the user's own, like model.adapters, are none."""


def misspelt(key: str) -> str:
    """``key`` without its fourth letter."""
    return key[:3] + key[4:]


def long_keys(section: str) -> list[str]:
    return [key for key in known_keys()[section] if len(key) > 5 and key not in SAMPLING_ALIASES]


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_is_the_nearest_to_its_misspelling(section: str) -> None:
    for key in long_keys(section):
        assert nearest(misspelt(key), known_keys()[section]) == key


@pytest.mark.parametrize("section", [section for section in SECTIONS if long_keys(section)])
def test_misspelled_set_key_on_the_command_line(tmp_path: Path, section: str) -> None:
    key = long_keys(section)[-1]
    written = f"{section}.{misspelt(key)}".lstrip(".")
    with pytest.raises(UsageError) as caught:
        load_job(write_job(tmp_path), overrides=[f"{written}=1"])
    value = "…" if section == "on_end" else "1"  # it may be a secret
    assert f"--set {written}={value}: unknown key {written}; did you mean {key}?" in str(
        caught.value
    )


@pytest.mark.parametrize("key", ["model", "input", "sampling", "output"])
def test_misspelled_section_is_not_also_reported_missing(tmp_path: Path, key: str) -> None:
    wrong = f"{misspelt(key)}:"
    with pytest.raises(UsageError) as caught:
        load_job(write_job(tmp_path, MINIMAL.replace(f"{key}:", wrong)))
    (line,) = str(caught.value).splitlines()
    assert line.endswith(f"unknown key {misspelt(key)}; did you mean {key}?")
