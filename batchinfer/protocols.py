"""What the engine asks of the text plane, so that neither imports the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string was met: which, and how many characters of the text to keep."""

    stop: str
    text_end: int


class StopChecker(Protocol):
    """The text plane's eye on one sample: told each token, says when its text must end."""

    def on_token(self, token_id: int, *, may_stop: bool) -> StopMatch | None:
        """Take the sample's next token.

        Args:
            token_id: the token just sampled.
            may_stop: false while the sample is shorter than ``min_tokens``; a stop string that
                is complete by then does not count, now or later.
        """
        ...
