"""The kinds of sampling batches that steps may have, as batches of one sample.

Which kernels draw a batch, and what they are compiled for, follows from its kind, so that drawing
these ahead leaves nothing to be compiled within a step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np

from batchinfer.config import SamplingParams
from batchinfer.engine.step import SamplingBatch, SamplingColumns

_Unset = Mapping[str, tuple[object, ...]]
"""Parameters, and the values with which they do nothing."""
_NO_EDITS: _Unset = {
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
}
"""Of those that edit the logits of every token of a sample."""
_NO_BANS: _Unset = {"bad_words": ((),), "min_tokens": (0,)}
"""Of those that edit the logits of some of them."""
_NO_GRAMMARS: _Unset = {"structured_outputs": (None,), "max_reasoning_tokens": (None,)}


class Launch(NamedTuple):
    """What one launch of the sampling kernels is compiled for."""

    edited: bool
    """Logits are others than the model's."""
    draws: bool
    """Some are drawn at a temperature."""
    filters: bool
    """And some of these by top-k or top-p."""


@dataclass(frozen=True, slots=True)
class StepKinds:
    """All kinds of steps that sampling parameters lead to."""

    launches: frozenset[Launch]
    mask_words: int
    """Of a row's mask where grammars hold some samples; 0: they hold none."""
    scores: bool
    """Log-probabilities of prompts are asked for."""
    gives: bool
    """Tokens are given, not drawn."""
    num_logprobs: int
    """Most alternatives; -1: no log-probabilities are asked for."""

    @classmethod
    def of(
        cls,
        params: Iterable[SamplingParams],
        vocab: int,
        *,
        own: Collection[str] = (),
        gives_tokens: bool = False,
    ) -> StepKinds:
        """The steps of samples with any of these parameters, side by side or not.

        Args:
            vocab: tokens of the model.
            own: names of parameters that each row may have another value of.
            gives_tokens: every sample's token is given.
        """
        each = [_Possible(one, frozenset(own)) for one in params]
        masked = any(True in one.are_set(_NO_GRAMMARS) for one in each)
        return cls(
            launches=_side_by_side({launch for one in each for launch in one.launches(vocab)}),
            mask_words=-(-vocab // 32) if masked else 0,
            scores=any(True in one.are_set({"prompt_logprobs": (None,)}) for one in each),
            gives=gives_tokens,
            num_logprobs=max((one.num_logprobs for one in each), default=-1),
        )

    def batches(self) -> Iterator[SamplingBatch]:
        """A batch for each kind, of one row of logits."""
        masks: dict[str, Any] = {}
        if self.mask_words:
            words = np.full((1, self.mask_words), -1, np.int32)
            masks = {"masked_rows": np.zeros(1, np.int32), "masks": words}
        for launch in sorted(self.launches):
            yield replace(self._batch(launch), **masks)
            masks = {}

    def _batch(self, launch: Launch) -> SamplingBatch:
        columns = SamplingColumns.zeros(1)
        columns.temperature[:] = launch.draws
        columns.top_k[:] = launch.filters
        columns.top_p[:] = columns.repetition_penalty[:] = 1
        columns.num_logprobs[:] = self.num_logprobs
        at_0, none = np.zeros(1, np.int32), np.empty(0, np.int32)
        biased = at_0 if launch.edited else none
        values: dict[str, Any] = columns.take(at_0)
        return SamplingBatch(
            **values,
            logits_rows=at_0,
            position=at_0,
            penalties=None,
            bias_samples=biased,
            bias_token_ids=biased,
            bias_values=biased.astype(np.float32),
            allowed_samples=none,
            allowed_token_ids=none,
            given_token_ids=at_0 if self.gives else None,
        )


@dataclass(frozen=True, slots=True)
class _Possible:
    """Parameters, some of which rows may change."""

    params: SamplingParams
    own: frozenset[str]

    def are_set(self, unset: _Unset) -> set[bool]:
        """Whether any of these parameters does something: True, False, or both."""
        each = (
            {True, False} if name in self.own else {getattr(self.params, name) not in values}
            for name, values in unset.items()
        )
        return {any(one) for one in product(*each)}

    def launches(self, vocab: int) -> Iterator[Launch]:
        """Those of a sample alone."""
        draws = self.are_set({"temperature": (0.0,)})
        if "beam_width" in self.own:
            draws |= {False}
        # A top-k of the vocabulary and more leaves nothing out.
        top_k = self.params.top_k
        filters = self.are_set({"top_k": () if 0 < top_k < vocab else (top_k,), "top_p": (1.0,)})
        edited = self.are_set(_NO_EDITS) | ({True} & self.are_set(_NO_BANS))
        for one in product(edited, draws, filters):
            launch = Launch(*one)
            yield launch._replace(filters=launch.draws and launch.filters)

    @property
    def num_logprobs(self) -> int:
        return -1 if self.params.logprobs is None else self.params.logprobs


def _side_by_side(launches: set[Launch]) -> frozenset[Launch]:
    """Launches of samples of these, and of several of them in a step."""
    found = frozenset(launches)
    while True:
        together = {
            Launch(one.edited, one.draws or other.draws, one.filters or other.filters)
            for one, other in combinations(found, 2)
            if one.edited == other.edited
        }
        if together <= found:
            return found
        found |= together
