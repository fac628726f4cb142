from __future__ import annotations

import os
from pathlib import Path

import pytest

from batchinfer.errors import ModelError
from batchinfer.job.model_files import facts as model_files
from batchinfer.job.model_files.facts import model_facts
from batchinfer.job.spec.spec import ModelSpec

HEADER = b'{"w":{"dtype":"F16","shape":[1],"data_offsets":[0,2]}}'
WEIGHTS = len(HEADER).to_bytes(8, "little") + HEADER + b"\x00\x00"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(WEIGHTS)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("hello")
    return tmp_path


def facts(folder: Path) -> object:
    return model_facts(ModelSpec(name=str(folder)))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", WEIGHTS + b"\x00"),
        ("model.safetensors", WEIGHTS.replace(b"F16", b"I16")),
        ("model.safetensors", WEIGHTS[:-1] + b"\x01"),
        ("config.json", b"{} "),
        ("chat_template.jinja", b"{{ x }}"),
        ("1_Pooling/config.json", b"{}"),
        ("2_Dense/model.safetensors", b"x"),
    ],
)
def test_model_facts_change_with_files_that_affect_outputs(
    folder: Path, name: str, content: bytes
) -> None:
    before = facts(folder)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    assert facts(folder) != before


def test_model_facts_ignore_path_and_readme(folder: Path, tmp_path: Path) -> None:
    before = facts(folder)
    (folder / "README.md").write_text("bye")
    moved = tmp_path.with_name(tmp_path.name + "-moved")
    folder.rename(moved)
    assert facts(moved) == before


def test_model_facts_of_a_hub_id() -> None:
    main, pinned = (ModelSpec(name="org/model", revision=r) for r in (None, "abc"))
    assert model_facts(main) != model_facts(pinned)


def test_model_facts_of_a_very_long_name() -> None:
    assert model_facts(ModelSpec(name="n" * 300))["model"] == {"name": "n" * 300, "revision": None}


def test_missing_tokenizer_error_names_its_key(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.tokenizer: there is no folder /nowhere"):
        model_facts(ModelSpec(name=str(folder), tokenizer="/nowhere"))


def test_tokenizer_facts_ignore_weights(folder: Path) -> None:
    model = ModelSpec(name=str(folder), tokenizer=str(folder))
    before = model_facts(model)["tokenizer"]
    (folder / "model.safetensors").write_bytes(WEIGHTS[:-1] + b"\x01")
    assert model_facts(model)["tokenizer"] == before


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_model_facts_refuse_a_pipe(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ModelError, match=rf"{name} is not a file"):
        facts(folder)


def test_fingerprint_with_a_known_commit_ignores_the_revision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_files, "hub_commit", lambda name, revision: f"{name}@{revision}")
    found = model_facts(ModelSpec(name="org/model", revision="v2"))["model"]
    assert found == {"name": "org/model", "revision": "v2", "commit": "org/model@v2"}
