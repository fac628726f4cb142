"""Protocols that connect the engine and text processing, which do not import each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string that was found in a sample's text; ``text_end`` characters are kept."""

    stop: str
    text_end: int


class FinishedSample(Protocol):
    """The tokens of a finished sample, and the reason why it ended."""

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """All tokens, including a token that ended the sample."""
        ...

    @property
    def finish_reason(self) -> str:
        """``stop`` if an end-of-sequence token, stop token or stop string ended the sample;
        otherwise ``length`` or ``error``."""
        ...

    @property
    def stop_match(self) -> StopMatch | None:
        """The stop string that ended the sample, if any."""
        ...


class StopChecker(Protocol):
    """Finds stop strings in one sample."""

    def on_token(self, token_id: int, *, may_stop: bool) -> StopMatch | None:
        """Advance by the sample's next token.

        Args:
            may_stop: False while the sample is shorter than ``min_tokens``. A stop string that is
                complete before this length is never reported.
        """
        ...

    def fork(self) -> StopChecker:
        """Return an independent copy."""
        ...


class GrammarState(Protocol):
    """The state of one sample in its grammar. The state determines which tokens may come next."""

    @property
    def error(self) -> str | None:
        """Why the matcher stopped, for example after too much work in a step; None while it
        runs."""
        ...

    def take(self, token_id: int) -> list[int]:
        """Advance by the sample's next token, which the mask allowed.

        Returns:
            The tokens that must follow; empty if there is a choice. The state also advances by
            these tokens. The last token is an end-of-sequence token if the text cannot continue.
        """
        ...

    def replay(self, token_ids: Sequence[int]) -> None:
        """Advance by tokens that the sample already has, forced or drawn; force no further tokens.

        Sets ``error`` if the grammar does not allow the tokens.
        """
        ...

    def fork(self) -> GrammarState:
        """Return an independent copy."""
        ...


class Grammar(Protocol):
    """A constraint on the text of a row's samples."""

    def begin(self) -> GrammarState:
        """Return the state of a new sample."""
        ...

    def masks(self, states: Sequence[GrammarState]) -> npt.NDArray[np.int32]:
        """Return the token masks of samples, which may have different grammars of the same model.

        Returns:
            [len(states), words]: bit ``i % 32`` of word ``i // 32`` is set if token ``i`` may come
            next. End-of-sequence tokens may come next if the text is complete. The mask of a state
            with an error is undefined.
        """
        ...
