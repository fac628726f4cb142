from __future__ import annotations

from pathlib import Path

import pytest

from batchinfer.job.model_files.facts import hub_commit

FIRST, SECOND = "a" * 40, "b" * 40


@pytest.fixture
def refs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--org--model" / "refs"
    folder.mkdir(parents=True)
    (folder / "main").write_text(FIRST)
    (folder / "v2").write_text(SECOND)
    return folder


def test_hub_commit_offline_is_the_downloaded_commit(refs: Path) -> None:
    assert hub_commit("org/model", None) == FIRST
    assert hub_commit("org/model", "v2") == SECOND


def test_hub_commit_of_a_commit_is_itself() -> None:
    assert hub_commit("org/model", SECOND) == SECOND


def test_hub_commit_without_download_is_unknown(refs: Path) -> None:
    assert hub_commit("org/other", None) is None
    assert hub_commit("n" * 300, None) is None
    (refs / "main").write_text("torn")
    assert hub_commit("org/model", None) is None


def test_hub_commit_asks_the_hub_first(refs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")

    def fails(*_: object, **__: object) -> None:
        raise ConnectionError

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", fails)
    assert hub_commit("org/model", None) == FIRST
