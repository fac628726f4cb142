"""Turns the prompts of rows into requests to the engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np

from batchinfer.config import EMBEDDING, SamplingParams
from batchinfer.engine.images import PromptImage
from batchinfer.engine.request import Request, TokenIds
from batchinfer.errors import RowError
from batchinfer.requests.branch_points import BranchPoints
from batchinfer.text.detokenize import bad_words_token_ids
from batchinfer.text.prompts import Prompt
from batchinfer.text.reasoning.grammar import ReasoningGrammar
from batchinfer.text.reasoning.reasoning_format import ReasoningFormat
from batchinfer.text.stop_strings import make_stop_checker_factory
from batchinfer.text.structured.compiled_grammar import CompiledGrammar, GrammarCompiler
from batchinfer.text.tokenizer import Tokenizer
from batchinfer.text.tools.row_tools import RowTools

BASE_MODEL = 0


@dataclass(frozen=True, slots=True)
class RowSampling:
    params: SamplingParams
    own_seed: bool
    """True if the row sets its own seed. The samples then do not depend on the row id."""
    spans_thinking: bool = False
    """True if structured output covers the whole sample, including reasoning."""

    def rng_key(self, stream: int) -> tuple[int, int]:
        """Return the seed and the random stream. A row that sets its own seed uses stream 0."""
        assert self.params.seed is not None, "a job has a seed"
        return self.params.seed, 0 if self.own_seed else stream


@dataclass(slots=True, eq=False)
class PromptRow:
    """An input row with its prompt, or with the error that keeps it from running.

    The reading thread sets ``key`` and the lengths of shared prefixes before it passes the row on.
    """

    row_id: int
    prompt: Prompt | RowError
    sampling: RowSampling | None = None
    """Sampling parameters; None if the row cannot run or draws no tokens."""
    reused_prefix_len: int = 0
    """Number of tokens of the longest prefix that the row shares with a later row."""
    branch_points: BranchPoints = ()
    """Prompt lengths at which later rows diverge from the row; only for recurrent models."""
    distinct_tokens: int = 0
    """Number of prompt tokens after the longest prefix shared with an earlier row, plus the number
    of completion tokens to score."""
    adapter: int = BASE_MODEL
    stream: int | None = None
    """Random stream of the row; None for the row id."""
    tools: RowTools | None = None
    key: bytes | None = None
    """Hash of everything that determines the row's answer; None if the job needs no keys."""
    images: tuple[PromptImage, ...] = ()
    """Images with their pixels, once they are loaded."""

    def __post_init__(self) -> None:
        """Drop the traceback and causes of an error: their frames keep the row in memory."""
        if isinstance(self.prompt, RowError):
            self.prompt.__traceback__ = self.prompt.__cause__ = self.prompt.__context__ = None

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of the prompt; 0 if the row cannot run."""
        return 0 if isinstance(self.prompt, RowError) else len(self.prompt.token_ids)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the prompt and of completions to score."""
        after = 0 if isinstance(self.prompt, RowError) else self.prompt.num_tokens_after
        return self.num_prompt_tokens + after

    @property
    def token_ids(self) -> TokenIds:
        """Token ids of the prompt; none if the row cannot run."""
        if isinstance(self.prompt, RowError):
            return np.empty(0, np.int32)
        return self.prompt.token_ids

    @property
    def image_bytes(self) -> int:
        """Number of bytes of encoded images that the row holds, not counting files."""
        images = () if isinstance(self.prompt, RowError) else self.prompt.images
        return sum(len(image.file.data or b"") for image in images)

    @property
    def rng_key(self) -> tuple[int, int]:
        """Seed and random stream of a row that draws tokens."""
        assert self.sampling is not None
        return self.sampling.rng_key(self.row_id if self.stream is None else self.stream)

    def drop_text(self) -> None:
        """Drop the prompt's text to save memory until the row is finished."""
        if not isinstance(self.prompt, RowError):
            self.prompt = replace(self.prompt, text=None)

    def share_token_ids(self, other: PromptRow) -> None:
        """Use the token id array of an equal row, to save memory."""
        if not isinstance(self.prompt, RowError) and not isinstance(other.prompt, RowError):
            self.prompt = replace(self.prompt, token_ids=other.prompt.token_ids)


def pooling_request(row: PromptRow, pooling: tuple[str, ...] = ("lasttoken",)) -> Request:
    """Return the request for the pooled hidden states of a row that can run.

    Args:
        pooling: value of ``Request.pooling``.
    """
    assert isinstance(row.prompt, Prompt)
    return Request(
        row_id=row.row_id,
        prompt_token_ids=row.prompt.token_ids,
        params=EMBEDDING,
        rng_key=(0, row.row_id),
        reused_prefix_len=row.reused_prefix_len,
        branch_points=row.branch_points,
        adapter=row.adapter,
        pools=True,
        pooling=pooling,
        first_segment=row.prompt.first_segment,
        unpooled=row.prompt.unpooled,
    )


class RequestMaker:
    """Makes the requests of rows that generate text, for one model.

    Args:
        reasoning: format of the model's reasoning; None if reasoning is part of the answer.
        vocab_size: vocabulary size of the model; None for the tokenizer's size.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_token_ids: frozenset[int],
        grammars: GrammarCompiler,
        reasoning: ReasoningFormat | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._grammars = grammars
        self._reasoning = reasoning
        # Cached, because usually all rows of a job have the same bad words.
        self._bad_words = lru_cache(maxsize=1024)(
            partial(bad_words_token_ids, tokenizer, vocab_size=vocab_size)
        )

    def make(self, row: PromptRow) -> Request:
        """Return the request of a row that can run.

        Raises:
            GrammarError: the row's ``structured_outputs`` cannot be compiled.
        """
        assert isinstance(row.prompt, Prompt)
        assert row.sampling is not None
        params = row.sampling.params
        return Request(
            row_id=row.row_id,
            prompt_token_ids=row.prompt.token_ids,
            params=params,
            rng_key=row.rng_key,
            eos_token_ids=self._eos_token_ids,
            bad_words_token_ids=self._bad_words(params.bad_words),
            make_stop_checker=make_stop_checker_factory(self._tokenizer, params),
            grammar=self._grammar(row.sampling, row.prompt.token_ids),
            reused_prefix_len=row.reused_prefix_len,
            branch_points=row.branch_points,
            images=row.images,
            prompt_embeds=row.prompt.embeds,
            adapter=row.adapter,
            key=row.key,
        )

    def _grammar(
        self, sampling: RowSampling, prompt_token_ids: TokenIds
    ) -> CompiledGrammar | ReasoningGrammar | None:
        params = sampling.params
        structure, budget = params.structured_outputs, params.max_reasoning_tokens
        answer = None if structure is None else self._grammars.compile(structure)
        if self._reasoning is None or (answer is None and budget is None):
            return answer
        if sampling.spans_thinking:
            return answer
        return ReasoningGrammar(
            self._reasoning,
            prompt_token_ids,
            answer,
            budget,
            self._eos_token_ids,
            self._grammars.masks,
        )
