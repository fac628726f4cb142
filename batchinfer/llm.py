"""The engine from Python: ``LLM(...).generate(...)``, with the names and meanings of vLLM's."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from batchinfer.build import build_engine
from batchinfer.config import EngineConfig, PromptConfig, SamplingParams
from batchinfer.engine.request import Completion, Request, SampleOutput, TokenLogprobs
from batchinfer.errors import NotYetError, RowError
from batchinfer.job.measures import Measured
from batchinfer.job.row_params import RowSampling
from batchinfer.job.rows import RequestMaker, sample_text
from batchinfer.text.prompts import Prompt, PromptBuilder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PromptLike = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``."""
Conversation = Sequence[Mapping[str, Any]]
"""Messages: ``[{"role": "user", "content": "..."}]``."""


@dataclass(frozen=True)
class BeamSearchParams:
    """How ``LLM.beam_search`` searches."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of a token, its rank (1 = most likely) and its text."""

    logprob: float
    rank: int | None
    decoded_token: str | None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    """``stop``, ``length`` or ``error``."""
    stop_reason: int | str | None
    cumulative_logprob: float
    logprobs: list[dict[int, Logprob]] | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its samples. A prompt that could not be run has none, and an ``error``."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: None
    num_cached_tokens: int
    finished: bool
    outputs: list[CompletionOutput]
    error: RowError | None = None


@dataclass(frozen=True)
class _Model:
    name: str
    revision: str | None
    tokenizer: str | None
    dtype: str
    max_model_len: int | None


class LLM:
    """A model, loaded once and run on as many prompts as are given.

    Args:
        model: hub id or local directory.
        tokenizer: hub id or directory of another tokenizer; default the model's.
        revision: of a model on the hub.
        dtype: ``auto`` (as saved), ``float32``, ``bfloat16`` or ``float16``.
        max_model_len: longest prompt and output together; default what the model allows.
        tensor_parallel_size: accepted for compatibility; must be 1.
        engine_keys: keys of the job file's ``engine`` section, e.g. ``block_size=32``.

    Raises:
        ModelError: the model cannot be loaded or run.
        DeviceError: the device is missing or too small.
        ValueError: an engine key is out of range.
    """

    def __init__(
        self,
        model: str,
        *,
        tokenizer: str | None = None,
        revision: str | None = None,
        dtype: str = "auto",
        max_model_len: int | None = None,
        tensor_parallel_size: int = 1,
        **engine_keys: Any,
    ) -> None:
        if tensor_parallel_size != 1:
            raise NotYetError("tensor_parallel_size over 1")
        self._source = (tokenizer or model, revision)
        self._built = build_engine(
            _Model(model, revision, tokenizer, dtype, max_model_len),
            EngineConfig(**engine_keys),
            log=lambda line: None,
        )
        self._measured = Measured(self._built.block_size)
        self._num_requests = 0

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue prompts. Text is taken raw: no template, special tokens are parsed.

        Args:
            prompts: one or several texts, token id lists, ``{"prompt": ...}`` or
                ``{"prompt_token_ids": ...}``.
            sampling_params: one for all prompts, or one each.
            use_tqdm: show a progress bar.

        Returns:
            An output for each prompt, in order.
        """
        return self._run(
            [self._prompt(item) for item in _items(prompts)], sampling_params, use_tqdm
        )

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer conversations, written out by the model's chat template.

        A conversation that ends with the assistant's words is continued there.
        """
        one = bool(conversations) and isinstance(conversations[0], Mapping)
        builder = PromptBuilder(
            PromptConfig(column="messages", chat_template_kwargs=chat_template_kwargs or {}),
            self._built.tokenizer,
            max_model_len=self._built.max_model_len,
            columns=["messages"],
            conversation_columns=["messages"],
            vocab_size=self._built.vocab_size,
        )
        rows = [{"messages": item} for item in ([conversations] if one else conversations)]
        return self._run(builder.build(rows), sampling_params, use_tqdm)

    def beam_search(self, prompts: Sequence[PromptLike], params: BeamSearchParams) -> None:
        """Refused: not yet built."""
        raise NotYetError("LLM.beam_search")

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, as transformers loads it."""
        from transformers import AutoTokenizer

        name, revision = self._source
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, revision=revision)
        return tokenizer

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._built.vocab_size

    def stats(self) -> dict[str, dict[str, float]]:
        """``tokens``, ``throughput`` and ``kv`` of all calls so far, as in ``summary.json``."""
        measures, built = self._measured.measures(), self._built
        pool = {
            "block_size": built.block_size,
            "num_blocks": built.num_blocks,
            "bytes_per_block": built.bytes_per_block,
        }
        return {**measures, "kv": {**pool, **measures["kv"]}}

    def reset_stats(self) -> None:
        """Begin ``stats`` anew."""
        self._measured = Measured(self._built.block_size)

    def _prompt(self, item: PromptLike) -> Prompt | RowError:
        tokenizer = self._built.tokenizer
        if isinstance(item, Mapping):
            item = item["prompt_token_ids"] if "prompt_token_ids" in item else item["prompt"]
        if isinstance(item, str):
            (token_ids,) = tokenizer.encode_batch(
                [item], add_special_tokens=True, parse_special_tokens=True
            )
            return Prompt(token_ids, item, truncated=False, has_control_text=False)
        token_ids = np.asarray(item, dtype=np.int32)
        if token_ids.size and not 0 <= token_ids.min() <= token_ids.max() < self._built.vocab_size:
            return RowError("unsupported_content", "a token id is outside the vocabulary")
        return Prompt(token_ids, None, truncated=False, has_control_text=False)

    def _run(
        self,
        prompts: list[Prompt | RowError],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = _params_of_each(sampling_params, len(prompts))
        fresh_seed = secrets.randbits(64)
        maker = RequestMaker(self._built.tokenizer, self._built.eos_token_ids)
        requests: list[Request] = []
        outputs: dict[int, RequestOutput] = {}
        for one in params:
            one.check_token_ids(self.vocab_size)
        for at, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            if isinstance(prompt, RowError):
                outputs[at] = _failed(self._request_id(at), None, [], prompt)
            else:
                own_seed = one.seed is not None
                sampling = RowSampling(one if own_seed else replace(one, seed=fresh_seed), own_seed)
                requests.append(maker.make(at, prompt, sampling))
        with tqdm(total=len(prompts), disable=not use_tqdm, unit="prompt") as bar:
            bar.update(len(outputs))
            for completion in self._completions(requests):
                at = completion.request.row_id
                prompt = prompts[at]
                assert isinstance(prompt, Prompt)
                outputs[at] = self._output(completion, prompt)
                bar.update()
        self._num_requests += len(prompts)
        return [outputs[at] for at in range(len(prompts))]

    def _completions(self, requests: list[Request]) -> Iterator[Completion]:
        """Run requests to their ends; interrupted, the engine forgets the rest."""
        engine, began = self._built.engine, time.perf_counter()
        try:
            for request in requests:
                engine.add_request(request)
            while engine.num_unfinished:
                outcome = engine.step()
                self._measured.add(outcome.stats, [c.stats for c in outcome.completions])
                yield from outcome.completions
        finally:
            engine.abort_all()
            self._measured.seconds += time.perf_counter() - began

    def _request_id(self, at: int) -> str:
        return str(self._num_requests + at)

    def _output(self, completion: Completion, prompt: Prompt) -> RequestOutput:
        request = completion.request
        output = RequestOutput(
            request_id=self._request_id(request.row_id),
            prompt=prompt.text,
            prompt_token_ids=request.prompt_token_ids.tolist(),
            prompt_logprobs=None,
            num_cached_tokens=completion.stats.cached_tokens,
            finished=True,
            outputs=[self._sample(sample, request.params) for sample in completion.outputs],
        )
        if completion.error_code is None:
            return output
        return replace(
            output, error=RowError(completion.error_code, completion.error_message or "")
        )

    def _sample(self, sample: SampleOutput, params: SamplingParams) -> CompletionOutput:
        return CompletionOutput(
            index=sample.index,
            text=sample_text(self._built.tokenizer, sample, params),
            token_ids=sample.token_ids.tolist(),
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
            cumulative_logprob=sample.cumulative_logprob,
            logprobs=None
            if sample.logprobs is None
            else [self._logprobs(token) for token in sample.logprobs],
        )

    def _logprobs(self, token: TokenLogprobs) -> dict[int, Logprob]:
        """The alternatives, best first, and the token itself, by token id."""
        entries = {
            token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(token.top, start=1)
        }
        entries.setdefault(token.token_id, (token.logprob, token.rank))
        decode = self._built.tokenizer.decode
        return {
            token_id: Logprob(logprob, rank, decode([token_id], skip_special_tokens=False))
            for token_id, (logprob, rank) in entries.items()
        }


def _items(prompts: PromptLike | Sequence[PromptLike]) -> list[PromptLike]:
    """Several prompts as a list, one as a list of one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if len(prompts) and isinstance(prompts[0], int | np.integer):
        return [prompts]  # type: ignore[list-item]  # the token ids of one prompt
    return list(prompts)  # type: ignore[arg-type]


def _params_of_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ValueError(f"{count} prompts, but {len(params)} sampling params")
    return list(params)


def _failed(
    request_id: str, prompt: str | None, token_ids: list[int], error: RowError
) -> RequestOutput:
    return RequestOutput(request_id, prompt, token_ids, None, 0, True, [], error)
