"""Makes the token masks of all samples with grammars in one call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from batchinfer.process.cpus import available_cpus

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

    from batchinfer.protocols import GrammarState

Mask = npt.NDArray[np.int32]
_FEW_CORES = 4
"""On at most this many cores, one thread makes all masks. The threads of the model's linear layers
still spin and would delay further threads: on 2 cores, several threads took up to 1.8 times as
long.
"""


class MaskedState(Protocol):
    """A grammar state for which this module makes masks."""

    @property
    def matcher(self) -> LLMatcher | None:
        """Matcher that makes the mask; None if no grammar restricts the next token."""
        ...

    def apply_to(self, mask: Mask) -> None:
        """Change the mask, [words], in place. Without a matcher, the mask is all zeros."""
        ...


class TokenMasks:
    """Makes the masks of one model's samples; token ids are below ``num_tokens``."""

    def __init__(self, num_tokens: int) -> None:
        self.num_words = num_words(num_tokens)

    def __call__(self, states: Sequence[GrammarState]) -> Mask:
        """Return masks [len(states), words]; the states are ``MaskedState``."""
        masks = np.zeros((len(states), self.num_words), dtype=np.int32)
        masked: list[MaskedState] = list(states)  # type: ignore[arg-type]
        numbered = [(state.matcher, at) for at, state in enumerate(masked)]
        if matchers := [(matcher, at) for matcher, at in numbered if matcher is not None]:
            self._fill(matchers, masks)
        for state, mask in zip(masked, masks, strict=True):
            state.apply_to(mask)
        return masks

    def _fill(self, matchers: list[tuple[LLMatcher, int]], masks: Mask) -> None:
        from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

        if self._executor is not None:
            fill_next_token_bitmask_par(self._executor, matchers, masks)
            return
        for matcher, at in matchers:
            fill_next_token_bitmask(matcher, masks, at)

    @cached_property
    def _executor(self) -> LLExecutor | None:
        """Threads that make masks, if there are enough cores."""
        from llguidance import LLExecutor

        return LLExecutor() if available_cpus() > _FEW_CORES else None


def num_words(num_tokens: int) -> int:
    """Return the number of words, of 32 tokens each, in a mask."""
    return -(-num_tokens // 32)
