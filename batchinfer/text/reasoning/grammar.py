"""Constrains the answer after the reasoning; the reasoning is free text with an optional budget.

When the budget is used up, the tokens of the end marker are forced, as vLLM's
``ThinkingTokenBudgetLogitsProcessor`` does (vllm/v1/sample/logits_processor/builtin.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy
from typing import TYPE_CHECKING

import numpy as np

from batchinfer.text.reasoning.reasoning_format import Phase, ReasoningFormat
from batchinfer.text.structured.masks import Mask, TokenMasks

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from batchinfer.text.structured.compiled_grammar import CompiledGrammar
    from batchinfer.text.tokenizer import TokenIds

_FREE = np.int32(-1)
"""Mask word that allows all of its 32 tokens."""


class ReasoningGrammar:
    """A constraint on samples that may reason before they answer.

    Args:
        prompt_token_ids: token ids of the prompt, which may start or end the reasoning.
        answer: the grammar of the answer; None for any text.
        budget: maximum number of reasoning tokens, not counting markers; None: no limit.
        eos_token_ids: tokens that are not allowed during reasoning if the answer has a grammar.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat,
        prompt_token_ids: TokenIds,
        answer: CompiledGrammar | None,
        budget: int | None,
        eos_token_ids: Collection[int],
        masks: TokenMasks,
    ) -> None:
        self.reasoning = reasoning
        self.prompt_token_ids = prompt_token_ids
        self.answer = answer
        self.budget = budget
        self.eos_token_ids = () if answer is None else tuple(eos_token_ids)
        self.masks = masks

    def begin(self) -> _State:
        return _State(self)


class _State:
    """Matches one sample, before, in or after its reasoning."""

    def __init__(self, grammar: ReasoningGrammar) -> None:
        reasoning = grammar.reasoning
        self._tracker = reasoning.tracker(grammar.prompt_token_ids)
        self._answer = None if grammar.answer is None else grammar.answer.begin()
        self._budget = grammar.budget
        self._start, self._end = tuple(reasoning.start_token_ids), tuple(reasoning.end_token_ids)
        self._eos_token_ids = grammar.eos_token_ids
        self._has_answered = self._tracker.phase is Phase.ANSWER
        self._due = self._end if self._is_used_up() else ()
        """Tokens that must come next."""
        self._has_forced_end = bool(self._due)
        """True once the end marker was forced. It is forced only once, because some tokenizers
        decode its tokens to other text, which does not end the reasoning."""

    @property
    def error(self) -> str | None:
        return self._answer.error if self._answer is not None and self._has_answered else None

    @property
    def matcher(self) -> LLMatcher | None:
        is_asked = self._has_answered or self._tracker.phase is Phase.BEFORE
        return self._answer.matcher if self._answer is not None and is_asked else None

    def apply_to(self, mask: Mask) -> None:
        """Overwrite the mask where the answer's grammar does not apply, such as during
        reasoning."""
        if self._due:
            mask[:] = 0
            _allow(mask, self._due[0])
        elif self.matcher is None:
            mask[:] = _FREE
            for token_id in () if self._has_answered else self._eos_token_ids:
                mask.view(np.uint32)[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        elif self._may_start():
            _allow(mask, self._start[0])

    def take(self, token_id: int) -> list[int]:
        if self._answers(token_id):
            return [] if self._answer is None else self._answer.take(token_id)
        forced = list[int]()
        self._advance(token_id)
        while self._due:
            forced.append(self._due[0])
            self._advance(self._due[0])
        return forced

    def replay(self, token_ids: Sequence[int]) -> None:
        for at, token_id in enumerate(token_ids):
            if self._answers(token_id):
                if self._answer is not None:
                    self._answer.replay(token_ids[at:])
                return
            self._advance(token_id)

    def fork(self) -> _State:
        forked = copy(self)
        forked._tracker = self._tracker.fork()
        forked._answer = None if self._answer is None else self._answer.fork()
        return forked

    def _answers(self, token_id: int) -> bool:
        if not self._has_answered and not self._due and self._tracker.phase is Phase.BEFORE:
            starts = self._may_start() and token_id == self._start[0]
            self._has_answered = self._answer is not None and not starts
        return self._has_answered

    def _may_start(self) -> bool:
        """Return True if the start token would start the reasoning, because no answer can begin
        with that token."""
        if self._has_answered or self._answer is None or not self._start:
            return False
        if self._tracker.phase is not Phase.BEFORE:
            return False
        return self._answer.matcher.validate_tokens([self._start[0]]) == 0

    def _advance(self, token_id: int) -> None:
        """Advance by a token before the answer, and set ``_due``."""
        if self._due:
            self._due = self._due[1:]
        elif self._may_start():
            self._due = self._start[1:]
        self._tracker.take(token_id)
        if not self._due and not self._has_forced_end and self._is_used_up():
            self._due, self._has_forced_end = self._end, True
        self._has_answered = self._tracker.phase is Phase.ANSWER

    def _is_used_up(self) -> bool:
        budget, tracker = self._budget, self._tracker
        is_thinking = tracker.phase is Phase.THINKING
        return is_thinking and budget is not None and tracker.num_thinking >= budget


def _allow(mask: Mask, token_id: int) -> None:
    mask.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)
