"""OpenAI's harmony format, in which gpt-oss writes messages to channels.

After the generation prompt ``<|start|>assistant``, a sample with reasoning and an answer looks like
this:

``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>``

Reasoning is in the channel ``analysis``, and a message to a recipient is a tool call
(https://github.com/openai/harmony, docs/format.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass

import numpy as np

from batchinfer.text.reasoning.reasoning_format import Phase, SampleText, Split
from batchinfer.text.tokenizer import TokenIds, Tokenizer

_START, _MESSAGE = "<|start|>", "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_TO_ANSWER = "<|end|><|start|>assistant<|channel|>final<|message|>"


@dataclass(frozen=True, slots=True)
class _Message:
    """A message's header, and the indices of its tokens in the sample."""

    head: str
    first_token: int
    first_of_body: int
    after_body: int
    after_token: int

    @property
    def phase(self) -> Phase:
        return _phase(self.head)


class HarmonyTracker:
    def __init__(
        self, tokenizer: Tokenizer, start: int, message: int, ends: frozenset[int]
    ) -> None:
        self.num_thinking = 0
        self.phase = Phase.BETWEEN
        self._tokenizer = tokenizer
        self._start, self._message, self._ends = start, message, ends
        self._head: list[int] | None = []
        """Tokens of the current message's header; None in the body of a message."""

    def fork(self) -> HarmonyTracker:
        forked = copy(self)
        forked._head = None if self._head is None else [*self._head]
        return forked

    def take(self, token_id: int) -> None:
        if token_id == self._start or (token_id in self._ends and self._head is None):
            self._head, self.phase = [], Phase.BETWEEN
        elif self._head is None:
            self.num_thinking += self.phase is Phase.THINKING
        elif token_id == self._message:
            self.phase = _phase(self._tokenizer.decode(self._head, skip_special_tokens=False))
            self._head = None
        else:
            self._head.append(token_id)


class HarmonyFormat:
    start_token_ids: tuple[int, ...] = ()

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        ids = [tokenizer.added_token_id(text) for text in (_START, _MESSAGE, *_ENDS)]
        start, message, *ends = [id_ for id_ in ids if id_ is not None]
        self._start, self._message, self._ends = start, message, frozenset(ends)
        (to_answer,) = tokenizer.encode_batch(
            [_TO_ANSWER], add_special_tokens=False, parse_special_tokens=True
        )
        self.end_token_ids = tuple(to_answer.tolist())

    def tracker(self, prompt_token_ids: TokenIds) -> HarmonyTracker:
        tracker = HarmonyTracker(self._tokenizer, self._start, self._message, self._ends)
        for token_id in self._open_message(prompt_token_ids).tolist():
            tracker.take(token_id)
        tracker.num_thinking = 0
        return tracker

    def split(self, prompt_token_ids: TokenIds, sample: SampleText) -> Split:
        messages = list(self._messages(prompt_token_ids, sample.token_ids))
        if not messages:  # the sample has another format
            return Split(None, sample.text, 0)
        thoughts = [message for message in messages if message.phase is Phase.THINKING]
        answers = [message for message in messages if message.phase is Phase.ANSWER]
        count = sum(message.after_token - message.first_token for message in thoughts)
        if thoughts and messages[-1] is thoughts[-1]:  # unfinished thoughts: count the end token
            count += sample.num_tokens - len(sample.token_ids)
        reasoning = _joined(sample, thoughts) if thoughts else None
        return Split(reasoning, _joined(sample, answers), count)

    def without_reasoning(self, prompt_token_ids: TokenIds, sample: SampleText) -> str:
        return "".join(
            sample.text[
                sample.length_at(message.first_token) : sample.length_at(message.after_token)
            ]
            for message in self._messages(prompt_token_ids, sample.token_ids)
            if message.phase is not Phase.THINKING
        )

    def _messages(self, prompt: TokenIds, token_ids: TokenIds) -> Iterator[_Message]:
        """Yield the messages that have a body; the first may have begun in the prompt."""
        opened = self._open_message(prompt)
        in_body = self._message in opened.tolist()
        head = opened[: opened.tolist().index(self._message)] if in_body else opened
        first, body = 0, 0 if in_body else -1
        tokens = token_ids.tolist()
        for at, token_id in enumerate(tokens):
            if body < 0 and token_id == self._message:
                head, body = np.concatenate([head, token_ids[first:at]]), at + 1
            elif body >= 0 and (token_id in self._ends or token_id == self._start):
                after = at + (token_id in self._ends)
                yield _Message(self._text(head), first, body, at, after)
                head, first, body = head[:0], after, -1
        if body >= 0:
            yield _Message(self._text(head), first, body, len(tokens), len(tokens))

    def _open_message(self, prompt: TokenIds) -> TokenIds:
        """Return the tokens of a prompt's last message, after ``<|start|>``."""
        places = np.flatnonzero(prompt == self._start)
        return prompt[int(places[-1]) + 1 :] if len(places) else prompt[:0]

    def _text(self, head: TokenIds) -> str:
        return self._tokenizer.decode(head, skip_special_tokens=False)


def _phase(head: str) -> Phase:
    if "to=" in head:
        return Phase.BETWEEN
    channel = _CHANNEL.search(head)
    return Phase.THINKING if channel and channel[1] == "analysis" else Phase.ANSWER


def _joined(sample: SampleText, messages: list[_Message]) -> str:
    bodies = (
        sample.text[sample.length_at(message.first_of_body) : sample.length_at(message.after_body)]
        for message in messages
    )
    return "\n".join(body.strip() for body in bodies)
