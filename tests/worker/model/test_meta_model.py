from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchinfer.errors import ModelError
from batchinfer.worker.model import meta_model
from batchinfer.worker.model.config import load_config
from batchinfer.worker.model.meta_model import blame, build_on_meta, check_buildable, runs_on_meta
from tests.models import FAMILIES, tiny_config


def folder_of(path: Path, family: str, **changes: Any) -> Path:
    values = tiny_config(family).to_dict() | changes
    (path / "config.json").write_text(json.dumps(values))
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_builds_what_can_be_built(family: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, family)
    check_buildable(folder, load_config(folder), None)


def test_builds_without_memory() -> None:
    config = tiny_config("llama", vocab_size=10**9)
    assert {parameter.device.type for parameter in build_on_meta(config).parameters()} == {"meta"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "nope"}, "config.json: hidden_act is \"nope\": .*KeyError: 'nope'"),
        ({"pad_token_id": 10**6}, "config.json: pad_token_id is 1000000: .*Padding_idx"),
        ({"rope_parameters": {"rope_type": "nope"}}, 'rope_parameters is {"rope_type": "nope"'),
    ],
)
def test_names_the_key_that_cannot_be_built(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, "llama", **changes)
    with pytest.raises(ModelError, match=message):
        check_buildable(folder, load_config(folder), None)


def test_a_model_far_larger_than_its_files(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "llama", vocab_size=10**7)
    with pytest.raises(ModelError, match=r"weight.* would be 10000000 x 32 \(.*vocab_size\)"):
        check_buildable(folder, load_config(folder), 200_000)
    check_buildable(folder, load_config(folder), 200_000_000)


def test_the_key_that_stops_a_model_from_running_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The time limit must not depend on the machine's load.
    monkeypatch.setattr(meta_model, "_SEARCH_S", 600.0)
    folder = folder_of(tmp_path, "qwen3_moe", num_experts_per_tok=5)
    with pytest.raises(RuntimeError, match="k not in range"):
        runs_on_meta(load_config(folder))
    assert blame(folder, runs_on_meta) == "num_experts_per_tok is 5: "


def test_nothing_is_blamed_for_a_correct_config(tmp_path: Path) -> None:
    assert blame(folder_of(tmp_path, "llama"), lambda config: None) == ""
