"""Encoders compute the same hidden states on packed sequences as in transformers."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from batchinfer.config import ModelConfig, Runner
from batchinfer.config.model import ENCODER_FAMILIES
from batchinfer.engine.encoder_step import EncoderStep
from batchinfer.errors import ModelError
from batchinfer.worker.encoder import loader
from batchinfer.worker.encoder.encode_and_pool import POOLING, ModelEncoder
from batchinfer.worker.encoder.encoder_config import describe_encoder, is_run_as_encoder
from batchinfer.worker.encoder.loader import load_encoder
from tests.devices import CPU_AND_CUDA
from tests.encoders import CAUSAL_FAMILIES, FAMILIES, make_encoder, reference_states
from tests.models import make_checkpoint

SAME = 0.99999
CPU = torch.device("cpu")
LENGTHS = [40, 17, 17, 9, 9, 9, 2]


def sequences(lengths: list[int] = LENGTHS) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [[2, *random.integers(4, 30, length - 2).tolist(), 3] for length in lengths]


def step(rows: list[list[int]], *pooling: str) -> EncoderStep:
    lengths = np.array([len(row) for row in rows], np.int32)
    token_ids = np.concatenate([np.array(row, np.int32) for row in rows])
    return EncoderStep(token_ids, lengths, lengths, pooling)


def runner(
    folder: Path, dtype: Any = "float32", runner: Runner = "pooling", device: torch.device = CPU
) -> ModelEncoder:
    config = ModelConfig(str(folder), dtype=dtype, runner=runner)
    assert is_run_as_encoder(config)
    return ModelEncoder(load_encoder(config, device=device).encoder, device)


def cosines(one: Any, other: Any) -> Any:
    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    return (one * other).sum(1) / np.linalg.norm(one, axis=1) / np.linalg.norm(other, axis=1)


def test_all_encoders_are_tried() -> None:
    assert set(ENCODER_FAMILIES) <= set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_equal_those_of_transformers(tmp_path: Path, family: str) -> None:
    folder, rows = make_encoder(tmp_path / "model", family), sequences()
    states = reference_states(folder, rows)
    encoder = runner(folder)
    assert cosines(encoder.encode(step(rows, "mean")), [s.mean(0) for s in states]).min() > SAME
    both = encoder.encode(step(rows, "cls", "lasttoken"))
    expected = [np.concatenate([s[0], s[-1]]) for s in states]
    assert cosines(both, expected).min() > SAME


@pytest.mark.parametrize("family", ["bert", "mpnet", "roberta"])
def test_padding_tokens_in_a_text_are_handled_like_in_transformers(
    tmp_path: Path, family: str
) -> None:
    folder = make_encoder(tmp_path / "model", family)
    padding = json.loads((folder / "config.json").read_bytes())["pad_token_id"]
    rows = [[2, 5, padding, 6, 3], [padding, 7, padding, padding, 8], [2, 9, 3]]
    states = reference_states(folder, rows)
    found = runner(folder).encode(step(rows, "mean"))
    assert cosines(found, [s.mean(0) for s in states]).min() > SAME


@pytest.mark.parametrize("family", CAUSAL_FAMILIES)
def test_causal_states_equal_those_of_transformers(tmp_path: Path, family: str) -> None:
    folder, rows = make_encoder(tmp_path / "model", family, causal=True), sequences()
    states = reference_states(folder, rows)
    assert not is_run_as_encoder(ModelConfig(str(folder), runner="pooling"))
    encoder = runner(folder, runner="whole_texts")
    found = encoder.encode(step(rows, "mean", "lasttoken"))
    expected = [np.concatenate([s.mean(0), s[-1]]) for s in states]
    assert cosines(found, expected).min() > SAME


def test_an_encoder_with_other_hidden_states_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_encoder(tmp_path / "model", "llama", causal=True)
    packed = loader.packed_sequences
    monkeypatch.setattr(loader, "packed_sequences", lambda runs, causal: packed(runs))
    with pytest.raises(ModelError, match="hidden states differ from transformers' states"):
        runner(folder, runner="whole_texts")


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_hidden_states_that_are_not_finite_are_refused(tmp_path: Path, poison: float) -> None:
    folder = make_encoder(tmp_path / "model", "bert")
    weights = load_file(folder / "model.safetensors")
    weights["encoder.layer.1.output.LayerNorm.bias"][0] = poison
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="its hidden states are NaN or infinite"):
        runner(folder)


def test_pooling_skips_first_tokens(tmp_path: Path) -> None:
    folder, rows = make_encoder(tmp_path / "model", "bert"), sequences([9, 9, 9, 5])
    given, left = step(rows, *POOLING), [3, 3, 0, 4]
    step_of = replace(given, unpooled=np.array(left, np.int32))
    assert step_of.runs() == [(0, 2, 9), (18, 1, 9), (27, 1, 5)]
    found = runner(folder).encode(step_of)
    for row, at, states in zip(found, left, reference_states(folder, rows), strict=True):
        kept, weights = states[at:], np.arange(at + 1, len(states) + 1)
        expected = {
            **{"cls": kept[0], "lasttoken": kept[-1], "max": kept.max(0), "mean": kept.mean(0)},
            "mean_sqrt_len_tokens": kept.sum(0) / len(kept) ** 0.5,
            "weightedmean": np.average(kept, axis=0, weights=weights),
        }
        np.testing.assert_allclose(
            row, np.concatenate([expected[mode] for mode in POOLING]), rtol=1e-4, atol=1e-5
        )


def test_poolings_match_their_definitions(tmp_path: Path) -> None:
    folder, rows = make_encoder(tmp_path / "model", "bert"), sequences()
    encoder, states = runner(folder), reference_states(folder, rows)
    expected = {
        "cls": [s[0] for s in states],
        "lasttoken": [s[-1] for s in states],
        "max": [s.max(0) for s in states],
        "mean": [s.mean(0) for s in states],
        "mean_sqrt_len_tokens": [s.sum(0) / len(s) ** 0.5 for s in states],
        "weightedmean": [np.average(s, axis=0, weights=np.arange(1, len(s) + 1)) for s in states],
    }
    assert set(expected) == set(POOLING)
    for mode, vectors in expected.items():
        np.testing.assert_allclose(encoder.encode(step(rows, mode)), vectors, rtol=1e-4, atol=1e-5)


def test_second_segments_have_their_own_embedding(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path / "model", "bert")
    (row,) = sequences([12])
    pair = step([row], "mean")
    pair = EncoderStep(pair.token_ids, pair.lengths, np.array([5], np.int32), pair.pooling)
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    segments = torch.tensor([[0] * 5 + [1] * 7])
    with torch.no_grad():
        states = model(torch.tensor([row]), token_type_ids=segments).last_hidden_state
    encoder = runner(folder)
    assert cosines(encoder.encode(pair), states.mean(1)).min() > SAME
    assert cosines(encoder.encode(step([row], "mean")), states.mean(1)).max() < SAME


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_encoder_text_has_same_bits_in_any_batch(tmp_path: Path, family: str) -> None:
    folder, rows = make_encoder(tmp_path / "model", family), sequences()
    encoder = runner(folder)
    together = encoder.encode(step(rows, "mean"))
    for at, row in enumerate(rows):
        np.testing.assert_array_equal(encoder.encode(step([row], "mean"))[0], together[at])


@pytest.mark.parametrize("device", CPU_AND_CUDA)
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("bert", "pooling"),
        ("mpnet", "pooling"),
        ("modernbert", "pooling"),
        ("mistral", "whole_texts"),
    ],
)
def test_all_devices_give_the_same_result(
    tmp_path: Path, family: str, kind: Runner, device: str
) -> None:
    folder = make_encoder(tmp_path / "model", family, causal=kind == "whole_texts")
    rows = sequences([40, 17, 17, 2])
    found = runner(folder, runner=kind, device=torch.device(device)).encode(step(rows, *POOLING))
    states = reference_states(folder, rows)
    np.testing.assert_allclose(found[:, :32], [s[0] for s in states], rtol=1e-2, atol=1e-3)
    assert cosines(found, runner(folder, runner=kind).encode(step(rows, *POOLING))).min() > SAME


def test_bfloat16_logits_are_close(tmp_path: Path) -> None:
    folder, rows = make_encoder(tmp_path / "model", "bert"), sequences()
    exact = runner(folder).encode(step(rows, "mean"))
    rounded = runner(folder, "bfloat16").encode(step(rows, "mean"))
    assert cosines(rounded, exact).min() > 0.999


def test_the_longest_text_is_the_limit_of_sentence_transformers(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path / "model", "roberta", max_length=45)
    config = ModelConfig(str(folder), runner="pooling")
    assert describe_encoder(config).max_model_len == 45
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 1000}))
    assert describe_encoder(config).max_model_len == 48, "positions 2 to 49"
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 7}))
    assert describe_encoder(config).max_model_len == 7
    wanted = ModelConfig(str(folder), runner="pooling", max_model_len=49)
    with pytest.raises(
        ModelError, match="max_model_len is 49, but the model's config allows at most"
    ):
        describe_encoder(wanted)


def test_whole_texts_with_recurrent_layers_are_refused(tmp_path: Path) -> None:
    make_checkpoint("qwen3_5_text", tmp_path)
    with pytest.raises(ModelError, match=r"recurrent layers, .*\nset embed.pooling: lasttoken"):
        describe_encoder(ModelConfig(str(tmp_path), runner="whole_texts"))


@pytest.mark.parametrize("length", [True, 0, -1, 2.5, "512", [512]])
def test_an_invalid_length_of_the_longest_text_is_named(tmp_path: Path, length: Any) -> None:
    folder = make_encoder(tmp_path / "model", "bert")
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": length}))
    config = ModelConfig(str(folder), runner="pooling")
    with pytest.raises(ModelError, match=r"sentence_bert_config.json: max_seq_length is .*; it mu"):
        describe_encoder(config)


def test_unsupported_encoders_are_refused(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path / "model", "bert")
    for keys in ({"quantization": "int8"}, {"adapters": {"one": "folder"}}):
        config = ModelConfig(str(folder), runner="pooling", **keys)  # type: ignore[arg-type]
        with pytest.raises(ModelError, match=r"model\..* is not yet"):
            describe_encoder(config)
    saved = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(saved | {"num_hidden_layers": 3}))
    with pytest.raises(ModelError, match="tensors are missing from the weight files"):
        runner(folder)


def test_a_config_with_invalid_type_vocab_size_is_refused(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path / "model", "mpnet")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"type_vocab_size": {"x": 1}}))
    with pytest.raises(ModelError, match=r"config.json: models of the family 'mpnet' cannot be"):
        runner(folder)


def test_messages_of_the_library_are_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library = logging.getLogger("transformers")
    monkeypatch.setattr(library, "handlers", [caplog.handler])
    runner(make_encoder(tmp_path / "model", "mpnet"))
    assert not caplog.records
