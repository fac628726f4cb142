"""Tokenizer files that kill the process that loads or uses them are refused and named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from batchinfer.errors import ModelError
from batchinfer.worker.model import tokenizer as module
from batchinfer.worker.model.tokenizer import load_tokenizer, try_tokenizer
from tests.models import make_text_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny random model."""
    return make_text_model(tmp_path_factory.mktemp("model") / "tiny", num_hidden_layers=1)


def changed(model: Path, folder: Path, **parts: Any) -> Path:
    """Write the model's tokenizer file with other ``parts``; return its path."""
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**tokenizer, **parts}))
    return path


def test_a_valid_tokenizer_is_tried_once(model: Path, tmp_path: Path) -> None:
    module._trial_problem.cache_clear()
    for _ in range(2):
        try_tokenizer(model / "tokenizer.json")
    assert module._trial_problem.cache_info().misses == 1
    try_tokenizer(changed(model, tmp_path, padding=None, normalizer=None))
    assert module._trial_problem.cache_info().misses == 2


@pytest.mark.long
def test_a_decoder_that_fills_memory_is_refused(model: Path, tmp_path: Path) -> None:
    one = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 3000}
    path = changed(model, tmp_path, decoder={"type": "Sequence", "decoders": [one] * 4})

    with pytest.raises(
        ModelError, match=f"{path} cannot be used: .* needs more than 4 GiB of memory"
    ):
        try_tokenizer(path)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("os.abort()", r"crashes the process \(SIGABRT\): a table is broken"),
        ("os.kill(os.getpid(), 24)", "takes more than 60 s of processor time"),
        ("sys.exit(3)", "fails: a table is broken"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="uses Linux's signal numbers")
def test_the_message_says_how_the_loading_process_died(
    model: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    warning = "import os, sys; print('a table is broken', file=sys.stderr, flush=True); "
    monkeypatch.setattr(module, "_TRIAL_CODE", warning + code)
    module._trial_problem.cache_clear()

    with pytest.raises(ModelError, match=message):
        load_tokenizer(str(model))
    module._trial_problem.cache_clear()


def test_tokenizer_trial_runs_no_code_of_the_current_folder(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("resource", "tokenizers"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w').close()")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    module._trial_problem.cache_clear()

    try_tokenizer(model / "tokenizer.json")
    assert not (tmp_path / "ran").exists()
