"""Structured output: which tokens keep a text within its grammar.

Grammars are compiled and followed by llguidance (https://github.com/guidance-ai/llguidance), which
bounds the work of both: a schema that is too large is refused, a sample whose grammar takes too
much work in a step is in error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from batchinfer.cpus import available_cpus
from batchinfer.errors import install_command
from batchinfer.protocols import GrammarState
from batchinfer.text.structured.grammar_source import GrammarError, in_a_line, sources

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

    from batchinfer.text.tokenizer import Tokenizer

_CACHED = 256
"""Compiled grammars that are kept: rows often repeat each other's."""
_PROBED_TOKENS = 3
"""Some expressions show that they explode only when they are used."""
_BYTES = 256
_FEW_CORES = 4
"""Up to here masks are made one after the other: the threads that the model's products have just
used still spin, and others would wait for them. On 2 cores that took up to 1.8 times as long; on
more it was not measured."""


_IMPOSSIBLE = ("Unsatisfiable schema", "no text fits")
"""How messages begin on what nothing can follow: more than it allows would be of no use."""


class CompiledGrammar:
    """A grammar compiled for one model's tokenizer.

    Args:
        matcher: at the beginning of a text; copied for each sample.
        executor: the threads that make masks, if it is worth having some.
        eos_token_id: ends a text that is complete.
        num_words: of 32 tokens each, in a mask.
    """

    def __init__(
        self, matcher: LLMatcher, executor: LLExecutor | None, eos_token_id: int, num_words: int
    ) -> None:
        self._matcher = matcher
        self._executor = executor
        self._eos_token_id = eos_token_id
        self._num_words = num_words

    def begin(self) -> GrammarState:
        return _State(self._matcher, self._eos_token_id)

    def masks(self, states: Sequence[GrammarState]) -> npt.NDArray[np.int32]:
        """Token masks of samples, [len(states), words]."""
        from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

        masks = np.zeros((len(states), self._num_words), dtype=np.int32)
        matchers = []
        for at, state in enumerate(states):
            assert isinstance(state, _State)
            matchers.append((state.matcher, at))
        if self._executor is not None:
            fill_next_token_bitmask_par(self._executor, matchers, masks)
        else:
            for matcher, at in matchers:
                fill_next_token_bitmask(matcher, masks, at)
        return masks


class _State:
    """Matcher of one sample, made when it is first looked at: rows that wait need none."""

    __slots__ = ("_beginning", "_eos_token_id", "_matcher")

    def __init__(self, beginning: LLMatcher, eos_token_id: int) -> None:
        self._beginning = beginning
        self._eos_token_id = eos_token_id
        self._matcher: LLMatcher | None = None

    @property
    def matcher(self) -> LLMatcher:
        if self._matcher is None:
            self._matcher = self._beginning.deep_copy()
        return self._matcher

    @property
    def error(self) -> str | None:
        return _error_of(self.matcher)

    def take(self, token_id: int) -> list[int]:
        matcher = self.matcher
        matcher.consume_token(token_id)
        forced = matcher.compute_ff_tokens()
        if forced:
            matcher.consume_tokens(forced)
        return [*forced, self._eos_token_id] if matcher.is_stopped() else forced

    def replay(self, token_ids: Sequence[int]) -> None:
        self.matcher.consume_tokens(list(token_ids))


class GrammarCompiler:
    """Compiler of ``structured_outputs`` for one model. Thread-safe.

    Args:
        vocab_size: the model's token ids are below it.
    """

    def __init__(
        self, tokenizer: Tokenizer, eos_token_ids: frozenset[int], vocab_size: int
    ) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = sorted(eos_token_ids)
        self._num_tokens = max(vocab_size, tokenizer.vocab_size)
        self._compiled = lru_cache(_CACHED)(self._compile)
        self._model = lru_cache(1)(self._for_model)

    def compile(self, structured_outputs: Mapping[str, Any]) -> CompiledGrammar:
        """The grammar that ``SamplingParams.structured_outputs`` asks for.

        Raises:
            GrammarError: there is none, or none for this model, or llguidance is not installed.
        """
        return self._compiled(json.dumps(structured_outputs))

    def _compile(self, structured_outputs: str) -> CompiledGrammar:
        tokenizer, executor = self._model()
        matcher = _checked_matcher(tokenizer, json.loads(structured_outputs), self._num_tokens)
        return CompiledGrammar(
            matcher, executor, self._eos_token_ids[0], _num_words(self._num_tokens)
        )

    def _for_model(self) -> tuple[LLTokenizer, LLExecutor | None]:
        """llguidance's tokenizer, which takes a second to make of a large one, and its threads."""
        _require_llguidance()
        from llguidance import LLExecutor, LLTokenizer

        if not self._eos_token_ids:
            raise GrammarError("the model has no end-of-sequence token to end such a text with")
        try:
            tokenizer = LLTokenizer(
                self._tokenizer.serialised, n_vocab=self._num_tokens, eos_token=self._eos_token_ids
            )
        except ValueError as error:
            raise GrammarError(
                f"not with this model's tokenizer: {in_a_line(str(error))}"
            ) from None
        return tokenizer, LLExecutor() if available_cpus() > _FEW_CORES else None


def check_structured_outputs(structured_outputs: Mapping[str, Any]) -> None:
    """Compile a grammar for no model in particular, to see whether it can be.

    Raises:
        GrammarError: it cannot, or llguidance is not installed.
    """
    _require_llguidance()
    _checked_matcher(_byte_tokenizer(), structured_outputs, _BYTES + 1)


def _checked_matcher(
    tokenizer: LLTokenizer, structured_outputs: Mapping[str, Any], num_tokens: int
) -> LLMatcher:
    """The matcher of the first grammar in ``sources`` that can be compiled."""
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
    """Make the masks of a text's first tokens.

    Raises:
        GrammarError: no text fits, or finding out takes too much work.
    """
    from llguidance.numpy import fill_next_token_bitmask

    mask = np.zeros((1, _num_words(num_tokens)), dtype=np.int32)
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
    return in_a_line(matcher.get_error()) if matcher.is_error() else None


def _num_words(num_tokens: int) -> int:
    return -(-num_tokens // 32)


def _require_llguidance() -> None:
    try:
        import llguidance  # noqa: F401
    except ImportError:
        raise GrammarError(
            f"needs the package llguidance: {install_command('structured')}"
        ) from None


@lru_cache(1)
def _byte_tokenizer() -> LLTokenizer:
    """A token for each byte, and an end."""
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Bytes()))


class _Bytes:
    """What llguidance's wrapper of tokenizers looks at."""

    eos_token_id = _BYTES
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(_BYTES)), b"<end>")
    special_token_ids = (_BYTES,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)
