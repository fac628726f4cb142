"""Sampling and beam search parameters of the Python API, with vLLM's names.

``SamplingParams`` extends the job file's class of the same name. Unlike the job file's class,
``SamplingParams`` allows changes to its values; each change validates all values again.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from numbers import Real
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from batchinfer.config import sampling
from batchinfer.config.named_tokens import token_id_table
from batchinfer.config.settings_base import format_value, near_name
from batchinfer.config.structured_params import GuidedDecodingParams, StructuredOutputsParams

_GREEDY_BELOW = 1e-5
"""Temperature below which sampling is greedy, as in vLLM."""
_MAX_BIAS = 100.0
"""Largest absolute value of a logit bias. OpenAI's API clips larger biases."""
_UNLIMITED = 2**31 - 1
_ALIASES: Mapping[str, str] = {
    "guided_decoding": "structured_outputs",
    "response_format": "structured_outputs",
    "thinking_token_budget": "max_reasoning_tokens",
}
"""vLLM's and OpenAI's other names for parameters."""
_WITHOUT_EFFECT = ("skip_reading_prefix_cache", "spaces_between_special_tokens", "stream_interval")
_ELSEWHERE: Mapping[str, str] = {
    "early_stopping": "LLM.beam_search stops as transformers does with early_stopping=False",
    "repetition_detection": "set max_tokens or repetition_penalty",
    "trace_decode_token_ids": "score tokens with prompt_logprobs, or with a job of task: score",
    "use_beam_search": "call LLM.beam_search",
}
"""Refused parameters of vLLM, with their alternatives."""


class RequestOutputKind(Enum):
    """vLLM's streaming modes, which have no effect, because calls return complete outputs."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True)
class _CallParams(sampling.SamplingParams):
    """The fields of ``SamplingParams``."""

    max_tokens: int | None = 16  # type: ignore[assignment]  # the engine gets a number
    """Maximum number of tokens of a sample; None for as many as ``LLM.max_model_len`` allows."""
    detokenize: bool = True
    """False: texts stay empty, in outputs and in log-probabilities."""
    truncate_prompt_tokens: int | None = None
    """Keep this many tokens from the end of the prompt; -1 leaves room for one output token."""
    logits_processors: tuple[Any, ...] | None = None
    """Functions that take the output's token ids so far (a list) and the next token's logits
    (float32 [vocab_size] on the model's device), and return logits. A function of three arguments
    gets the prompt's token ids first. The functions run in order, before everything else that
    changes logits. Log-probabilities are computed from the logits that the functions return. An
    infinite logit excludes all other tokens."""
    output_kind: Any = RequestOutputKind.CUMULATIVE
    """Accepted for compatibility with vLLM; outputs are always complete."""
    extra_args: Mapping[str, Any] | None = None
    """Not used; programs may store values here."""
    logprob_token_ids: tuple[int, ...] | None = None
    """Return the log-probabilities of these token ids with each output token. These
    log-probabilities replace the log-probabilities of the most likely tokens."""
    prompt_logprob_token_ids: Any = None
    """Return the log-probabilities of these token ids in ``prompt_token_id_logprobs``. Give a list
    (possibly empty) for each prompt token except the first, or an array [tokens, ids] padded with
    -1."""
    prompt_logprob_start: int | None = None
    """Skip this many prompt tokens after the first in ``prompt_logprob_token_ids``."""
    flat_logprobs: bool = False
    """Return log-probabilities as ``FlatLogprobs``: few objects instead of a dict per token."""
    spaces_between_special_tokens: bool = True
    """Has no effect, as with vLLM's fast tokenizers."""
    skip_reading_prefix_cache: bool | None = None
    """Has no effect."""
    stream_interval: int | None = None
    """Has no effect."""
    skip_clone: bool = False
    """Has no effect."""
    best_of: int | None = None
    """Must be None or equal to ``n``. To choose the best of several samples, draw all samples with
    ``logprobs=0`` and keep the samples with the highest ``cumulative_logprob``."""
    guided_decoding: Any = None
    """Another name for ``structured_outputs``."""
    response_format: Any = None
    """OpenAI's name for ``structured_outputs``."""
    thinking_token_budget: int | None = None
    """vLLM's name for ``max_reasoning_tokens``; -1 for no limit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        kept = self.truncate_prompt_tokens
        self._require(
            "truncate_prompt_tokens", kept is None or kept == -1 or kept >= 1, "1 or more, or -1"
        )
        named = (self.logprob_token_ids, self.prompt_logprob_token_ids)
        if self.beam_width is not None and any(one is not None for one in named):
            raise ValueError(
                "logprob_token_ids and prompt_logprob_token_ids cannot be combined with beam search"
            )
        if self.n > 1 and self.temperature < _GREEDY_BELOW and self.beam_width is None:
            raise ValueError(
                f"n is {self.n}; n must be 1 when using greedy sampling "
                "(temperature 0), because all samples would be the same"
            )
        if self.stop and not self.detokenize:
            raise ValueError(
                "stop strings cannot be combined with detokenize=False, because "
                "matching them needs the text; leave out stop or detokenize=False"
            )

    @property
    def token_limit(self) -> int:
        return _UNLIMITED if self.max_tokens is None else self.max_tokens

    def _check_min_tokens(self) -> None:
        if self.max_tokens is None and self.min_tokens >= 0:
            return  # without max_tokens, the limit depends on the prompt's length
        super()._check_min_tokens()

    def _check_logprobs(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(self, name)
            self._require(name, wanted is None or wanted >= -1, "0 or more, or -1 for all")
        start = self.prompt_logprob_start
        self._require("prompt_logprob_start", start is None or start >= 0, "0 or more")
        if start is not None and self.prompt_logprob_token_ids is None:
            raise ValueError("prompt_logprob_start requires prompt_logprob_token_ids")

    def _normalize(self) -> None:
        changes: dict[str, Any] = {}
        if self.seed == -1:
            changes["seed"] = None
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is True:
                changes[name] = 1
        for name, meant in _ALIASES.items():
            value = getattr(self, name)
            if value is None:
                continue
            if getattr(self, meant) is not None or meant in changes:
                raise ValueError(f"{name} and {meant} mean the same; keep one")
            changes |= {meant: value, name: None}
        if changes.get("max_reasoning_tokens") == -1:  # -1 means no limit
            changes["max_reasoning_tokens"] = None
        structure = changes.get("structured_outputs", self.structured_outputs)
        if isinstance(structure, StructuredOutputsParams):
            changes["structured_outputs"] = structure.mapping()
        if self.prompt_logprob_token_ids is not None:
            table = token_id_table(self.prompt_logprob_token_ids, "prompt_logprob_token_ids")
            changes["prompt_logprob_token_ids"] = table
        for name, value in changes.items():
            object.__setattr__(self, name, value)
        super()._normalize()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _CallParams):
            return NotImplemented
        return all(
            np.array_equal(getattr(self, name), getattr(other, name))
            if name == "prompt_logprob_token_ids"
            else getattr(self, name) == getattr(other, name)
            for name in self.__dataclass_fields__
        )


class SamplingParams(_CallParams):
    """Parameters that choose the output tokens of a prompt, with vLLM's names and meanings.

    Parameters may be changed later: ``params.max_tokens = 64``.

    Raises:
        TypeError: a value has the wrong type, or a parameter does not exist.
        ValueError: a value is out of range or conflicts with another parameter.
    """

    if not TYPE_CHECKING:  # type checkers see the fields' signature

        def __init__(self, *args: Any, **given: Any) -> None:
            _refuse_unknown(given)
            super().__init__(*args, **given)

        __signature__ = inspect.signature(_CallParams)

        def __setattr__(self, name: str, value: Any) -> None:
            if name not in self.__dataclass_fields__:
                raise AttributeError(f"SamplingParams has no parameter {name}")
            changed = replace(self, **{name: value})
            for entry in fields(self):
                object.__setattr__(self, entry.name, getattr(changed, entry.name))

    @classmethod
    def from_optional(cls, **given: Any) -> Self:
        """Return the given parameters; None means the default, except for ``max_tokens``.

        Keys of ``logit_bias`` may be strings, and its values are clipped to -100 to 100.
        """
        kept = {name: value for name, value in given.items() if value is not None}
        if "max_tokens" in given:
            kept["max_tokens"] = given["max_tokens"]
        if "logit_bias" in kept:
            kept["logit_bias"] = _openai_biases(kept["logit_bias"])
        return cls(**kept)

    @classmethod
    def of(cls, params: sampling.SamplingParams) -> SamplingParams:
        if isinstance(params, SamplingParams):
            return params
        return cls(**{entry.name: getattr(params, entry.name) for entry in fields(params)})

    def clone(self) -> SamplingParams:
        """Return a deep copy."""
        return copy.deepcopy(self)

    def check_call(self) -> None:
        """Raise ValueError for values that, as in vLLM, are refused only when a call uses them."""
        if self.best_of not in (None, self.n):
            raise ValueError(
                f"best_of is {self.best_of}, but only best_of equal to n ({self.n}) is supported; "
                f"draw n={self.best_of} samples with logprobs=0 instead, and keep those with the "
                "highest cumulative_logprob"
            )
        named = self.logprob_token_ids
        if named is not None and self.logprobs not in (None, len(named)):
            raise ValueError(
                f"logprobs is {self.logprobs}, but logprob_token_ids has {len(named)} ids, which "
                "replace the most likely tokens; leave logprobs out"
            )

    def without_effect(self) -> dict[str, Any]:
        """Return the parameters that have no effect but differ from their defaults, by name."""
        values = {name: getattr(self, name) for name in _WITHOUT_EFFECT}
        known = self.__dataclass_fields__
        return {name: value for name, value in values.items() if value != known[name].default}

    def resolved(
        self, num_prompt_tokens: int, max_model_len: int, vocab_size: int
    ) -> SamplingParams:
        """Return the parameters for the engine, with numbers in place of None and -1.

        Args:
            max_model_len: maximum number of tokens of prompt and output together.

        Raises:
            ValueError: fewer than ``min_tokens`` tokens fit in ``max_model_len``.
        """
        changes: dict[str, Any] = {}
        if self.logprob_token_ids is not None:
            changes["logprobs"] = 0
        if self.prompt_logprob_token_ids is not None and self.prompt_logprobs is None:
            changes["prompt_logprobs"] = 0
        if self.max_tokens is None:
            left = max_model_len - num_prompt_tokens
            changes["max_tokens"] = left if left > 0 else max(self.min_tokens, 1)
        for name in ("logprobs", "prompt_logprobs"):
            wanted = changes.get(name, getattr(self, name))
            if wanted is not None and not 0 <= wanted <= vocab_size:
                changes[name] = vocab_size
        return replace(self, **changes) if changes else self


def _refuse_unknown(given: Mapping[str, Any]) -> None:
    known = _CallParams.__dataclass_fields__
    for name in given:
        if name in _ELSEWHERE:
            raise TypeError(f"SamplingParams has no parameter {name}; {_ELSEWHERE[name]}")
        if name not in known:
            raise TypeError(f"SamplingParams has no parameter {name}{near_name(name, known)}")


def _openai_biases(biases: Mapping[Any, float]) -> dict[int, float]:
    clipped = {}
    for token, value in biases.items():
        try:
            token_id = int(token)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(
                f"logit_bias has {format_value(token)}; its keys must be token ids"
            ) from None
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if not is_number or value != value:  # NaN differs from itself
            raise ValueError(
                f"logit_bias has {format_value(value)} for token {token_id}; it must be a number"
            )
        clipped[token_id] = min(_MAX_BIAS, max(-_MAX_BIAS, value))
    return clipped


@dataclass(frozen=True)
class BeamSearchParams:
    """Parameters of ``LLM.beam_search``, with vLLM's names."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    """Ignored."""
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    """Keep the end-of-sequence token in ``tokens`` of ``BeamSearchOutput.sequences``."""
    structured_outputs: Any = None
    """See ``SamplingParams``."""
    skip_special_tokens: bool = False
    """Leave special tokens out of ``text`` of ``BeamSearchOutput.sequences``."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Token ids that a beam may have."""

    def sampling(self) -> SamplingParams:
        """Return sampling parameters for a request that returns all its beams.

        Raises:
            TypeError, ValueError: a field is invalid; the message names it.
        """
        return SamplingParams(
            n=self.beam_width,
            beam_width=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            length_penalty=self.length_penalty,
            structured_outputs=self.structured_outputs,
            allowed_token_ids=self.allowed_token_ids,
        )


__all__ = [
    "BeamSearchParams",
    "GuidedDecodingParams",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]
