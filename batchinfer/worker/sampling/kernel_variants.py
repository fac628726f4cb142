"""Finds the variants of the sampling kernels that a job's steps may launch.

This module makes a batch of one sample for each variant. Drawing these batches before the first
step compiles every variant, so that no step waits for the compiler.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from batchinfer.config import SamplingParams
from batchinfer.engine.step import SamplingBatch, SamplingColumns

_Unset = Mapping[str, tuple[object, ...]]
"""The values of each sampling parameter that have no effect."""
_NO_EDITS: _Unset = {
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
}
"""Parameters that edit the logits at every output token of a row."""
_NO_BANS: _Unset = {"bad_words": ((),), "min_tokens": (0,)}
"""Parameters that edit the logits at only some of a row's output tokens."""
_NO_GRAMMARS: _Unset = {"structured_outputs": (None,), "max_reasoning_tokens": (None,)}


class KernelVariant(NamedTuple):
    edited: bool
    """True if logits are edited before the draw."""
    draws: bool
    """True if some samples have a temperature above 0."""
    filters: bool
    """True if top-k or top-p filters the tokens of some samples with a temperature above 0."""


@dataclass(frozen=True, slots=True)
class SamplingVariants:
    launches: frozenset[KernelVariant]
    mask_words: int
    """Number of 32-bit words in a row's token mask; 0 without grammars."""
    scores: bool
    forced_tokens: bool
    num_logprobs: int
    """Largest number of alternatives; -1: no log-probabilities."""

    @classmethod
    def of(
        cls,
        params: Iterable[SamplingParams],
        vocab: int,
        *,
        own: Collection[str] = (),
        forced_tokens: bool = False,
    ) -> SamplingVariants:
        """Return the kernel variants that steps need if each sample has one of ``params``.

        Args:
            own: names of parameters that each row may override.
            forced_tokens: true if every sample's token is given.
        """
        edited, draws, filters, num_logprobs = set[bool](), set[bool](), set[bool](), -1
        masked = scores = False
        for row_params in params:
            edited |= _are_set(row_params, own, _NO_EDITS)
            # Bans edit the logits at only some output tokens, so other steps are not edited.
            edited |= {True} & _are_set(row_params, own, _NO_BANS)
            draws |= _are_set(row_params, own, {"temperature": (0.0,)})
            if "beam_width" in own:
                draws |= {False}
            # A top-k that is at least the vocabulary size excludes nothing.
            no_top_k = () if 0 < row_params.top_k < vocab else (row_params.top_k,)
            filters |= _are_set(row_params, own, {"top_k": no_top_k, "top_p": (1.0,)})
            masked |= True in _are_set(row_params, own, _NO_GRAMMARS)
            scores |= True in _are_set(row_params, own, {"prompt_logprobs": (None,)})
            num_logprobs = max(
                num_logprobs, -1 if row_params.logprobs is None else row_params.logprobs
            )
        return cls(
            frozenset(KernelVariant(e, d, d and f) for e, d, f in product(edited, draws, filters)),
            -(-vocab // 32) if masked else 0,
            scores,
            forced_tokens,
            num_logprobs,
        )

    def batches(self) -> Iterator[SamplingBatch]:
        """Yield a batch with one row of logits for each variant. If masks are used, only the first
        batch has a token mask."""
        masks: dict[str, Any] = {}
        if self.mask_words:
            words = np.full((1, self.mask_words), -1, np.int32)
            masks = {"masked_rows": np.zeros(1, np.int32), "masks": words}
        for launch in sorted(self.launches):
            yield replace(self._batch(launch), **masks)
            masks = {}

    def _batch(self, launch: KernelVariant) -> SamplingBatch:
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
            given_token_ids=at_0 if self.forced_tokens else None,
        )


def _are_set(params: SamplingParams, own: Collection[str], unset: _Unset) -> set[bool]:
    """Return {True} if one of the ``unset`` parameters has an effect in every row, {False} if none
    has an effect in any row, and {True, False} if rows may differ."""
    fixed = {name: values for name, values in unset.items() if name not in own}
    if any(getattr(params, name) not in values for name, values in fixed.items()):
        return {True}
    return {False} if len(fixed) == len(unset) else {True, False}
