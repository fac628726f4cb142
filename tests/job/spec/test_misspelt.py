"""A misspelt key gets the nearest known one, wherever it is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel

from batchinfer.config import SAMPLING_ALIASES
from batchinfer.errors import UsageError
from batchinfer.job.spec.errors import known_keys
from batchinfer.job.spec.load import load_job
from batchinfer.job.spec.spec import JobSpec
from batchinfer.job.spec.yaml import parse_yaml
from tests.job.job_files import MINIMAL, write_job

KEYS = [
    (section, key)
    for section, keys in known_keys().items()
    for key in keys
    if len(key) > 5 and key not in SAMPLING_ALIASES
]


def test_every_section_is_known() -> None:
    """Sections that hold keys of the user's own choice have no nearest one."""
    sections = {
        name
        for name, field in JobSpec.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    }
    assert sections <= known_keys().keys()


def misspelt(key: str) -> str:
    """``key`` without its fourth letter."""
    return key[:3] + key[4:]


@pytest.mark.parametrize(("section", "key"), KEYS)
def test_on_the_command_line(tmp_path: Path, section: str, key: str) -> None:
    written = f"{section}.{misspelt(key)}".lstrip(".")
    with pytest.raises(UsageError) as caught:
        load_job(write_job(tmp_path), overrides=[f"{written}=1"])
    value = "…" if section == "on_end" else "1"  # it may be a secret
    assert f"--set {written}={value}: unknown key {written}; did you mean {key}?" in str(
        caught.value
    )


@pytest.mark.parametrize("key", ["model", "input", "sampling", "output"])
def test_a_misspelt_section_is_not_missing_as_well(tmp_path: Path, key: str) -> None:
    wrong = f"{misspelt(key)}:"
    with pytest.raises(UsageError) as caught:
        load_job(write_job(tmp_path, MINIMAL.replace(f"{key}:", wrong)))
    (line,) = str(caught.value).splitlines()
    assert line.endswith(f"unknown key {misspelt(key)}; did you mean {key}?")


@pytest.mark.parametrize(("section", "key"), KEYS)
def test_in_the_file(tmp_path: Path, section: str, key: str) -> None:
    given = parse_yaml(MINIMAL, "job.yaml").data
    wrong = misspelt(key)
    if not section:
        text = f"{MINIMAL}{wrong}: 1\n"
    elif section == "model":
        text = MINIMAL.replace("some/model", f"{{name: some/model, {wrong}: 1}}")
    elif section in given:
        text = MINIMAL.replace(f"{section}: {{", f"{section}: {{{wrong}: 1, ")
    else:
        text = f"{MINIMAL}{section}: {{{wrong}: 1}}\n"
    with pytest.raises(UsageError) as caught:
        load_job(write_job(tmp_path, text))
    assert f"unknown key {f'{section}.{wrong}'.lstrip('.')}; did you mean {key}?" in str(
        caught.value
    )
    assert ", line " in str(caught.value)
