"""The JSON Schema of job files accepts what the loader accepts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from batchinfer.config import SAMPLING_ALIASES, EngineConfig, PromptConfig
from batchinfer.errors import UsageError
from batchinfer.job.spec.errors import known_keys
from batchinfer.job.spec.json_schema import json_schema
from batchinfer.job.spec.load import load_job
from batchinfer.job.spec.sections import JobSampling
from batchinfer.job.spec.yaml import parse_yaml
from batchinfer.near_names import nearest
from tests.job.job_files import EVERY_KEY, MINIMAL, SCORE, write_job


def check(text: str) -> None:
    Draft202012Validator(json_schema()).validate(parse_yaml(text, "job.yaml").data)


def test_job_schema_is_valid_json_schema() -> None:
    schema = json_schema()
    Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == Draft202012Validator.META_SCHEMA["$id"]
    assert json.loads(json.dumps(schema)) == schema


@pytest.mark.parametrize(
    "text",
    [
        EVERY_KEY,
        MINIMAL,
        MINIMAL.replace("max_tokens", "max_new_tokens"),
        MINIMAL.replace("8}", "8, stop: END, num_return_sequences: 2}"),
        MINIMAL + "engine: {preset: h200}",
        SCORE,
        SCORE.replace("score: {completions_column: choices}\n", ""),
    ],
)
def test_valid_job_files_match_the_schema(text: str) -> None:
    check(text)


@pytest.mark.parametrize(
    "text",
    [
        MINIMAL + "zork: 1",
        MINIMAL + "engine: {zork: 1}",
        MINIMAL + "prompt: {zork: 1}",
        MINIMAL + "engine: {block_size: '16'}",
        MINIMAL + "version: 2",
        MINIMAL.replace("8}", "8, max_new_tokens: 8}"),
        MINIMAL.replace("max_tokens: 8", ""),
        MINIMAL.replace("sampling: {max_tokens: 8}\n", ""),
        MINIMAL + "score: {completions_column: choices}",
        SCORE + "sampling: {max_tokens: 8}",
    ],
)
def test_invalid_job_files_fail_schema_and_loader(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValidationError):
        check(text)
    with pytest.raises(UsageError):
        load_job(write_job(tmp_path, text))


def test_every_key_of_the_schema_has_a_description() -> None:
    records: dict[str, Any] = json_schema()["$defs"]
    for record in (JobSampling, PromptConfig, EngineConfig):
        for field in dataclasses.fields(record):
            assert field.name in records[record.__name__]["properties"]
    assert records["EngineConfig"]["properties"]["block_size"]["description"] == (
        "Number of tokens in a KV block."
    )
    for name in ("ModelSpec", "InputSpec", "JobSampling", "OutputSpec", "ErrorsSpec", "StatsSpec"):
        for key, value in records[name]["properties"].items():
            assert value.get("description"), f"{name}.{key}"


SECTIONS = sorted(known_keys())
"""Sections with fixed keys; model.adapters, whose keys users choose, is not among them."""


def misspelled(key: str) -> str:
    """Return ``key`` without its fourth letter."""
    return key[:3] + key[4:]


def long_keys(section: str) -> list[str]:
    return [key for key in known_keys()[section] if len(key) > 5 and key not in SAMPLING_ALIASES]


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_is_the_nearest_to_its_misspelling(section: str) -> None:
    for key in long_keys(section):
        assert nearest(misspelled(key), known_keys()[section]) == key


@pytest.mark.parametrize("section", [section for section in SECTIONS if long_keys(section)])
def test_misspelled_set_key_on_the_command_line(tmp_path: Path, section: str) -> None:
    key = long_keys(section)[-1]
    written = f"{section}.{misspelled(key)}".lstrip(".")
    with pytest.raises(UsageError) as caught:
        load_job(write_job(tmp_path), overrides=[f"{written}=1"])
    value = "…" if section == "on_end" else "1"  # the value may be a secret
    assert f"--set {written}={value}: unknown key {written}; did you mean {key}?" in str(
        caught.value
    )


@pytest.mark.parametrize("key", ["model", "input", "sampling", "output"])
def test_misspelled_section_is_not_also_reported_missing(tmp_path: Path, key: str) -> None:
    wrong = f"{misspelled(key)}:"
    with pytest.raises(UsageError) as caught:
        load_job(write_job(tmp_path, MINIMAL.replace(f"{key}:", wrong)))
    (line,) = str(caught.value).splitlines()
    assert line.endswith(f"unknown key {misspelled(key)}; did you mean {key}?")
