"""Structured output: masks that allow only tokens that keep a text within its grammar.

llguidance (https://github.com/guidance-ai/llguidance) compiles grammars and matches samples against
them, with limits on the work: it refuses a schema that is too large, and a sample fails if a step
takes too much work.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from batchinfer.errors import install_command
from batchinfer.text.structured.grammar_source import GrammarError, in_a_line, sources
from batchinfer.text.structured.masks import Mask, TokenMasks, num_words

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from batchinfer.text.tokenizer import Tokenizer

_CACHED = 256
"""Number of compiled grammars to keep, because rows often repeat grammars."""
_PROBED_TOKENS = 3
"""Number of tokens to try in a new grammar, because some grammars compile but fail in use."""
_BYTES = 256

_PANIC, _POISONED = "panic", "PoisonError"
"""Words in messages of llguidance: of a bug that a sample meets, and of all later uses of the lexer
that this sample shares with other samples of its grammar."""
_IMPOSSIBLE = ("Unsatisfiable schema", "no text can match")
"""Beginnings of messages about grammars that no text matches. No wider grammar is then tried."""


class CompiledGrammar:
    """A grammar compiled for one model's tokenizer.

    Args:
        compiled: compiles the grammar; returns a matcher at the beginning of a text.
        eos_token_id: token that ends a complete text.
        masks: makes the token masks of samples, [samples, words].
    """

    def __init__(
        self, compiled: Callable[[], LLMatcher], eos_token_id: int, masks: TokenMasks
    ) -> None:
        self._compiled = compiled
        self._beginning: LLMatcher | None = compiled()
        self.eos_token_id = eos_token_id
        self.masks = masks

    def begin(self) -> MatcherState:
        return MatcherState(self)

    @property
    def beginning(self) -> LLMatcher:
        """A matcher at the beginning of a text, which each sample copies."""
        if self._beginning is None:
            self._beginning = self._compiled()
        return self._beginning

    def recompile(self, beginning: LLMatcher) -> None:
        """Compile the grammar again for later samples, because a copy of ``beginning`` panicked.
        All copies share a lexer, which llguidance does not use again after a panic."""
        if self._beginning is beginning:
            self._beginning = None


class MatcherState:
    """Matches one sample. The matcher is made on first use, so waiting rows have no matcher."""

    __slots__ = ("_beginning", "_grammar", "_matcher", "_taken")

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._grammar = grammar
        self._beginning: LLMatcher | None = None
        self._matcher: LLMatcher | None = None
        self._taken: list[int] = []

    @property
    def matcher(self) -> LLMatcher:
        if self._matcher is None:
            self._beginning = self._grammar.beginning
            self._matcher = self._beginning.deep_copy()
        return self._matcher

    @property
    def error(self) -> str | None:
        error = _error_of(self.matcher)
        if error is not None and _PANIC in error and self._beginning is not None:
            self._grammar.recompile(self._beginning)
        return error

    def apply_to(self, mask: Mask) -> None:
        """Make the matcher's mask again if another sample's panic prevented it."""
        if self._restart():
            from llguidance.numpy import fill_next_token_bitmask

            fill_next_token_bitmask(self.matcher, mask[None])

    def take(self, token_id: int) -> list[int]:
        self.matcher.consume_token(token_id)
        self._taken.append(token_id)
        self._restart()
        forced = self.matcher.compute_ff_tokens()
        if forced:
            self.matcher.consume_tokens(forced)
            self._taken += forced
        return [*forced, self._grammar.eos_token_id] if self.matcher.is_stopped() else forced

    def replay(self, token_ids: Sequence[int]) -> None:
        self.matcher.consume_tokens(list(token_ids))
        self._taken += token_ids
        self._restart()

    def _restart(self) -> bool:
        """Match the sample again from its beginning if another sample's panic broke the matcher."""
        if _POISONED not in (self.error or ""):
            return False
        self._matcher = None
        self.matcher.consume_tokens(self._taken)
        return True

    def fork(self) -> MatcherState:
        other = MatcherState(self._grammar)
        other._beginning, other._taken = self._beginning, self._taken.copy()
        other._matcher = None if self._matcher is None else self._matcher.deep_copy()
        return other


class GrammarCompiler:
    """Compiles ``structured_outputs`` for one model. Thread-safe."""

    def __init__(
        self, tokenizer: Tokenizer, eos_token_ids: frozenset[int], vocab_size: int
    ) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = sorted(eos_token_ids)
        self._num_tokens = max(vocab_size, tokenizer.vocab_size)
        self.masks = TokenMasks(self._num_tokens)
        self._compiled = lru_cache(_CACHED)(self._compile)
        self._model = lru_cache(1)(self._for_model)

    def compile(self, structured_outputs: Mapping[str, Any]) -> CompiledGrammar:
        """Return the grammar of ``SamplingParams.structured_outputs``.

        Raises:
            GrammarError: the grammar cannot be compiled for this model, or llguidance is not
                installed.
        """
        return self._compiled(json.dumps(structured_outputs))

    def _compile(self, structured_outputs: str) -> CompiledGrammar:
        wanted = json.loads(structured_outputs)
        compiled = partial(_checked_matcher, self._model(), wanted, self._num_tokens)
        return CompiledGrammar(compiled, self._eos_token_ids[0], self.masks)

    def _for_model(self) -> LLTokenizer:
        """Make llguidance's tokenizer, which takes a second for a large vocabulary."""
        _require_llguidance()
        from llguidance import LLTokenizer

        if not self._eos_token_ids:
            raise GrammarError(
                "the model has no end-of-sequence token, but a structured answer must end with one"
            )
        try:
            return LLTokenizer(
                self._tokenizer.serialized, n_vocab=self._num_tokens, eos_token=self._eos_token_ids
            )
        except ValueError as error:
            raise GrammarError(
                f"this model's tokenizer cannot be used: {in_a_line(str(error))}"
            ) from None


def check_structured_outputs(structured_outputs: Mapping[str, Any]) -> None:
    """Raise a ``GrammarError`` if the grammar cannot be compiled for any model, or if llguidance is
    not installed."""
    _require_llguidance()
    _checked_matcher(_byte_tokenizer(), structured_outputs, _BYTES + 1)


def _checked_matcher(
    tokenizer: LLTokenizer, structured_outputs: Mapping[str, Any], num_tokens: int
) -> LLMatcher:
    """Return the matcher of the first grammar in ``sources`` that compiles."""
    failures = list[GrammarError]()
    for source in sources(structured_outputs, _compiles):
        try:
            return _matcher(tokenizer, source(), num_tokens)
        except GrammarError as error:
            failures.append(error)
            if str(error).startswith(_IMPOSSIBLE):
                break
    raise failures[0]


def _compiles(source: Callable[[], str]) -> bool:
    try:
        _matcher(_byte_tokenizer(), source(), _BYTES + 1)
    except GrammarError:
        return False
    return True


def _matcher(tokenizer: LLTokenizer, source: str, num_tokens: int) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(verbose_errors=False)
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
    _probe(matcher.deep_copy(), num_tokens)
    return matcher


def _probe(matcher: LLMatcher, num_tokens: int) -> None:
    """Follow the grammar for a text's first tokens to find errors that appear only in use.

    Raises:
        GrammarError: no text matches the grammar, or its masks take too much work.
    """
    from llguidance.numpy import fill_next_token_bitmask

    mask = np.zeros((1, num_words(num_tokens)), dtype=np.int32)
    for _ in range(_PROBED_TOKENS):
        if (error := _error_of(matcher)) is not None:
            raise GrammarError(error)
        if matcher.is_stopped():
            return
        fill_next_token_bitmask(matcher, mask)
        if (error := _error_of(matcher)) is not None:
            raise GrammarError(error)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        matcher.consume_token(int(allowed[0]))


def _error_of(matcher: LLMatcher) -> str | None:
    if not matcher.is_error():
        return None
    error = in_a_line(matcher.get_error())
    return f"llguidance has a bug that this text meets: {error}" if _PANIC in error else error


def _require_llguidance() -> None:
    try:
        import llguidance  # noqa: F401
    except ImportError:
        raise GrammarError(
            f"needs the package llguidance: {install_command('structured')}"
        ) from None


@lru_cache(1)
def _byte_tokenizer() -> LLTokenizer:
    """Return a tokenizer with a token for each byte, and an end token."""
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Bytes()))


class _Bytes:
    """A tokenizer with the attributes that llguidance's wrapper reads."""

    eos_token_id = _BYTES
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(_BYTES)), b"<end>")
    special_token_ids = (_BYTES,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)
