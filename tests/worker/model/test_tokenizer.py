from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from batchinfer.errors import ModelError
from batchinfer.worker.model.tokenizer import check_vocabulary, eos_token_ids, load_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    backend = Tokenizer(WordLevel({"<unk>": 0, "hello": 1, "world": 2}, unk_token="<unk>"))
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    backend.add_tokens([AddedToken("<think>"), AddedToken("plain")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return tmp_path


def test_loads_the_parts_of_a_tokenizer(folder: Path) -> None:
    parts = load_tokenizer(str(folder))
    assert parts.backend.token_to_id("world") == 2
    assert parts.chat_template == "{{ messages[0]['content'] }}"
    assert parts.special_tokens["bos_token"] == "<s>"
    assert {"<s>", "</s>", "<think>"} <= parts.control_tokens
    assert "plain" not in parts.control_tokens


def test_eos_ids_come_from_config_or_tokenizer(folder: Path) -> None:
    assert eos_token_ids(folder, {}, 7) == {4}
    assert eos_token_ids(folder, {"eos_token_id": 1}, 7) == {1}
    assert eos_token_ids(folder, {"text_config": {"eos_token_id": [1, 2]}}, 7) == {1, 2}


def test_a_tokenizer_of_another_model_is_refused_by_the_key_that_names_it(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check_vocabulary(folder, None, 7)
    with pytest.raises(ModelError, match="tokenizer has ids up to 6, but the model has 6 embedd"):
        check_vocabulary(folder, None, 6)
    model = tmp_path_factory.mktemp("model")
    check_vocabulary(model, str(folder), 7)
    with pytest.raises(ModelError, match=r"the tokenizer \(model.tokenizer\) has ids up to 6"):
        check_vocabulary(model, str(folder), 6)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    check_vocabulary(tmp_path, None, 0)
    assert eos_token_ids(tmp_path, {}, 7) == frozenset()
    with pytest.raises(ModelError, match="tokenizer cannot be loaded"):
        load_tokenizer(str(tmp_path))


def test_damaged_files_are_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        check_vocabulary(folder, None, 7)
    with pytest.raises(ModelError, match="tokenizer cannot be loaded"):
        load_tokenizer(str(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        load_tokenizer(str(folder))


def test_a_missing_folder_error_names_its_key() -> None:
    with pytest.raises(ModelError, match=r"model\.tokenizer: there is no folder \./nowhere"):
        load_tokenizer("./nowhere", key="model.tokenizer")


def test_own_code_is_refused(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    content = json.loads(path.read_text()) | {"auto_map": {"AutoTokenizer": ["evil.T", None]}}
    path.write_text(json.dumps(content))
    with pytest.raises(ModelError, match="auto_map"):
        load_tokenizer(str(folder))
