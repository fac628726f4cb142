"""What is asked of the sampler and of the engine: two frozen records, checked when made."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal

from batchinfer.typed import take_types

MAX_LOGPROBS = 20
"""Most alternatives per token that can be asked for, as in the OpenAI and vLLM APIs."""

MAX_SAMPLES = 16_384
"""Most samples per prompt, as in vLLM."""

MAX_BEAMS = 256
MAX_LENGTH_PENALTY = 32.0
"""A longer length than any model's to this power is a float yet."""

HUGE = 1e30
"""Most that a number may be which is computed with in float32."""

_NOT_YET_SAMPLING: Mapping[str, object] = {
    "prompt_logprobs": None,
    "structured_outputs": None,
}
_NOT_WITH_BEAMS = (
    "min_tokens",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "logprobs",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
)
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]i?B|B)?\s*", re.IGNORECASE)
_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_size(value: str | int | float, key: str) -> int:
    """Bytes meant by ``"40GiB"``, ``"512 MB"`` or a bare number, which is GiB.

    Raises:
        ValueError: naming ``key``, when the text is not a size.
    """
    match = _SIZE.fullmatch(str(value))
    if isinstance(value, bool) or match is None:
        raise ValueError(f"{key}: {json.dumps(value)} is not a size; write it like 40GiB or 512MiB")
    number, unit = match.groups()
    return int(float(number) * _UNITS[(unit or "GiB").lower()])


@dataclass(frozen=True)
class SamplingParams:
    """How the output tokens of a row are chosen. Names and meanings are vLLM's.

    Raises:
        TypeError: naming the field, when a value is of another type.
        ValueError: naming the field, when a value is out of range or not supported yet.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "extra": "forbid",
        "use_attribute_docstrings": True,
    }

    max_tokens: int = 16
    """Most tokens a sample may have."""
    n: int = 1
    """Samples per prompt; the prompt is computed once."""
    min_tokens: int = 0
    """Stop tokens and stop strings do not end a sample before it has this many tokens."""
    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probabilities reach this sum."""
    top_k: int = 0
    """Keep this many most likely tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the most likely one."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token already in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it is in the output."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or the output."""
    stop: tuple[str, ...] = ()
    """Texts that end a sample."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a sample, besides the model's own end-of-sequence ids."""
    include_stop_str_in_output: bool = False
    """Keep the stop string at the end of the text."""
    ignore_eos: bool = False
    """Do not stop at the model's end-of-sequence tokens."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    seed: int | None = None
    """Same seed, same tokens. None: fresh for every call of the Python API."""
    logprobs: int | None = None
    """Write the log-probability of each token, and of this many alternatives (at most 20)."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these token ids may be sampled."""
    bad_words: tuple[str, ...] = ()
    """Texts that must not appear."""
    prompt_logprobs: int | None = None
    structured_outputs: Mapping[str, Any] | None = None
    beam_width: int | None = None
    """Beam search with so many beams, of which the n best are written, best first; the temperature
    is ignored. Rules and scores are those of transformers with early_stopping=False."""
    length_penalty: float = 1.0
    """Beams are ranked by their log-probability over their length to this power."""

    def __post_init__(self) -> None:
        self._normalise()
        for name, default in _NOT_YET_SAMPLING.items():
            if getattr(self, name) != default:
                raise ValueError(f"not yet: sampling.{name} is not supported by this version")
        take_types(self)
        self._check_beams()
        self._require("max_tokens", 1 <= self.max_tokens < 2**31, "1 to 2**31 - 1")
        self._require("n", 1 <= self.n <= MAX_SAMPLES, f"1 to {MAX_SAMPLES}")
        self._require("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "0 to max_tokens")
        self._require("temperature", 0.0 <= self.temperature <= HUGE, f"0 to {HUGE:g}")
        self._require("top_p", 0.0 < self.top_p <= 1.0, "over 0 and at most 1")
        self._require("top_k", -1 <= self.top_k < 2**31, "-1, 0 or more, below 2**31")
        self._require("min_p", 0.0 <= self.min_p <= 1.0, "0 to 1")
        for name in ("presence_penalty", "frequency_penalty"):
            self._require(name, -2.0 <= getattr(self, name) <= 2.0, "-2 to 2")
        positive = 1 / HUGE <= self.repetition_penalty <= HUGE
        self._require("repetition_penalty", positive, f"over 0 and at most {HUGE:g}")
        self._require("seed", self.seed is None or 0 <= self.seed < 2**64, "0 to 2**64 - 1")
        self._require(
            "logprobs", self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, "0 to 20"
        )
        for name in ("stop", "bad_words"):
            valid = all(map(_is_text, getattr(self, name)))
            self._require(name, valid, "texts that are not empty, of valid Unicode")
        self._require("stop_token_ids", all(i >= 0 for i in self.stop_token_ids), "0 or more")
        if self.allowed_token_ids is not None:
            ids = self.allowed_token_ids
            self._require("allowed_token_ids", bool(ids) and min(ids) >= 0, "ids, at least one")
        if self.logit_bias is not None:
            small = all(abs(value) <= HUGE for value in self.logit_bias.values())
            known = all(token_id >= 0 for token_id in self.logit_bias)
            self._require("logit_bias", small and known, f"token ids with values up to {HUGE:g}")

    def _check_beams(self) -> None:
        width, penalty = self.beam_width, self.length_penalty
        if width is None:
            self._require("length_penalty", penalty == 1.0, "left out, or beam_width be set")
            return
        self._require("beam_width", 1 <= width <= MAX_BEAMS, f"1 to {MAX_BEAMS}")
        most = MAX_LENGTH_PENALTY
        self._require("length_penalty", -most <= penalty <= most, f"{-most:g} to {most:g}")
        self._require("n", self.n <= width, f"at most beam_width, which is {width}")
        for name in _NOT_WITH_BEAMS:
            value = getattr(self, name)
            if value != self.__dataclass_fields__[name].default and (name, value) != ("top_k", -1):
                raise ValueError(
                    f"not yet: sampling.{name} with beam_width is not supported by this version"
                )
        object.__setattr__(self, "temperature", 0.0)

    def _normalise(self) -> None:
        """Take a single text for a list of one, and None for an empty list."""
        for name in ("stop", "bad_words", "stop_token_ids"):
            value = getattr(self, name)
            if isinstance(value, str) and name != "stop_token_ids":
                object.__setattr__(self, name, (value,))
            elif value is None:
                object.__setattr__(self, name, ())

    def _require(self, name: str, holds: bool, what: str) -> None:
        if not holds:
            raise ValueError(f"{name} is {_shown(getattr(self, name))}; it must be {what}")

    def check_token_ids(self, vocab_size: int) -> None:
        """Raise ValueError, naming the field, for a token id that is not below ``vocab_size``."""
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            highest = max(getattr(self, name) or (), default=0)
            if highest >= vocab_size:
                raise ValueError(
                    f"{name} has {highest}; the model's token ids are below {vocab_size}"
                )


def _is_text(value: str) -> bool:
    """Whether it has characters, and none of them is half of a surrogate pair."""
    return bool(value) and not any("\ud800" <= character <= "\udfff" for character in value)


SAMPLING_ALIASES: Mapping[str, str] = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "num_return_sequences": "n",
    "min_new_tokens": "min_tokens",
    "guided_decoding": "structured_outputs",
    "response_format": "structured_outputs",
}
"""Other tools' names for the same fields, accepted in job files and in row columns."""


@dataclass(frozen=True)
class PromptConfig:
    """How a row becomes a prompt. One source; default: column ``messages``, else ``prompt``.

    Raises:
        TypeError: naming the field, when a value is of another type.
        ValueError: naming the field, when more than one source is given.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "extra": "forbid",
        "use_attribute_docstrings": True,
    }

    column: str | None = None
    """A column of strings, or of conversations: list<struct<role, content>>."""
    template: str | None = None
    """Jinja2 over the row's columns, run in a sandbox."""
    messages: tuple[Mapping[str, str], ...] | None = None
    """A conversation: role and content, the content being a template like ``template``."""
    token_ids_column: str | None = None
    """A column of token ids: list<int>."""
    adapter_column: str | None = None
    system: str | None = None
    """Put before the conversation as its system message (a template like ``template``)."""
    chat_template: str = "auto"
    """auto, none, or the path of a template file. auto: messages use the model's template; a
    string becomes one user message if the tokenizer has a template, else it is taken raw."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Handed to the chat template, e.g. {enable_thinking: false}."""
    parse_special_tokens: bool = False
    """false: control tokens such as <|im_end|> inside row text stay text."""
    on_too_long: Literal["error", "truncate_left", "truncate_right"] = "error"
    """What to do with a prompt that leaves no room for an output token."""

    def __post_init__(self) -> None:
        take_types(self)
        sources = ("column", "template", "messages", "token_ids_column")
        given = [name for name in sources if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"give one source of the prompt, not {' and '.join(given)}")
        if self.adapter_column is not None:
            raise ValueError("not yet: prompt.adapter_column is not supported by this version")


@dataclass(frozen=True)
class EngineConfig:
    """How the engine uses its device. Frozen: nothing found at run time is written back.

    Raises:
        TypeError: naming the key, when a value is of another type.
        ValueError: naming the key, when a value is out of range or not supported yet.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "extra": "forbid",
        "use_attribute_docstrings": True,
    }

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the first CUDA device where there is one, else the CPU."""
    block_size: int = 16
    """Tokens per KV block."""
    gpu_memory_utilization: float = 0.9
    """Share of the device's memory for weights, KV pool and activations together."""
    kv_cache_memory: str | int | float | None = None
    """Size of the KV pool, like 40GiB (a bare number is GiB); wins over the utilization."""
    num_kv_blocks: int | None = None
    """Blocks in the KV pool; wins over both sizes."""
    max_num_seqs: int = 1024
    """Most sequences that run at the same time."""
    max_num_batched_tokens: int = 8192
    """Most tokens computed in one step. A CPU takes no more than fit its caches."""
    enable_prefix_caching: bool = True
    """Reuse the blocks of equal prefixes across rows."""
    preemption: Literal["auto", "recompute", "swap"] = "auto"
    """What happens to what a sequence computed when it must give up its blocks: it is computed
    again, it is kept on the host, or (auto) whichever takes less time."""
    swap_space: str | int | float = "4GiB"
    """Host memory for blocks that are given up and needed later; 0 does without. Beside a CPU's
    pool at most a quarter of what is free, unless another size is given."""
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = "auto"
    """auto: the model's own dtype. fp8, the same as fp8_e4m3: one byte a number, with a scale of 1,
    so that a pool has twice the blocks of a 16-bit one."""
    order: Literal["prefix", "input"] = "prefix"
    """The order rows run in; output order is always input order."""
    order_window: int = 65536
    """Rows planned together, in whole parts: by prefix they are reordered within such a window."""
    deterministic: bool = False
    """Bits never depend on what ran beside a row, on any device."""

    def __post_init__(self) -> None:
        take_types(self)
        most = {"block_size": 1024, "max_num_seqs": 2**16, "max_num_batched_tokens": 2**24}
        for name, bound in (most | {"order_window": 2**31 - 1}).items():
            self._require(name, 1 <= getattr(self, name) <= bound, f"1 to {bound}")
        share = self.gpu_memory_utilization
        self._require("gpu_memory_utilization", 0.0 < share <= 1.0, "over 0 and at most 1")
        blocks = self.num_kv_blocks
        self._require("num_kv_blocks", blocks is None or 1 <= blocks < 2**31, "1 to 2**31 - 1")
        if self.kv_cache_memory is not None:
            parse_size(self.kv_cache_memory, "kv_cache_memory")
        self._check_swap()
        if self.deterministic:
            raise ValueError("not yet: engine.deterministic is not supported by this version")

    @property
    def swap_bytes(self) -> int:
        """Host memory that may be taken for blocks; none where nothing would go there."""
        if self.preemption == "recompute" or not self.enable_prefix_caching:
            return 0
        return parse_size(self.swap_space, "swap_space")

    def _check_swap(self) -> None:
        space = parse_size(self.swap_space, "swap_space")
        if self.preemption == "swap" and not self.enable_prefix_caching:
            raise ValueError(
                "preemption: swap finds blocks again as prefixes; set enable_prefix_caching: true "
                "or preemption: recompute"
            )
        if self.preemption == "swap" and space == 0:
            raise ValueError("preemption: swap needs room; set swap_space, or preemption: auto")

    def _require(self, name: str, holds: bool, what: str) -> None:
        if not holds:
            raise ValueError(f"{name} is {_shown(getattr(self, name))}; it must be {what}")


_CPU_STEP_TOKENS = 1024
"""Tokens of a step past which activations leave a CPU's caches: measured 4 to 10 % slower."""


def sized_for(device_type: str, engine: EngineConfig) -> EngineConfig:
    """The settings with steps as large as a kind of device (``cpu`` or ``cuda``) likes them."""
    if device_type != "cpu":
        return engine
    tokens = max(_CPU_STEP_TOKENS, engine.max_num_seqs)
    return replace(engine, max_num_batched_tokens=min(engine.max_num_batched_tokens, tokens))


def _shown(value: object) -> str:
    """A value as a job file writes it, cut to 60 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def field_names(
    record: type[SamplingParams] | type[PromptConfig] | type[EngineConfig],
) -> tuple[str, ...]:
    """Names a user may write for ``record``, in order."""
    return tuple(entry.name for entry in fields(record))
