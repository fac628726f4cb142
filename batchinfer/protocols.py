"""Protocols between the engine and the text plane, so that neither imports the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string that was met, and how many characters of the text to keep."""

    stop: str
    text_end: int


class FinishedSample(Protocol):
    """Tokens of a finished sample, and what ended them."""

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """All of them, the one that ended the sample included."""
        ...

    @property
    def finish_reason(self) -> str:
        """``stop`` where an end-of-sequence or stop token, or a stop string, ended it."""
        ...

    @property
    def stop_match(self) -> StopMatch | None:
        """The stop string that ended it, if one did."""
        ...


class StopChecker(Protocol):
    """Stop-string checker of one sample."""

    def on_token(self, token_id: int, *, may_stop: bool) -> StopMatch | None:
        """Advance by the sample's next token.

        Args:
            may_stop: false while the sample is shorter than ``min_tokens``; a stop string that
                is complete by then does not count, now or later.
        """
        ...


class GrammarState(Protocol):
    """Matcher of one sample: which tokens may come next."""

    @property
    def error(self) -> str | None:
        """Why the matcher has given up (the grammar took more work than it may), or None."""
        ...

    def take(self, token_id: int) -> list[int]:
        """Advance by the sample's next token, one that the mask allowed.

        Returns:
            The tokens that must follow, taken as well; the last is an end-of-sequence token where
            the text is complete and cannot go on. None where there is a choice.
        """
        ...

    def replay(self, token_ids: Sequence[int]) -> None:
        """Advance by several of a sample's tokens, those among them that were forced too; nothing
        is forced behind them.

        ``error`` says so where they are not what the grammar allows.
        """
        ...


class ForkingState(GrammarState, Protocol):
    """Matcher of a beam, which several may continue."""

    def fork(self) -> ForkingState:
        """A matcher of the same tokens that goes its own way."""
        ...


class Grammar(Protocol):
    """Constraint on the text of a row's samples."""

    def begin(self) -> GrammarState:
        """A matcher for a new sample."""
        ...

    def masks(self, states: Sequence[GrammarState]) -> npt.NDArray[np.int32]:
        """Token masks of samples of this grammar, or of others for the same model.

        Returns:
            [len(states), words]: bit ``i % 32`` of word ``i // 32`` is set where token ``i`` may
            come. Ends of sequence may come where the text is complete. Of a state that is in error
            nothing is said.
        """
        ...
