"""Parameters that change or end beams work as in transformers' ``generate(num_beams=...)``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerFast

from batchinfer.config import SamplingParams
from batchinfer.engine.engine import Engine
from batchinfer.engine.output_tracker import OutputTracker
from batchinfer.engine.request import Completion, Request
from batchinfer.job.tokens.token_tables import KeptOutput
from batchinfer.text.reasoning.formats import find_reasoning_format
from batchinfer.text.reasoning.grammar import ReasoningGrammar
from batchinfer.text.stop_strings import make_stop_checker_factory
from batchinfer.text.structured.masks import TokenMasks
from tests import beams
from tests.beams import EOS, OUTPUT_TOKENS, SMALL_POOL, TIE, Checkpoints, Found, Setup
from tests.models import VOCAB_SIZE
from tests.text.conftest import wrap

NUM_ROWS = 22
WIDTH = 4
LOGPROBS = 3


class CountPenalty(LogitsProcessor):  # type: ignore[misc]
    """Presence and frequency penalties, which transformers lacks."""

    def __init__(self, presence: float, frequency: float) -> None:
        self.presence, self.frequency = presence, frequency

    def of(self, prompt: int) -> Callable[..., Any]:
        def apply(input_ids: Any, scores: Any) -> Any:
            outputs = input_ids[:, prompt:]
            counts = torch.zeros_like(scores).scatter_add_(
                1, outputs, torch.ones_like(outputs, dtype=scores.dtype)
            )
            return scores - self.frequency * counts - self.presence * (counts > 0)

        return apply


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer for the models of ``tests.beams``. The first tokens have two letters, the
    others have one character."""
    letters = "abcde"
    texts = [left + right for left in letters for right in letters]
    texts += sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCAB_SIZE - len(texts)]
    backend = Backend(models.BPE({text: at for at, text in enumerate(texts)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@dataclass(frozen=True)
class Kind:
    """Equal parameters of a request and of transformers' ``generate``."""

    params: dict[str, Any]
    options: dict[str, Any]
    others: dict[str, Any] = field(default_factory=dict)
    """Other fields of the request."""
    base: str = "plain"
    """The kind without the parameter that this kind adds."""

    def request(self, row: int) -> Request:
        params = SamplingParams(
            max_tokens=OUTPUT_TOKENS, beam_width=WIDTH, n=WIDTH, logprobs=LOGPROBS, **self.params
        )
        made = beams.request(row, params, **self.others)
        return replace(made, make_stop_checker=make_stop_checker_factory(_ours(), params))


@functools.cache
def _ours() -> Any:
    return wrap(tokenizer())


BIAS = {7: 3.0, 12: 2.0, 40: 1.5, 41: -4.0, 150: 2.5}
SEQUENCE_BIAS = {(token,): bias for token, bias in BIAS.items()}
ALLOWED = [*range(3, 9), *range(30, 70)]
BAD = ((44,), (90,), (121,), *((first, 60 + first % 5) for first in range(25, VOCAB_SIZE)))
STOP = ("й|", "A*A*", "ggg", "cdb", "b")


def _thinking() -> ReasoningGrammar:
    """Reasoning of at most five tokens, after which the two tokens of "BC" must follow."""
    found = find_reasoning_format({"start": "A", "end": "BC"}, _ours())
    assert found is not None
    (start,) = _ours().encode_batch(["A"], add_special_tokens=False, parse_special_tokens=True)
    return ReasoningGrammar(found, start, None, 5, EOS, TokenMasks(VOCAB_SIZE))


THINKING = _thinking()


def allowed_of_thinking(prompt: int) -> Callable[[int, Any], list[int]]:
    def allowed(_: int, ids: Any) -> list[int]:
        state = THINKING.begin()
        state.replay(ids[prompt:].tolist())
        (mask,) = THINKING.masks([state])
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
        return np.flatnonzero(bits).tolist()

    return allowed


KINDS = {
    "plain": Kind({}, {}),
    "logit_bias": Kind({"logit_bias": BIAS}, {"sequence_bias": SEQUENCE_BIAS}),
    "min_tokens": Kind(
        {"min_tokens": 11, "logit_bias": BIAS},
        {"min_new_tokens": 11, "sequence_bias": SEQUENCE_BIAS},
        base="logit_bias",  # makes beams end early
    ),
    "allowed_token_ids": Kind(
        {"allowed_token_ids": ALLOWED}, {"prefix_allowed_tokens_fn": lambda _, ids: ALLOWED}
    ),
    "bad_words": Kind({}, {"bad_words_ids": list(map(list, BAD))}, {"bad_words_token_ids": BAD}),
    "repetition_penalty": Kind({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
    "no_repeat_ngram_size": Kind({"no_repeat_ngram_size": 1}, {"no_repeat_ngram_size": 1}),
    "counts": Kind(
        {"presence_penalty": 0.7, "frequency_penalty": 0.4},
        {"logits_processor": CountPenalty(0.7, 0.4)},
    ),
    "stop": Kind({"stop": STOP}, {"stop_strings": list(STOP), "tokenizer": tokenizer()}),
    "reasoning": Kind(
        {"max_reasoning_tokens": 5},
        {"prefix_allowed_tokens_fn": allowed_of_thinking, "renormalize_logits": True},
        {"grammar": THINKING},
    ),
    "several": Kind(
        {"min_tokens": 5, "repetition_penalty": 1.2, "logit_bias": BIAS, "length_penalty": 0.5},
        {
            "min_new_tokens": 5,
            "repetition_penalty": 1.2,
            "sequence_bias": SEQUENCE_BIAS,
            "length_penalty": 0.5,
        },
    ),
}


@functools.cache
def reference(name: str, row: int) -> list[Found]:
    """Return the beams that transformers finds with a kind of parameters."""
    options = dict(KINDS[name].options)
    if name == "reasoning":
        allowed = options["prefix_allowed_tokens_fn"](len(beams.prompts()[row]))
        options["prefix_allowed_tokens_fn"] = allowed
    if name == "counts":
        penalty = options["logits_processor"].of(len(beams.prompts()[row]))
        options["logits_processor"] = LogitsProcessorList([penalty])
    return beams.generate("llama", row, WIDTH, **options)


def kind_of(row: int) -> str:
    return list(KINDS)[row % len(KINDS)]


def requests() -> list[Request]:
    """Return a request for each row; neighbors have different kinds of parameters."""
    return [KINDS[kind_of(row)].request(row) for row in range(NUM_ROWS)]


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Setup], Engine]:
    load: Checkpoints = beams.checkpoints(tmp_path_factory)
    return lambda setup: beams.make_engine(load("llama"), setup)


def assert_found(completion: Completion) -> None:
    """Check that all beams, their scores and their tokens' log-probabilities are those that
    transformers finds, except for ties."""
    row = completion.request.row_id
    best = reference(kind_of(row), row)
    assert completion.error_code is None
    assert len(completion.outputs) == WIDTH
    for output, expected in zip(completion.outputs, best, strict=True):
        assert output.score == pytest.approx(expected.score, abs=TIE)
        token_ids = output.token_ids.tolist()
        near = [one for one in best if abs(one.score - expected.score) < TIE]
        (same,) = [one for one in near if one.token_ids == token_ids]
        assert output.logprobs is not None
        assert [entry.token_id for entry in output.logprobs] == token_ids
        logprobs = [entry.logprob for entry in output.logprobs]
        assert logprobs == pytest.approx(same.logprobs, abs=TIE)
        assert sum(logprobs) == pytest.approx(output.cumulative_logprob)
        for entry in output.logprobs:
            assert len(entry.top) == LOGPROBS
            better = sum(logprob > entry.logprob for _, logprob in entry.top)
            assert better == min(entry.rank - 1, LOGPROBS)
        text = tokenizer().decode(token_ids)
        ended = token_ids[-1] in EOS
        stopped = not ended and any(stop in text for stop in completion.request.params.stop)
        assert output.finish_reason == ("stop" if ended or stopped else "length")
        assert (output.stop_match is not None) == stopped


@pytest.mark.parametrize(
    "setup",
    [Setup(), SMALL_POOL, replace(SMALL_POOL, runs_ahead=True)],
    ids=["large_pool", "small_pool", "small_pool_one_ahead"],
)
def test_parameters_change_beams_as_in_transformers(
    setup: Setup, engine_of: Callable[[Setup], Engine]
) -> None:
    completions, steps = beams.run(engine_of(setup), requests())
    assert len(completions) == NUM_ROWS
    for completion in completions.values():
        assert_found(completion)
    assert (sum(step.num_preempted for step in steps) > 0) == setup.misleading


@pytest.mark.parametrize("setup", [Setup(), replace(SMALL_POOL, max_tokens=7)], ids=["", "small"])
def test_prompts_of_searches_are_scored_once(
    setup: Setup, engine_of: Callable[[Setup], Engine]
) -> None:
    made = [request for request in requests()[:8] if request.num_prompt_tokens > 1]
    found = [
        beams.run(engine_of(setup), [replace(one, params=params(one)) for one in made])[0]
        for params in (
            lambda one: replace(one.params, prompt_logprobs=2),
            lambda _: SamplingParams(max_tokens=1, prompt_logprobs=2),
        )
    ]
    for one in made:
        searched, plain = (each[one.row_id].prompt_logprobs for each in found)
        assert len(searched.logprobs) == one.num_prompt_tokens - 1
        np.testing.assert_allclose(searched.logprobs, plain.logprobs, atol=1e-4)
        np.testing.assert_array_equal(searched.top_token_ids, plain.top_token_ids)


def test_searches_continue_from_the_output_of_a_killed_run(
    engine_of: Callable[[Setup], Engine],
) -> None:
    engine, tracker = engine_of(SMALL_POOL), OutputTracker()
    keyed = [replace(one, key=b"%16d" % one.row_id) for one in requests()]
    found: dict[int, Completion] = {}
    for one in keyed:
        engine.add_request(one)
    for _ in range(30):
        found |= {done.request.row_id: done for done in engine.step().completions}
    kept = dict[int, KeptOutput]()
    for increment in tracker.take(engine.states, []):
        kept[increment.row_id] = KeptOutput(increment.key, ("run", 0), increment.stats)
        kept[increment.row_id].add(increment)
    resumed = [
        replace(one, partial_output=kept[one.row_id].partial() if one.row_id in kept else None)
        for one in keyed
        if one.row_id not in found
    ]
    assert any(one.partial_output and one.partial_output.finished for one in resumed)
    assert len({kind_of(row) for row in kept}) > 4
    later, _ = beams.run(engine_of(SMALL_POOL), resumed)
    assert len(found | later) == NUM_ROWS
    for completion in (found | later).values():
        assert_found(completion)


@pytest.mark.parametrize("name", [name for name in KINDS if name != "plain"])
def test_each_kind_of_parameters_changes_some_beams(name: str) -> None:
    """The tests above need parameters that have an effect."""
    rows = [row for row in range(NUM_ROWS) if kind_of(row) == name]
    assert any(
        [one.token_ids for one in reference(name, row)]
        != [one.token_ids for one in reference(KINDS[name].base, row)]
        for row in rows
    )


def search(engine: Engine, params: dict[str, Any], **others: Any) -> Completion:
    """Run a search with two beams; ``others`` are other fields of its request."""
    made = SamplingParams(**{"beam_width": 2, "n": 2, "max_tokens": 3, **params})
    checker = make_stop_checker_factory(_ours(), made)
    request = beams.request(0, made, make_stop_checker=checker, **others)
    return beams.run(engine, [request])[0][0]


def test_a_beam_without_any_token_left_is_dropped(engine_of: Callable[[Setup], Engine]) -> None:
    """No token may follow token 30."""
    bad = ((30, 30), (30, 31))
    found = search(engine_of(Setup()), {"allowed_token_ids": [30, 31]}, bad_words_token_ids=bad)
    assert sorted(output.token_ids.tolist() for output in found.outputs) == [
        [31, 31, 30],
        [31, 31, 31],
    ]


def test_a_search_without_any_token_left_fails(engine_of: Callable[[Setup], Engine]) -> None:
    params = {"allowed_token_ids": [30, 31], "no_repeat_ngram_size": 1}
    found = search(engine_of(Setup()), params)
    assert (found.error_code, found.outputs) == ("no_token_left", [])
    shorter = search(engine_of(Setup()), {**params, "max_tokens": 2})
    assert len(shorter.outputs) == 2


def test_a_search_with_too_few_tokens_returns_the_beams_that_ended(
    engine_of: Callable[[Setup], Engine],
) -> None:
    end = EOS[0]
    found = search(engine_of(Setup()), {"allowed_token_ids": [end]})
    assert [output.token_ids.tolist() for output in found.outputs] == [[end]]


def test_stop_strings_before_min_tokens_do_not_count(
    engine_of: Callable[[Setup], Engine],
) -> None:
    """Every allowed token is a stop string."""
    params = {"allowed_token_ids": [57, 58, 59], "stop": ("A", "B", "C")}
    found = search(engine_of(Setup()), {**params, "max_tokens": 6, "min_tokens": 4})
    assert len(found.outputs) == 2
    for output in found.outputs:
        assert len(output.token_ids) == 4
        last = tokenizer().decode(output.token_ids[-1:].tolist())
        assert (output.finish_reason, output.stop_reason) == ("stop", last)
        assert output.stop_match is not None
        assert output.stop_match.text_end == 3
