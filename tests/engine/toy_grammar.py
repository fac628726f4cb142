"""A grammar over the fake runner's tokens: a hash of the text decides which may come next."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from batchinfer.engine.request import Request
from batchinfer.protocols import GrammarState
from tests.engine.fake import EOS, NextToken, hashed

_WORDS = 32


@dataclass(frozen=True)
class Toy:
    """Allows texts of 3 to ``longest`` tokens; a third of the tokens are forced."""

    longest: int = 20
    salt: int = 0
    breaks_at: int | None = None
    """Number of tokens after which the grammar fails."""

    def allowed(self, tokens: Sequence[int]) -> list[int]:
        """Return the sorted tokens that may follow ``tokens``."""
        if len(tokens) >= self.longest:
            return [EOS]
        number = zlib.crc32(bytes(f"{self.salt}/{list(tokens)}", "ascii"))
        first = 1 + number % 900
        if number % 3 == 0:
            return [first]
        return [EOS] * (len(tokens) >= 3) + [first, first + 10, first + 33]

    def begin(self) -> GrammarState:
        return ToyState(self)

    def masks(self, states: Sequence[GrammarState]) -> npt.NDArray[np.int32]:
        masks = np.zeros((len(states), _WORDS), dtype=np.int32)
        for mask, state in zip(masks, states, strict=True):
            assert isinstance(state, ToyState)
            bits = np.zeros(_WORDS * 32, dtype=np.uint8)
            bits[state.grammar.allowed(state.tokens)] = 1
            mask[:] = np.packbits(bits, bitorder="little").view(np.int32)
        return masks


@dataclass
class ToyState:
    grammar: Toy
    tokens: list[int] = field(default_factory=list)

    @property
    def error(self) -> str | None:
        at = self.grammar.breaks_at
        return "too much work" if at is not None and len(self.tokens) >= at else None

    def take(self, token_id: int) -> list[int]:
        assert token_id in self.grammar.allowed(self.tokens), "the mask did not allow this token"
        self.tokens.append(token_id)
        forced: list[int] = []
        while self.error is None and len(following := self.grammar.allowed(self.tokens)) == 1:
            forced += following
            if following == [EOS]:
                break
            self.tokens += following
        return forced

    def replay(self, token_ids: Sequence[int]) -> None:
        self.tokens += token_ids

    def fork(self) -> ToyState:
        return ToyState(self.grammar, [*self.tokens])


def constrained(request: Request, grammar: Toy) -> Request:
    """Return the request with a grammar."""
    return replace(request, grammar=grammar)


def expected_of(
    request: Request, sample: int, grammar: Toy, next_token: NextToken = hashed
) -> list[int]:
    """Return the tokens that a sample must have, each drawn from its mask."""
    prompt, output = request.prompt_token_ids.tolist(), list[int]()
    while len(output) < request.params.max_tokens and EOS not in output:
        allowed = grammar.allowed(output)
        if len(output) < request.params.min_tokens and allowed != [EOS]:
            allowed = [token for token in allowed if token != EOS]
        context = np.asarray(prompt + output, dtype=np.int32).tobytes()
        token = next_token(context, request.rng_key[1], sample, len(output))
        output.append(allowed[token % len(allowed)])
    return output
