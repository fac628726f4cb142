"""``LLM.embed``, ``classify``, ``score`` and ``encode``, compared with transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from batchinfer import LLM, PoolingParams
from batchinfer.errors import ModelError, NotYetError
from batchinfer.llm import ClassificationRequestOutput, EmbeddingRequestOutput, ScoringRequestOutput
from batchinfer.llm.pooling.choose_runner import choose_runner
from tests.classifiers import logits, make_classifier, make_reranker, probability
from tests.encoders import encoder_config, make_encoder, reference_states, save_tokenizer
from tests.models import make_text_model

PROMPTS = ["is it so?", "a long text about nothing at all, which fills some blocks"]
ENGINE: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_kv_blocks": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model without an output head, like an embedding model."""
    folder = make_text_model(tmp_path_factory.mktemp("body"), tie_word_embeddings=False)
    AutoModel.from_pretrained(folder).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(model, **ENGINE)


def hidden_state(model: Path, prompt: str) -> np.ndarray[Any, Any]:
    reference = AutoModel.from_pretrained(model, dtype=torch.float32)
    inputs = AutoTokenizer.from_pretrained(model)(prompt, return_tensors="pt")
    with torch.no_grad():
        found: np.ndarray[Any, Any] = reference(**inputs).last_hidden_state[0, -1].numpy()
    return found


def unit(vector: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return vector / np.linalg.norm(vector)


def test_embeddings_equal_transformers(llm: LLM, model: Path) -> None:
    ids = llm.get_tokenizer()(PROMPTS[1])["input_ids"]
    for output, prompt in zip(llm.embed([PROMPTS[0], ids], use_tqdm=False), PROMPTS, strict=True):
        assert len(output.outputs.embedding) == llm.model_config.embedding_size
        expected = unit(hidden_state(model, prompt))
        assert output.outputs.embedding == pytest.approx(expected.tolist(), abs=1e-5)
        assert output.outputs.hidden_size == len(expected)
        assert output.finished
    assert isinstance(output, EmbeddingRequestOutput)
    assert output.prompt_token_ids == ids
    for name in ("normalize", "use_activation"):
        params = PoolingParams(dimensions=5, **{name: False})
        (cut,) = llm.embed(PROMPTS[0], pooling_params=params, use_tqdm=False)
        wanted = hidden_state(model, PROMPTS[0])[:5]
        assert cut.outputs.embedding == pytest.approx(wanted.tolist(), abs=1e-4)
    (tensor,) = llm.encode(PROMPTS[0], use_tqdm=False)
    assert tensor.outputs.data.shape == (len(expected),)
    first = PoolingParams(truncate_prompt_tokens=4)
    for prompt in (PROMPTS[1], ids):
        (cut,) = llm.embed([prompt], pooling_params=first, use_tqdm=False)
        assert cut.prompt_token_ids == ids[:4]


def test_each_prompt_may_have_its_own_pooling_params(llm: LLM, model: Path, tmp_path: Path) -> None:
    params = [PoolingParams(dimensions=5), PoolingParams(normalize=False, truncate_prompt_tokens=4)]
    whole, cut = llm.embed(PROMPTS, pooling_params=params, use_tqdm=False)
    expected = unit(hidden_state(model, PROMPTS[0])[:5])
    assert whole.outputs.embedding == pytest.approx(expected.tolist(), abs=1e-5)
    (alone,) = llm.embed(PROMPTS[1], pooling_params=params[1], use_tqdm=False)
    assert cut.outputs == alone.outputs
    assert len(cut.prompt_token_ids) == 4
    tensors = llm.encode(PROMPTS, params, use_tqdm=False)
    assert [len(one.outputs.data) for one in tensors if one.outputs] == [5, 32]
    three = LLM(make_classifier(tmp_path / "three", model, num_labels=3), **ENGINE)
    raw = [PoolingParams(), PoolingParams(activation=False)]
    scores, numbers = three.classify([PROMPTS[0]] * 2, pooling_params=raw, use_tqdm=False)
    softmax = torch.tensor(numbers.outputs.probs).softmax(-1)
    assert scores.outputs.probs == pytest.approx(softmax.tolist(), abs=1e-5)


def test_score_is_the_cosine_of_embeddings(llm: LLM, model: Path) -> None:
    one, *others = PROMPTS[0], PROMPTS[1], PROMPTS[0]
    scored = llm.score(one, others, use_tqdm=False)
    expected = [
        float(unit(hidden_state(model, one)) @ unit(hidden_state(model, o))) for o in others
    ]
    assert [output.outputs and output.outputs.score for output in scored] == pytest.approx(
        expected, abs=1e-5
    )
    assert len(llm.score(others, others, use_tqdm=False)) == 2


def test_embed_raises_or_returns_prompt_errors(llm: LLM) -> None:
    with pytest.raises(ValueError, match="prompt 1: the prompt has 600 tokens"):
        llm.embed(["a", [5] * 600], use_tqdm=False)
    fine, failed = llm.embed(["a", [5] * 600], use_tqdm=False, errors="return")
    assert fine.error is None
    assert failed.outputs is None
    assert failed.error.code == "prompt_too_long"
    pair = llm.score("a", ["b", "x" * 600], use_tqdm=False, errors="return")
    assert [one.error and one.error.code for one in pair] == [None, "prompt_too_long"]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda llm: llm.generate("a"), ValueError, 'give runner="generate"'),
        (lambda llm: llm.chat([{"role": "user", "content": "a"}]), ValueError, "generates no text"),
        (lambda llm: llm.classify("a"), ModelError, "no classification head"),
        (lambda llm: llm.embed("a", pooling_params={}), TypeError, "a dict; give PoolingParams"),
        (
            lambda llm: llm.embed(["a", "b"], pooling_params=[PoolingParams()]),
            ValueError,
            "2 prompts, but 1 pooling params",
        ),
        (
            lambda llm: llm.embed(["a"], pooling_params=[None]),
            TypeError,
            "pooling_params 0 is None; give PoolingParams",
        ),
        (lambda llm: llm.embed("a", pooling_param=1), TypeError, "did you mean pooling_params"),
        (
            lambda llm: llm.embed("a", pooling_params=PoolingParams(dimensions=99)),
            ValueError,
            "dimensions is 99, but the model's embeddings have only 32",
        ),
        (lambda llm: llm.embed("a", adapter="x"), ValueError, "no adapter 'x'"),
        (lambda llm: llm.encode("a", pooling_task="token_embed"), NotYetError, "token_embed"),
        (
            lambda llm: llm.score(["a", "b"], ["c"]),
            ValueError,
            "data_1 has 2 texts and data_2 has 1",
        ),
        (lambda llm: llm.score("a", [7]), TypeError, "data_2: 0 is an int; give a string"),
        (
            lambda llm: llm.score("a", ["b"], pooling_params=[PoolingParams()]),
            TypeError,
            "pooling_params is a list; give one PoolingParams",
        ),
        (
            lambda llm: llm.classify("a", pooling_params=PoolingParams(dimensions=2)),
            ValueError,
            "dimensions is 2, but it applies only to embeddings",
        ),
    ],
)
def test_invalid_pooling_calls_are_refused(llm: LLM, call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call(llm)


class Text(str):
    """A subclass of str, as some libraries use."""


def test_score_accepts_subclasses_of_str_and_names_bad_texts(
    tmp_path: Path, llm: LLM, model: Path
) -> None:
    head = LLM(make_classifier(tmp_path / "one", model, num_labels=1), **ENGINE)
    for scorer in (llm, head):
        (plain,) = scorer.score("a", "b", use_tqdm=False)
        for one, other in ((Text("a"), [Text("b")]), (np.array(["a"]), np.array(["b"]))):
            (found,) = scorer.score(one, other, use_tqdm=False)
            assert found.outputs == plain.outputs
        with pytest.raises(ValueError, match="data_2: 1 is not valid text: character 0 is half"):
            scorer.score("a", ["b", "\ud800"], use_tqdm=False)
    with pytest.raises(ValueError, match="data_2: 1: the prompt has 600 tokens"):
        llm.score("a", ["b", "x" * 600], use_tqdm=False)
    with pytest.raises(ValueError, match="prompt 1: the text of data_2 is empty"):
        head.score("a", ["b", " "], use_tqdm=False)


def test_random_weights_cannot_classify(tmp_path: Path, model: Path) -> None:
    folder = make_classifier(tmp_path / "one", model, num_labels=1)
    (folder / "model.safetensors").unlink()
    llm = LLM(folder, load_format="dummy", **ENGINE)
    assert len(llm.embed("a", use_tqdm=False)) == 1
    for call in (llm.classify, lambda text: llm.score(text, text)):
        with pytest.raises(NotYetError, match="for a model that classifies or scores"):
            call("a")


@pytest.mark.parametrize("values", [{"dimensions": 0}, {"truncate_prompt_tokens": -2}])
def test_pooling_params_are_checked(values: Any) -> None:
    with pytest.raises(ValueError, match="must be 1 or more"):
        PoolingParams(**values)
    with pytest.raises(TypeError, match="softmax is 'no'; it must be True or False or None"):
        PoolingParams(softmax="no")  # type: ignore[arg-type]
    assert PoolingParams(dimensions=np.int64(4)) == PoolingParams(dimensions=4)  # type: ignore[arg-type]


def test_contradicting_pooling_params_are_refused() -> None:
    with pytest.raises(ValueError, match="normalize is True and use_activation is False"):
        PoolingParams(use_activation=False, normalize=True)


def test_classify_equals_transformers(tmp_path: Path, model: Path) -> None:
    folder = make_classifier(tmp_path / "three", model, num_labels=3)
    llm = LLM(folder, **ENGINE)
    for output, prompt in zip(llm.classify(PROMPTS, use_tqdm=False), PROMPTS, strict=True):
        expected = logits(folder, prompt).softmax(-1).tolist()
        assert output.outputs.probs == pytest.approx(expected, abs=1e-5)
        assert output.outputs.num_classes == 3
    assert isinstance(output, ClassificationRequestOutput)
    raw = PoolingParams(activation=False)
    (output,) = llm.classify(prompt, pooling_params=raw, use_tqdm=False)
    assert output.outputs.probs == pytest.approx(logits(folder, prompt).tolist(), abs=1e-4)
    with pytest.raises(ValueError, match="needs a model with one label, but this model has 3"):
        llm.score("a", "b")


def test_score_with_a_head_equals_transformers(tmp_path: Path, model: Path) -> None:
    folder = make_classifier(tmp_path / "one", model, num_labels=1)
    scored = LLM(folder, task="score", **ENGINE).score("who?", PROMPTS, use_tqdm=False)
    expected = [float(logits(folder, "who?", prompt).sigmoid()) for prompt in PROMPTS]
    found = [output.outputs and output.outputs.score for output in scored]
    assert found == pytest.approx(expected, abs=1e-5)
    assert isinstance(scored[0], ScoringRequestOutput)


def test_hf_overrides_make_a_reranker(tmp_path: Path, model: Path) -> None:
    folder, ids = make_reranker(tmp_path / "model", model)
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["no", "yes"],
        "is_original_qwen3_reranker": True,
    }
    llm = LLM(folder, hf_overrides=overrides, **ENGINE)
    (output,) = llm.score("<|im_start|>who?\n", "he did<|im_end|>", use_tqdm=False)
    expected = probability(folder, "<|im_start|>who?\nhe did<|im_end|>", ids)
    assert output.outputs.score == pytest.approx(expected, abs=1e-5)
    assert len(llm.generate("x", use_tqdm=False)) == 1, (
        "a model with an output head still generates"
    )


@pytest.mark.parametrize(
    ("config", "runner"),
    [
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "generate"),
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, "generate"),
        ({"architectures": ["LlamaModel"], "model_type": "llama"}, "pooling"),
        ({"architectures": ["Qwen2ForCausalLM"], "is_causal": False}, "pooling"),
        ({"architectures": ["BertForMaskedLM"], "model_type": "bert"}, "pooling"),
        ({"architectures": 5}, "generate"),
        ([], "generate"),
    ],
)
def test_runner_auto_follows_the_model_class(tmp_path: Path, config: Any, runner: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert choose_runner("auto", None, str(tmp_path), None) == runner
    assert choose_runner("auto", "embed", str(tmp_path), None) == "pooling"
    assert choose_runner("generate", None, str(tmp_path), None) == "generate"


def test_modules_json_chooses_pooling_and_norm(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path / "mean", "llama", causal=True)
    module = {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
    (folder / "modules.json").write_text(json.dumps([module]))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    assert choose_runner("auto", None, str(folder), None) == "whole_texts"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    (states,) = reference_states(folder, [tokenizer("a b c")["input_ids"]])
    llm = LLM(folder, dtype="float32", device="cpu")
    (output,) = llm.embed("a b c", use_tqdm=False)
    assert output.outputs.embedding == pytest.approx(states.mean(0).tolist(), abs=1e-5)
    normalized = PoolingParams(use_activation=True)
    (output,) = llm.embed("a b c", pooling_params=normalized, use_tqdm=False)
    assert output.outputs.embedding == pytest.approx(unit(states.mean(0)).tolist(), abs=1e-5)
    (score,) = llm.score("a b c", "a b c", use_tqdm=False)
    assert score.outputs.score == pytest.approx(1.0), "a score is a cosine, whatever the norm"
    with pytest.raises(ValueError, match="generates no text"):
        llm.generate("a")


def test_encoder_with_classification_head_also_embeds(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model("bert", num_labels=2, **encoder_config("bert"))
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path, 20)
    llm = LLM(tmp_path, dtype="float32", device="cpu")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    (states,) = reference_states(tmp_path, [tokenizer("a b c")["input_ids"]])
    (embedded,), (labeled,) = llm.embed("a b c"), llm.classify("a b c")
    assert embedded.outputs.embedding == pytest.approx(unit(states.mean(0)).tolist(), abs=1e-5)
    assert labeled.outputs.num_classes == 2


TEXTS = ["a b c", "of the and", "z"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"), "bert", max_length=20)


def test_texts_are_embedded_and_compared(folder: Path) -> None:
    llm = LLM(str(folder), dtype="float32", device="cpu", runner="pooling")
    token_ids = AutoTokenizer.from_pretrained(folder)(TEXTS)["input_ids"]
    vectors = [states.mean(0) for states in reference_states(folder, token_ids)]
    vectors = [vector / np.linalg.norm(vector) for vector in vectors]
    outputs = llm.embed(TEXTS, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == token_ids
    for output, vector in zip(outputs, vectors, strict=True):
        np.testing.assert_allclose(output.outputs.embedding, vector, atol=1e-5)
    scores = llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False)
    expected = [float(vectors[0] @ other) for other in vectors[1:]]
    assert [score.outputs.score for score in scores] == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ValueError, match="has 27 tokens; at most 20 fit in max_model_len"):
        llm.embed("a " * 25, use_tqdm=False)


@pytest.mark.parametrize("most", [5, -1])
def test_texts_are_truncated_like_in_the_tokenizer(folder: Path, most: int) -> None:
    llm = LLM(str(folder), dtype="float32", device="cpu")
    params = PoolingParams(truncate_prompt_tokens=most)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = ["a b c d e f g h", "a " * 25, "x"]
    longest = 20 if most == -1 else most
    cut = tokenizer(texts, truncation=True, max_length=longest)["input_ids"]
    outputs = llm.embed(texts, pooling_params=params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == cut
    with pytest.raises(ValueError, match="is 21; it must be at most max_model_len, which is 20"):
        llm.embed("a", pooling_params=PoolingParams(truncate_prompt_tokens=21), use_tqdm=False)


def test_pairs_are_truncated_like_the_tokenizer_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model("bert", num_labels=1, **encoder_config("bert"))
    model = AutoModelForSequenceClassification.from_config(config)
    torch.nn.init.normal_(model.bert.embeddings.token_type_embeddings.weight)
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path, 20)
    tokenizer, pair = AutoTokenizer.from_pretrained(tmp_path), ("a b", "c d e f g h")
    cut = tokenizer(
        *pair, **{"truncation": "longest_first", "max_length": 7, "return_tensors": "pt"}
    )
    with torch.no_grad():
        expected = model.eval()(**cut).logits.sigmoid()[0, 0].item()
    llm, params = LLM(str(tmp_path), device="cpu"), PoolingParams(truncate_prompt_tokens=7)
    (output,) = llm.score(*pair, pooling_params=params, use_tqdm=False)
    assert output.prompt_token_ids == cut["input_ids"][0].tolist()
    assert output.outputs.score == pytest.approx(expected, abs=1e-5)
