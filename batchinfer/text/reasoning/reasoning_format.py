"""Defines the interface of reasoning formats, and the text of a sample that they split."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from batchinfer.config import SamplingParams
from batchinfer.protocols import FinishedSample
from batchinfer.text.tokenizer import TokenIds, Tokenizer


class SampleText:
    """The text of a sample, as ``output_text`` returns it, and the text positions of its tokens.

    Args:
        keeps_special: True to keep special tokens in the text, even if ``params`` skip them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        sample: FinishedSample,
        params: SamplingParams,
        *,
        keeps_special: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._skips = params.skip_special_tokens and not keeps_special
        self.num_tokens = len(sample.token_ids)
        """Number of tokens of the sample, including its end token."""
        ids, match = sample.token_ids, sample.stop_match
        stopped_by_token = sample.finish_reason == "stop" and match is None
        if stopped_by_token and not params.include_stop_str_in_output:
            ids = ids[:-1]
        self.token_ids: npt.NDArray[np.int32] = ids
        """Token ids of the text."""
        text = self._decode(len(ids))
        if match is not None:
            shown = len(tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens))
            text = text[: len(text) - max(shown - match.text_end, 0)]
        self.text = text

    def length_at(self, num_tokens: int) -> int:
        """Return the number of characters of the first ``num_tokens`` tokens."""
        return min(len(self._decode(num_tokens)), len(self.text))

    def tokens_until(self, length: int) -> int:
        """Return the number of leading tokens that contain the first ``length`` characters."""
        wanted = self.text[:length]
        holds: Callable[[int], bool] = lambda n: self._decode(n).startswith(wanted)  # noqa: E731
        return bisect_left(range(len(self.token_ids)), True, key=holds)

    def _decode(self, num_tokens: int) -> str:
        return self._tokenizer.decode(self.token_ids[:num_tokens], skip_special_tokens=self._skips)


class Phase(Enum):
    BEFORE = "before"
    """Neither the reasoning nor the answer has begun."""
    THINKING = "thinking"
    BETWEEN = "between"
    """The sample is in the header of a gpt-oss message or in a tool call."""
    ANSWER = "answer"


@dataclass(frozen=True, slots=True)
class Split:
    reasoning: str | None
    """Reasoning without markers and surrounding whitespace; None if the model did not reason."""
    text: str
    """The answer, without leading whitespace if it follows reasoning."""
    num_reasoning_tokens: int
    """Number of tokens of the reasoning, including its markers."""


class ReasoningTracker(Protocol):
    """Tracks the phase of one sample, token by token."""

    @property
    def phase(self) -> Phase: ...

    @property
    def num_thinking(self) -> int:
        """Number of reasoning tokens so far, not counting markers."""
        ...

    def take(self, token_id: int) -> None:
        """Advance by the sample's next token."""
        ...

    def fork(self) -> ReasoningTracker:
        """Return an independent copy."""
        ...


class ReasoningFormat(Protocol):
    """Splits a model's samples into reasoning and answer, for one tokenizer."""

    @property
    def start_token_ids(self) -> Sequence[int]:
        """Tokens with which a sample starts its reasoning; may be empty."""
        ...

    @property
    def end_token_ids(self) -> Sequence[int]:
        """Tokens that end the reasoning and start the answer."""
        ...

    def tracker(self, prompt_token_ids: TokenIds) -> ReasoningTracker:
        """Return a tracker for a sample, whose prompt may already start or end the reasoning."""
        ...

    def split(self, prompt_token_ids: TokenIds, sample: SampleText) -> Split: ...

    def without_reasoning(self, prompt_token_ids: TokenIds, sample: SampleText) -> str:
        """Return the text without reasoning, but with tool calls and their markers."""
        ...
