"""Sampling parameters of a job or a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchinfer.config.settings_base import Record, coerce_fields
from batchinfer.config.structured import normalized

MAX_LOGPROBS = 20
"""Maximum number of alternatives per token, as in the OpenAI and vLLM APIs."""
MAX_SAMPLES = 16_384
"""Maximum number of samples per prompt, as in vLLM."""
MAX_BEAMS = 256
MAX_LENGTH_PENALTY = 32.0
"""Largest length penalty. The maximum length raised to this power is still a finite float."""
HUGE = 1e30
"""Largest absolute value of a parameter, so that float32 arithmetic does not overflow."""

_NOT_WITH_BEAMS = ("top_p", "top_k", "min_p")
"""Parameters that beam search refuses."""


@dataclass(frozen=True)
class SamplingParams(Record):
    """Parameters that choose the output tokens of a row, with vLLM's names and meanings."""

    max_tokens: int = 16
    """Maximum number of tokens of a sample."""
    n: int = 1
    """Number of samples per prompt. The prompt is computed once."""
    min_tokens: int = 0
    """Stop tokens and stop strings do not end a sample before the sample has this many tokens. A
    grammar may still end the sample earlier."""
    temperature: float = 1.0
    """Temperature of sampling. 0: always take the most likely token."""
    top_p: float = 1.0
    """Keep only the smallest set of most likely tokens whose probabilities add up to at least this
    number."""
    top_k: int = 0
    """Keep only this many of the most likely tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Keep only tokens with at least this fraction of the most likely token's probability."""
    presence_penalty: float = 0.0
    """Number to subtract once from the logit of every token that is already in the output."""
    frequency_penalty: float = 0.0
    """Number to subtract from a token's logit for each time that the token is in the output."""
    repetition_penalty: float = 1.0
    """Number that divides the positive logits, and multiplies the negative logits, of tokens in the
    prompt or the output."""
    no_repeat_ngram_size: int = 0
    """Do not draw a token if it ends a sequence of this many tokens that is already in the prompt
    or the output, as in transformers; 0: draw any token."""
    stop: tuple[str, ...] = ()
    """Strings that end a sample."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a sample, in addition to the model's end-of-sequence ids."""
    include_stop_str_in_output: bool = False
    """Keep the stop string at the end of the text."""
    ignore_eos: bool = False
    """Do not stop at the model's end-of-sequence tokens."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    seed: int | None = None
    """Seed of the random numbers; with the same seed, a row draws the same tokens. None: a new seed
    for every call of the Python API."""
    logprobs: int | None = None
    """Write the log-probability of each token, and of this many alternatives (at most 20)."""
    logit_bias: Mapping[int, float] | None = None
    """Numbers to add to logits, by token id."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Token ids that may be sampled."""
    bad_words: tuple[str, ...] = ()
    """Strings whose tokens must not follow each other. Other tokens may still spell the string."""
    prompt_logprobs: int | None = None
    """Write the log-probability of each prompt token except the first, and of this many
    alternatives (at most 20)."""
    structured_outputs: Mapping[str, Any] | None = None
    """Format of the text: {json: schema}, {regex: text}, {choice: [texts]}, {grammar: Lark or
    GBNF}, {json_object: true} or {structural_tag: xgrammar's format}. OpenAI's response_format
    means the same. A schema that a grammar cannot enforce is refused; with unsupported: check,
    finished texts are checked against the schema."""
    beam_width: int | None = None
    """Use beam search with this many beams. The n best beams are written, best first; the
    temperature is ignored, and top_p, top_k and min_p are refused. Rules and scores are as in
    transformers with early_stopping=False."""
    length_penalty: float = 1.0
    """Exponent of a beam's length. Beams are ranked by their log-probability divided by this power
    of their length."""
    max_reasoning_tokens: int | None = None
    """Maximum number of reasoning tokens, not counting the markers. A sample that reaches this
    number is forced to end its reasoning. Needs output.reasoning."""

    def __post_init__(self) -> None:
        self._normalize()
        coerce_fields(self)
        self._check_beams()
        if self.structured_outputs is not None and self.ignore_eos:
            raise ValueError(
                "ignore_eos cannot be combined with structured_outputs, because a "
                "structured answer ends with an end-of-sequence token"
            )
        budget = self.max_reasoning_tokens
        self._require("max_reasoning_tokens", budget is None or budget >= 0, "0 or more")
        if budget is not None and self.ignore_eos:
            raise ValueError(
                "ignore_eos cannot be combined with max_reasoning_tokens; leave one out"
            )
        self._require("max_tokens", 1 <= self.token_limit < 2**31, "from 1 to 2**31 - 1")
        self._require("n", 1 <= self.n <= MAX_SAMPLES, f"from 1 to {MAX_SAMPLES}")
        self._check_min_tokens()
        self._require("temperature", 0.0 <= self.temperature <= HUGE, f"from 0 to {HUGE:g}")
        self._require("top_p", 0.0 < self.top_p <= 1.0, "more than 0 and at most 1")
        self._require("top_k", -1 <= self.top_k < 2**31, "from -1 to 2**31 - 1")
        self._require("min_p", 0.0 <= self.min_p <= 1.0, "from 0 to 1")
        for name in ("presence_penalty", "frequency_penalty"):
            self._require(name, -2.0 <= getattr(self, name) <= 2.0, "from -2 to 2")
        in_range = 1 / HUGE <= self.repetition_penalty <= HUGE
        self._require("repetition_penalty", in_range, f"from {1 / HUGE:g} to {HUGE:g}")
        size = self.no_repeat_ngram_size
        self._require("no_repeat_ngram_size", 0 <= size < 2**31, "from 0 to 2**31 - 1")
        self._require("seed", self.seed is None or 0 <= self.seed < 2**64, "from 0 to 2**64 - 1")
        self._check_logprobs()
        for name in ("stop", "bad_words"):
            valid = all(map(_is_text, getattr(self, name)))
            self._require(name, valid, "non-empty strings of valid Unicode")
        self._require("stop_token_ids", all(i >= 0 for i in self.stop_token_ids), "0 or more")
        if self.allowed_token_ids is not None:
            ids = self.allowed_token_ids
            self._require(
                "allowed_token_ids", bool(ids) and min(ids) >= 0, "a non-empty list of token ids"
            )
        if self.logit_bias is not None:
            small = all(abs(value) <= HUGE for value in self.logit_bias.values())
            known = all(token_id >= 0 for token_id in self.logit_bias)
            self._require(
                "logit_bias",
                small and known,
                f"a map from token ids to values from {-HUGE:g} to {HUGE:g}",
            )

    @property
    def has_penalties(self) -> bool:
        """True if a penalty changes logits."""
        none = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return none != (0.0, 0.0, 1.0)

    @property
    def token_limit(self) -> int:
        """Value of ``max_tokens``, which is a number even in subclasses that allow None."""
        return self.max_tokens

    def _check_logprobs(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(self, name)
            self._require(name, wanted is None or 0 <= wanted <= MAX_LOGPROBS, "from 0 to 20")

    def _check_min_tokens(self) -> None:
        problem = ""
        if self.min_tokens < 0:
            problem = "greater than or equal to 0"
        elif self.min_tokens > self.token_limit:
            problem = f"less than or equal to max_tokens, which is {self.token_limit}"
        if problem:
            raise ValueError(f"min_tokens is {self.min_tokens}; min_tokens must be {problem}")

    def _check_beams(self) -> None:
        width, penalty = self.beam_width, self.length_penalty
        if width is None:
            self._require("length_penalty", penalty == 1.0, "left out unless beam_width is set")
            return
        self._require("beam_width", 1 <= width <= MAX_BEAMS, f"from 1 to {MAX_BEAMS}")
        most = MAX_LENGTH_PENALTY
        self._require("length_penalty", -most <= penalty <= most, f"from {-most:g} to {most:g}")
        self._require("n", self.n <= width, f"at most beam_width, which is {width}")
        for name in _NOT_WITH_BEAMS:
            value = getattr(self, name)
            if value != self.__dataclass_fields__[name].default and (name, value) != ("top_k", -1):
                raise ValueError(
                    f"sampling.{name} cannot be combined with beam_width, because beam search does "
                    "not draw tokens at random; leave one out"
                )
        object.__setattr__(self, "temperature", 0.0)

    def _normalize(self) -> None:
        """Turn a single string into a tuple, None into an empty tuple, and ``structured_outputs``
        into its normal form."""
        for name in ("stop", "bad_words", "stop_token_ids"):
            value = getattr(self, name)
            if isinstance(value, str) and name != "stop_token_ids":
                object.__setattr__(self, name, (value,))
            elif value is None:
                object.__setattr__(self, name, ())
        if isinstance(self.structured_outputs, Mapping):
            object.__setattr__(self, "structured_outputs", normalized(self.structured_outputs))

    def check_token_ids(self, vocab_size: int) -> None:
        """Raise a ValueError that names the field if a token id is not below ``vocab_size``."""
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            highest = max(getattr(self, name) or (), default=0)
            if highest >= vocab_size:
                raise ValueError(
                    f"{name} has token id {highest}; the model's token ids are below {vocab_size}"
                )


def _is_text(value: str) -> bool:
    """Return True if a string is not empty and contains only valid Unicode."""
    return bool(value) and not any("\ud800" <= character <= "\udfff" for character in value)


SAMPLING_ALIASES: Mapping[str, str] = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "num_return_sequences": "n",
    "min_new_tokens": "min_tokens",
    "guided_decoding": "structured_outputs",
    "response_format": "structured_outputs",
}
"""Other tools' names for the same fields, accepted in job files and as column names."""
