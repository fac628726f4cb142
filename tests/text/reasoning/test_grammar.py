"""Grammars apply to the answer alone; reasoning is free up to its token limit."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from tokenizers import normalizers

from batchinfer.text.reasoning.formats import find_reasoning_format
from batchinfer.text.reasoning.grammar import ReasoningGrammar
from batchinfer.text.structured.compiled_grammar import GrammarCompiler
from batchinfer.text.tokenizer import Tokenizer
from tests.text.reasoning.test_split import GPT_OSS, OLMO, QWEN
from tests.text.reasoning.tokenizers import EOS, byte_tokenizer, encode

VOCAB = 300


def grammar(
    tokenizer: Tokenizer, prompt: str, regex: str | None, budget: int | None = None
) -> ReasoningGrammar:
    (eos,) = encode(tokenizer, EOS).tolist()
    compiler = GrammarCompiler(tokenizer, frozenset({eos}), VOCAB)
    found = find_reasoning_format("auto", tokenizer)
    assert found is not None
    answer = None if regex is None else compiler.compile({"regex": regex})
    ids = encode(tokenizer, prompt)
    return ReasoningGrammar(found, ids, answer, budget, [eos], compiler.masks)


def allowed(made: ReasoningGrammar, state: Any) -> set[int]:
    (mask,) = made.masks([state])
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def follow(tokenizer: Tokenizer, made: ReasoningGrammar, text: str) -> Any:
    """Check that each token of a text is allowed; return the state after the text."""
    state, forced = made.begin(), list[int]()
    for token_id in encode(tokenizer, text).tolist():
        if forced:
            assert token_id == forced.pop(0)
            continue
        assert token_id in allowed(made, state), text
        forced = state.take(token_id)
    assert forced == []
    return state


def ids(tokenizer: Tokenizer, *texts: str) -> set[int]:
    return {encode(tokenizer, text)[0].item() for text in texts}


def test_a_sample_may_start_with_reasoning_or_answer() -> None:
    made = grammar(QWEN, "hi", "[ab][!?]")
    assert allowed(made, made.begin()) == ids(QWEN, "<think>", "a", "b")
    assert allowed(made, follow(QWEN, made, "a")) == ids(QWEN, "!", "?")


def test_reasoning_allows_all_tokens_but_end_of_sequence() -> None:
    made = grammar(QWEN, "hi", "[ab]!")
    free = allowed(made, follow(QWEN, made, "<think>anything, "))
    assert set(range(VOCAB)) - free == ids(QWEN, EOS)
    assert allowed(made, follow(QWEN, made, "<think>x</think>")) == ids(QWEN, "a", "b")
    assert made.begin().error is None


def test_a_prompt_may_start_or_end_the_reasoning() -> None:
    opened = grammar(QWEN, "<think>\n", "[ab]!")
    assert len(allowed(opened, opened.begin())) > 200
    closed = grammar(QWEN, "<think>\n\n</think>\n\n", "[ab]!")
    assert allowed(closed, closed.begin()) == ids(QWEN, "a", "b")


@pytest.mark.parametrize("tokenizer", [QWEN, OLMO], ids=["a token", "text"])
@pytest.mark.parametrize("budget", [1, 3])
def test_a_used_up_budget_forces_the_end_marker(tokenizer: Tokenizer, budget: int) -> None:
    made = grammar(tokenizer, "<think>", "[ab]!", budget)
    state = made.begin()
    end = encode(tokenizer, "</think>").tolist()
    for _ in range(budget - 1):
        assert state.take(encode(tokenizer, "x")[0].item()) == []
    assert state.take(encode(tokenizer, "x")[0].item()) == end
    assert allowed(made, state) == ids(tokenizer, "a", "b")


@pytest.mark.parametrize("tokenizer", [QWEN, OLMO], ids=["a token", "text"])
def test_without_a_budget_the_end_marker_is_not_forced(tokenizer: Tokenizer) -> None:
    made = grammar(tokenizer, "<think>", None, 0)
    first, *rest = encode(tokenizer, "</think>").tolist()
    state = made.begin()
    assert allowed(made, state) == {first}
    assert state.take(first) == rest
    assert len(allowed(made, state)) > VOCAB - 32  # an answer without a grammar is not restricted


def test_a_reasoning_budget_without_a_grammar_does_not_need_llguidance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setitem(sys.modules, "llguidance.numpy", None)
    made = grammar(QWEN, "<think>", None, 0)
    assert allowed(made, made.begin()) == ids(QWEN, "</think>")


def test_a_zero_budget_ends_reasoning_at_its_start() -> None:
    made = grammar(QWEN, "hi", "[ab]!", 0)
    (start,) = encode(QWEN, "<think>").tolist()
    assert made.begin().take(start) == encode(QWEN, "</think>").tolist()


def test_reasoning_that_ends_itself_is_not_forced() -> None:
    made = grammar(QWEN, "<think>", None, 3)
    state = follow(QWEN, made, "ab</think>")
    assert state.take(encode(QWEN, "c")[0].item()) == []


def test_harmony_answers_in_its_final_channel() -> None:
    made = grammar(GPT_OSS, "<|start|>assistant", "[ab]!", 4)
    state = follow(GPT_OSS, made, "<|channel|>analysis<|message|>abc")
    to_answer = "<|end|><|start|>assistant<|channel|>final<|message|>"
    assert state.take(encode(GPT_OSS, "d")[0].item()) == encode(GPT_OSS, to_answer).tolist()
    assert allowed(made, state) == ids(GPT_OSS, "a", "b")
    by_itself = f"<|channel|>analysis<|message|>a{to_answer}"
    assert allowed(made, follow(GPT_OSS, made, by_itself)) == ids(GPT_OSS, "a", "b")


@pytest.mark.parametrize(
    ("tokenizer", "prompt", "text"),
    [
        (QWEN, "hi", "<think>xyz</think>a!"),
        (QWEN, "hi", "a!"),
        (QWEN, "<think>", "x</think>b!"),
        (OLMO, "<think>", "xyz</think>a!"),
        (OLMO, "hi", "<think>xyz</think>a!"),
        (GPT_OSS, "<|start|>assistant", "<|channel|>analysis<|message|>xyz"),
    ],
)
@pytest.mark.parametrize("regex", ["[ab]!", "[ab]!!", None])
def test_replay_resumes_a_sample(
    tokenizer: Tokenizer, prompt: str, text: str, regex: str | None
) -> None:
    """Resume after each token; forced tokens are kept together with the token before them."""
    made = grammar(tokenizer, prompt, regex, 3)
    taken, state, forced = list[int](), made.begin(), list[int]()
    for token_id in encode(tokenizer, text).tolist():
        if forced:
            forced.pop(0)
            continue
        forced = state.take(token_id)
        taken += [token_id, *forced]
        resumed = made.begin()
        resumed.replay(taken)
        assert resumed.error is None
        if EOS not in tokenizer.decode(taken, skip_special_tokens=False):
            assert allowed(made, resumed) == allowed(made, state), len(taken)


@pytest.mark.parametrize(
    ("tokenizer", "prompt", "before", "after"),
    [
        (QWEN, "<think>", "x", ["y</think>a", "</think>b!"]),
        (QWEN, "hi", "", ["<think>xyz</think>", "b!"]),
        (OLMO, "<think>", "x</thi", ["nk>a!", "z</think>b"]),
        (GPT_OSS, "<|start|>assistant", "<|channel|>ana", ["lysis<|message|>a", "xyz"]),
    ],
)
def test_forks_of_a_state_are_independent(
    tokenizer: Tokenizer, prompt: str, before: str, after: list[str]
) -> None:
    """The beams of a search take their tokens one by one, forced tokens too."""
    made = grammar(tokenizer, prompt, "[ab]!", 4)
    shared = made.begin()
    shared.replay(encode(tokenizer, before).tolist())
    forks = [shared.fork() for _ in after]
    for fork, text in zip(forks, after, strict=True):
        for token_id in encode(tokenizer, text).tolist():
            fork.replay([token_id])
        alone = made.begin()
        alone.replay(encode(tokenizer, before + text).tolist())
        assert allowed(made, fork) == allowed(made, alone)
    start = made.begin()
    start.replay(encode(tokenizer, before).tolist())
    assert allowed(made, shared) == allowed(made, start)


@pytest.mark.parametrize("tokenizer", [QWEN, OLMO], ids=["a token", "text"])
def test_a_beam_is_forced_to_end_its_reasoning_token_by_token(tokenizer: Tokenizer) -> None:
    state = (made := grammar(tokenizer, "<think>", "[ab]!", 2)).begin()
    state.replay(encode(tokenizer, "xy").tolist())
    for token_id in encode(tokenizer, "</think>").tolist():
        assert allowed(made, state) == {token_id}
        state.replay([token_id])
    assert allowed(made, state) == ids(tokenizer, "a", "b")


def test_masks_of_samples_in_different_phases() -> None:
    tokenizer = byte_tokenizer(added=["<think>", "</think>"])
    thinking = grammar(tokenizer, "<think>", None, 5)
    plain = GrammarCompiler(tokenizer, frozenset({256}), VOCAB).compile({"regex": "a"})
    states = [plain.begin(), thinking.begin(), plain.begin()]
    for made in (plain, thinking):
        masks = made.masks(states)
        assert (masks[0] == masks[2]).all()
        assert (masks[1] == -1).all()
        assert 0 < np.unpackbits(masks[0].view(np.uint8)).sum() < 5


def test_an_end_marker_that_decodes_to_other_text_is_forced_once() -> None:
    tokenizer = byte_tokenizer(normalizer=normalizers.NFC())
    end = "fini e\N{COMBINING ACUTE ACCENT}"
    found = find_reasoning_format({"start": "<think>", "end": end}, tokenizer)
    assert found is not None
    masks = GrammarCompiler(tokenizer, frozenset(), VOCAB).masks
    prompt = encode(tokenizer, "<think>")
    state = ReasoningGrammar(found, prompt, None, 2, [], masks).begin()
    first, second = (state.take(int(token_id)) for token_id in encode(tokenizer, "ab"))
    assert (first, second) == ([], list(found.end_token_ids))
    assert state.take(encode(tokenizer, "c")[0].item()) == []
