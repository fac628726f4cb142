"""Finds the markers of a model's reasoning, like ``<think>`` and ``</think>``, and splits samples
at them.

A marker that is an added token is found by its id, even if the text omits special tokens. Text in a
row is never mistaken for such a marker. Other markers are found in the text, because their first
and last tokens may also contain other text.

The markers come from the parsers of vLLM (vllm/reasoning) and SGLang
(python/sglang/srt/parser/reasoning_parser.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from batchinfer.config.settings_base import format_value
from batchinfer.errors import UsageError
from batchinfer.text.reasoning.harmony import HarmonyFormat
from batchinfer.text.reasoning.reasoning_format import Phase, ReasoningFormat, SampleText, Split
from batchinfer.text.stop_strings import StopStringChecker
from batchinfer.text.tokenizer import TokenIds, Tokenizer

_HARMONY = ("<|channel|>", "<|start|>", "<|message|>", "<|end|>")
_MARKERS = (
    ("<think>", "</think>", ""),  # Qwen3, DeepSeek R1, GLM 4.5, OLMo 3, SmolLM3, Nemotron, ...
    ("[THINK]", "[/THINK]", ""),  # Mistral: Magistral, Ministral 3
    ("<seed:think>", "</seed:think>", ""),  # Seed-OSS
    ("<|START_THINKING|>", "<|END_THINKING|>", ""),  # Cohere Command A
    ("<|inner_prefix|>", "<|inner_suffix|>", ""),  # Apertus
    ("<|channel>", "<channel|>", "thought\n"),  # Gemma 4
    ("◁think▷", "◁/think▷", ""),  # Kimi VL
    ("Here is my thought process:", "Here is my response:", ""),  # Granite 3.2
)
_THINK = {"start": "<think>", "end": "</think>"}
_THINKERS = (
    *("deepseek_r1", "deepseek_v3", "glm45", "holo2", "kimi_k2", "minimax_m2", "nemotron_v3"),
    *("olmo3", "qwen3", "step3", "step3p5"),
)
PARSERS: Mapping[str, str | Mapping[str, str]] = {
    **{"auto": "auto", "none": "none"},
    **dict.fromkeys(_THINKERS, _THINK),
    "granite": {"start": "Here is my thought process:", "end": "Here is my response:"},
    "mistral": {"start": "[THINK]", "end": "[/THINK]"},
    "openai_gptoss": "auto",
    "seed_oss": {"start": "<seed:think>", "end": "</seed:think>"},
}
"""Values of ``wanted`` for ``find_reasoning_format``, keyed by vLLM's ``--reasoning-parser``."""

_PROMPT_TAIL = 64
"""Number of tokens at the end of a prompt in which to search for the text of a marker."""
_SPACES = 8
"""Maximum number of whitespace tokens that a template writes after a marker."""


def checked_reasoning(wanted: object) -> str | Mapping[str, str]:
    """Return ``wanted``; raise ValueError unless ``find_reasoning_format`` accepts it."""
    if isinstance(wanted, str) and wanted in ("auto", "none"):
        return wanted
    if (
        isinstance(wanted, Mapping)
        and set(wanted) == {"start", "end"}
        and all(isinstance(text, str) and text for text in wanted.values())
    ):
        return wanted
    raise ValueError(
        f'reasoning is {format_value(wanted)}; it must be "auto", "none" or '
        '{"start": "<think>", "end": "</think>"}'
    )


def find_reasoning_format(
    wanted: str | Mapping[str, str], tokenizer: Tokenizer, chat_template: str | None = None
) -> ReasoningFormat | None:
    """Return the format of a model's reasoning.

    Args:
        wanted: ``none``, ``auto`` (the first known markers in the chat template, or else among the
            tokenizer's tokens), or the markers: ``{start: text, end: text}``.
        chat_template: source of the template in use; None for the tokenizer's template.

    Raises:
        UsageError: ``wanted`` is ``auto``, but there are no known markers.
    """
    if wanted == "none":
        return None
    if not isinstance(wanted, str):
        return MarkerFormat(tokenizer, wanted["start"], wanted["end"])
    marked = _found(tokenizer, chat_template or tokenizer.chat_template or "")
    if marked is None:
        raise UsageError(
            "reasoning is auto, but neither the chat template nor the tokenizer has known "
            "reasoning markers",
            hint="name the markers, like reasoning: {start: <think>, end: </think>}, or "
            "set reasoning: none",
        )
    return marked


def _found(tokenizer: Tokenizer, chat_template: str) -> ReasoningFormat | None:
    if all(tokenizer.added_token_id(text) is not None for text in _HARMONY):
        return HarmonyFormat(tokenizer)
    by_template = (row for row in _MARKERS if row[0] in chat_template or row[1] in chat_template)
    by_token = (row for row in _MARKERS if None not in map(tokenizer.added_token_id, row[:2]))
    row = next(by_template, None) or next(by_token, None)
    return None if row is None else MarkerFormat(tokenizer, *row)


@dataclass(frozen=True, slots=True)
class Place:
    """The position of a marker in a sample, in characters and in tokens."""

    begin: int
    end: int
    first_token: int
    after_token: int


class Watcher(Protocol):
    """Finds the end of a marker in the tokens of one sample."""

    def ends_at(self, token_id: int) -> bool:
        """Take the sample's next token; return True if it ends the marker."""
        ...

    def fork(self) -> Watcher:
        """Return an independent copy."""
        ...


class TokenMarker:
    """A marker that is an added token."""

    def __init__(self, token_id: int) -> None:
        self.token_ids = (token_id,)

    def find(self, sample: SampleText, after: Place | None) -> Place | None:
        """Return the marker's first position in a sample, or its first position after another
        marker."""
        places = np.flatnonzero(sample.token_ids == self.token_ids[0])
        places = places[places >= (0 if after is None else after.after_token)]
        if not len(places):
            return None
        at = int(places[0])
        return Place(sample.length_at(at), sample.length_at(at + 1), at, at + 1)

    def end_in_prompt(self, token_ids: TokenIds) -> int:
        """Return the number of tokens of a prompt up to and including its last marker; 0 without a
        marker."""
        places = np.flatnonzero(token_ids == self.token_ids[0])
        return int(places[-1]) + 1 if len(places) else 0

    def watcher(self) -> Watcher:
        """Return an object that finds the end of the marker in a sample."""
        return self

    def ends_at(self, token_id: int) -> bool:
        return token_id == self.token_ids[0]

    def fork(self) -> Watcher:
        return self


def _after_embeddings(token_ids: TokenIds) -> TokenIds:
    """Return the tokens after the last image or prompt embedding, whose ids are negative."""
    places = np.flatnonzero(token_ids < 0)
    return token_ids[int(places[-1]) + 1 :] if len(places) else token_ids


class TextMarker:
    """A marker that is ordinary text, with the methods of ``TokenMarker``.

    In a prompt, the marker is recognized only at the very end, because elsewhere it may be part of
    a user's text.
    """

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        self._tokenizer = tokenizer
        self._text = text
        (ids,) = tokenizer.encode_batch([text], add_special_tokens=False, parse_special_tokens=True)
        self.token_ids = tuple(ids.tolist())

    def find(self, sample: SampleText, after: Place | None) -> Place | None:
        begin = sample.text.find(self._text, 0 if after is None else after.end)
        if begin < 0:
            return None
        end = begin + len(self._text)
        return Place(begin, end, sample.tokens_until(begin + 1) - 1, sample.tokens_until(end))

    def end_in_prompt(self, token_ids: TokenIds) -> int:
        ids = _after_embeddings(token_ids[-_PROMPT_TAIL:])
        tail = self._tokenizer.decode(ids, skip_special_tokens=False)
        return len(token_ids) if tail.rstrip().endswith(self._text.strip()) else 0

    def watcher(self) -> Watcher:
        return _TextWatcher(
            StopStringChecker(
                self._tokenizer,
                [self._text],
                include_stop_str_in_output=True,
                skip_special_tokens=False,
            )
        )


class _TextWatcher:
    def __init__(self, checker: StopStringChecker) -> None:
        self._checker = checker

    def ends_at(self, token_id: int) -> bool:
        return self._checker.on_token(token_id, may_stop=True) is not None

    def fork(self) -> Watcher:
        return _TextWatcher(self._checker.fork())


Marker = TokenMarker | TextMarker


class MarkerTracker:
    def __init__(self, phase: Phase, start: Marker, end: Marker) -> None:
        self.phase = phase
        self.num_thinking = 0
        self._start, self._end = start.watcher(), end.watcher()

    def fork(self) -> MarkerTracker:
        forked = copy(self)
        forked._start, forked._end = self._start.fork(), self._end.fork()
        return forked

    def take(self, token_id: int) -> None:
        if self.phase is Phase.BEFORE and self._start.ends_at(token_id):
            self.phase = Phase.THINKING
        elif self.phase is not Phase.ANSWER:
            if self._end.ends_at(token_id):  # a start marker may be missing
                self.phase = Phase.ANSWER
            elif self.phase is Phase.THINKING:
                self.num_thinking += 1


class MarkerFormat:
    """Separates reasoning that is between two markers, one or both of which may be in the prompt.

    As in vLLM's parsers for DeepSeek R1 and Qwen3 (vllm/reasoning/basic_parsers.py), an end marker
    without a start marker ends reasoning that began with the sample. Unlike in vLLM, a sample
    without markers is reasoning only if the prompt started the reasoning.

    Args:
        label: text after the start marker that is not part of the reasoning.
    """

    def __init__(self, tokenizer: Tokenizer, start: str, end: str, label: str = "") -> None:
        self._tokenizer = tokenizer
        self._start, self._end = _marker(tokenizer, start), _marker(tokenizer, end)
        self._label = label

    @property
    def start_token_ids(self) -> tuple[int, ...]:
        return self._start.token_ids

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        return self._end.token_ids

    def tracker(self, prompt_token_ids: TokenIds) -> MarkerTracker:
        return MarkerTracker(self._phase_after(prompt_token_ids), self._start, self._end)

    def split(self, prompt_token_ids: TokenIds, sample: SampleText) -> Split:
        phase = self._phase_after(prompt_token_ids)
        start = self._start.find(sample, None) if phase is Phase.BEFORE else None
        end = self._end.find(sample, start) if phase is not Phase.ANSWER else None
        if start is None and end is None and phase is not Phase.THINKING:
            return Split(None, sample.text, 0)
        text = sample.text
        before, begin, first = ("", 0, 0)
        if start is not None:
            before, begin, first = text[: start.begin], start.end, start.first_token
        stop, after, last = (
            (len(text), "", sample.num_tokens)
            if end is None
            else (end.begin, text[end.end :], end.after_token)
        )
        thought = text[begin:stop].removeprefix(self._label).strip()
        return Split(thought, (before + after).lstrip(), last - first)

    def without_reasoning(self, prompt_token_ids: TokenIds, sample: SampleText) -> str:
        return self.split(prompt_token_ids, sample).text

    def _phase_after(self, prompt: TokenIds) -> Phase:
        start, end = self._start.end_in_prompt(prompt), self._end.end_in_prompt(prompt)
        special = self._tokenizer.special_token_ids
        if start > end:
            # A special token after the marker starts another turn, so the marker is part of an
            # earlier message.
            is_open = special.isdisjoint(prompt[start:].tolist())
            return Phase.THINKING if is_open else Phase.BEFORE
        rest = prompt[end:]
        if end and len(rest) <= _SPACES and (rest >= 0).all():
            text = self._tokenizer.decode(rest, skip_special_tokens=False)
            if not text.strip():
                return Phase.ANSWER
        return Phase.BEFORE


def _marker(tokenizer: Tokenizer, text: str) -> Marker:
    token_id = tokenizer.added_token_id(text)
    return TextMarker(tokenizer, text) if token_id is None else TokenMarker(token_id)
