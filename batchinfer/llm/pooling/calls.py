"""The calls of an ``LLM`` for embeddings, labels and scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from batchinfer.builders.context import EngineContext
from batchinfer.config import PromptConfig
from batchinfer.errors import NotYetError, RowError
from batchinfer.llm.compatibility import settle
from batchinfer.llm.generation import check_errors
from batchinfer.llm.lora import AdapterNames, Adapters, LoRARequests
from batchinfer.llm.pooling.params import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from batchinfer.llm.pooling.runner import Float32, Head, Output, PoolingRequest, PoolingRunner
from batchinfer.llm.prompts import PromptLike, checked_text, kind_of, listed, one_for_each
from batchinfer.llm.run_requests import OnError, ProgressBar, RequestRunner
from batchinfer.text.processes.pool import TextProcesses
from batchinfer.text.prompts import ANY_LENGTH, Prompt
from batchinfer.text.reranker_prompts import PairPromptBuilder

ParamsOfEach = PoolingParams | Sequence[PoolingParams] | None

_KNOWN = ("prompts", "pooling_params", "adapter", "lora_request", "use_tqdm", "errors")
_DATA = ("data_1", "data_2")
_PARAMS = "PoolingParams(...)"


@dataclass(frozen=True)
class _Options:
    adapter: AdapterNames
    lora_request: LoRARequests
    errors: OnError
    use_tqdm: ProgressBar


class PoolingCalls:
    """Pooling calls; the subclass ``LLM`` sets the attributes."""

    _adapters: Adapters
    _calls: RequestRunner
    _context: EngineContext
    _has_tokenizer: bool
    _pooling: PoolingRunner
    _processes: TextProcesses
    _read_prompts: Callable[..., list[Prompt | RowError]]
    _tokenized: Callable[..., list[Prompt | RowError]]

    def embed(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        *,
        pooling_params: ParamsOfEach = None,
        adapter: AdapterNames = None,
        lora_request: LoRARequests = None,
        use_tqdm: ProgressBar = True,
        errors: OnError = "raise",
        **others: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Compute embeddings of prompts from the hidden states of their tokens.

        Args:
            prompts: see ``generate``; texts are used as they are.
            pooling_params: one object for all prompts, or a list with one per prompt.
                ``dimensions`` truncates embeddings to that many numbers. With ``normalize=False``,
                embeddings are not scaled to unit norm.
            others: see ``generate``.

        Returns:
            An output for each prompt, in order; its ``outputs.embedding`` is a list of floats.

        Raises:
            TypeError, ValueError, RuntimeError: see ``generate``; too many ``dimensions`` also
                raise ValueError.
            NotYetError: an argument is not supported yet.
        """
        _check("embed", others, errors)

        return self._pool(
            *("embed", prompts, pooling_params, self._pooling.embedder),
            lambda embedding: EmbeddingOutput(embedding.tolist()),
            EmbeddingRequestOutput,
            _Options(adapter, lora_request, errors, use_tqdm),
        )

    def classify(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        *,
        pooling_params: ParamsOfEach = None,
        adapter: AdapterNames = None,
        lora_request: LoRARequests = None,
        use_tqdm: ProgressBar = True,
        errors: OnError = "raise",
        **others: Any,
    ) -> list[ClassificationRequestOutput]:
        """Classify prompts; the model must have a classification head
        (``...ForSequenceClassification``).

        Args:
            pooling_params: ``activation=False`` returns logits.
            others: see ``embed``.

        Returns:
            An output for each prompt, in order; its ``outputs.probs`` has a score for each label.

        Raises:
            TypeError, ValueError, RuntimeError, NotYetError: see ``embed``.
            ModelError: the model has no classification head.
        """
        _check("classify", others, errors)

        return self._pool(
            *("classify", prompts, pooling_params, self._pooling.classifier),
            lambda scores: ClassificationOutput(scores.tolist()),
            ClassificationRequestOutput,
            _Options(adapter, lora_request, errors, use_tqdm),
        )

    def encode(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        pooling_params: ParamsOfEach = None,
        *,
        pooling_task: str | None = None,
        adapter: AdapterNames = None,
        lora_request: LoRARequests = None,
        use_tqdm: ProgressBar = True,
        errors: OnError = "raise",
        **others: Any,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Run ``embed`` or ``classify``, and return tensors.

        Args:
            pooling_task: ``embed`` or ``classify``; default: ``classify`` if the model has a
                classification head.
            others: see ``embed``.

        Returns:
            An output for each prompt, in order; its ``outputs.data`` is a float32 tensor.

        Raises:
            TypeError, ValueError, RuntimeError, NotYetError, ModelError: see ``embed`` and
                ``classify``.
        """
        import torch

        task = pooling_task or ("classify" if self._pooling.is_classifier else "embed")
        heads: dict[str, Callable[[PoolingParams], Head]] = {
            "embed": self._pooling.embedder,
            "classify": self._pooling.classifier,
        }
        if not isinstance(task, str) or task not in heads:
            raise NotYetError(f"LLM.encode(pooling_task={task!r})")
        _check("encode", others, errors)
        kind: type[PoolingRequestOutput[PoolingOutput]] = PoolingRequestOutput
        return self._pool(
            *("encode", prompts, pooling_params, heads[task]),
            lambda values: PoolingOutput(torch.from_numpy(values)),
            kind,
            _Options(adapter, lora_request, errors, use_tqdm),
        )

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        pooling_params: PoolingParams | None = None,
        adapter: AdapterNames = None,
        lora_request: LoRARequests = None,
        use_tqdm: ProgressBar = True,
        errors: OnError = "raise",
        **others: Any,
    ) -> list[ScoringRequestOutput]:
        """Score the similarity of one text to several texts, or of pairs of texts.

        If the model is a classifier with one label, its head scores the two texts of a pair
        together. With other models, the score is the cosine similarity of the texts' embeddings.

        Args:
            data_1: one text, or the same number of texts as ``data_2``.
            data_2: one or several texts.
            others: see ``embed``; one adapter applies to all texts.

        Returns:
            An output for each pair, in order; its ``outputs.score`` is a float.

        Raises:
            TypeError, ValueError, RuntimeError, NotYetError, ModelError: see ``classify``.
        """
        _check("score", others, errors)
        if not isinstance(pooling_params, PoolingParams | None):
            raise TypeError(
                f"pooling_params is {kind_of(pooling_params)}; give one {_PARAMS} for all pairs"
            )
        pairs = _pairs(data_1, data_2)
        if not self._has_tokenizer:
            raise ValueError("LLM.score needs a tokenizer; leave out skip_tokenizer_init")
        options = _Options(adapter, lora_request, errors, use_tqdm)
        score = self._score_by_head if self._pooling.is_classifier else self._score_by_cosine
        return score(pairs, pooling_params or PoolingParams(), options)

    def _score_by_head(
        self, pairs: list[tuple[str, str]], params: PoolingParams, options: _Options
    ) -> list[ScoringRequestOutput]:
        head = self._pooling.classifier(params)
        if len(head.labels) != 1:
            raise ValueError(
                "LLM.score needs a model with one label, but this model has "
                f"{len(head.labels)}; call LLM.classify instead"
            )

        most = self._pooling.most_tokens(params)
        recipe = partial(
            PairPromptBuilder,
            PromptConfig(parse_special_tokens=True, on_too_long="truncate_right"),
            pair_columns=_DATA,
            max_model_len=ANY_LENGTH if most is None else most,
            columns=_DATA,
        )
        with self._calls.one_call("score"):
            rows = [dict(zip(_DATA, pair, strict=True)) for pair in pairs]
            # Name the argument in errors, because the texts of this call do not come from columns.
            prompts = [
                RowError(one.code, one.message.replace("column data", "the text of data"))
                if isinstance(one, RowError)
                else one
                for one in self._processes.prompts(recipe).build(rows)
            ]
            each = [(params, head)] * len(prompts)
            return self._run(
                *(prompts, each, lambda scores: ScoringOutput(float(scores[0]))),
                *(ScoringRequestOutput, options),
            )

    def _score_by_cosine(
        self, pairs: list[tuple[str, str]], params: PoolingParams, options: _Options
    ) -> list[ScoringRequestOutput]:
        params = replace(params, use_activation=True)
        head = self._pooling.embedder(params)
        names: dict[str, str] = {}  # equal texts share an entry, so each is embedded once
        for data, side in zip(_DATA, zip(*pairs, strict=True), strict=False):
            for at, text in enumerate(side):
                names.setdefault(text, f"{data}: {at}")
        texts = list(names)
        with self._calls.one_call("score"):
            found: list[PoolingRequestOutput[Float32]] = self._run(
                self._tokenized(texts),
                [(params, head)] * len(texts),
                lambda embedding: embedding,
                PoolingRequestOutput,
                options,
                list(names.values()),
            )
        by_text = dict(zip(texts, found, strict=True))
        return [_cosine(by_text[one], by_text[other]) for one, other in pairs]

    def _pool(
        self,
        call: str,
        prompts: PromptLike | Sequence[PromptLike],
        params: ParamsOfEach,
        make_head: Callable[[PoolingParams], Head],
        make_result: Callable[[Float32], Any],
        kind: type[Output],
        options: _Options,
    ) -> list[Output]:
        with self._calls.one_call(call):
            read = self._read_prompts(prompts)
            if any(isinstance(prompt, Prompt) and prompt.images for prompt in read):
                raise NotYetError(f"LLM.{call} with images")
            if any(isinstance(prompt, Prompt) and prompt.embeds is not None for prompt in read):
                raise NotYetError(f"LLM.{call} with prompt_embeds")
            single_or_list = PoolingParams() if params is None else params
            names = ("pooling_params", _PARAMS, len(read), "pooling params")
            each: list[PoolingParams] = one_for_each(single_or_list, PoolingParams, *names)
            heads = {one: make_head(one) for one in dict.fromkeys(each)}
            made = [(one, heads[one]) for one in each]
            return self._run(read, made, make_result, kind, options)

    def _run(
        self,
        prompts: Sequence[Prompt | RowError],
        made: Sequence[tuple[PoolingParams, Head]],
        make_result: Callable[[Float32], Any],
        kind: type[Output],
        options: _Options,
        names: Sequence[str] | None = None,
    ) -> list[Output]:
        numbers = self._adapters.numbers(options.adapter, options.lora_request, len(prompts))
        items = [
            PoolingRequest(prompt, *each, number, names[at] if names else f"prompt {at}")
            for at, (prompt, each, number) in enumerate(zip(prompts, made, numbers, strict=True))
        ]
        return self._pooling.run(items, make_result, kind, options.errors, options.use_tqdm)


def _check(call: str, others: Mapping[str, Any], errors: object) -> None:
    settle(f"LLM.{call}", others, _KNOWN, stacklevel=4)
    check_errors(errors)


def _pairs(data_1: str | Sequence[str], data_2: str | Sequence[str]) -> list[tuple[str, str]]:
    left, right = (
        [
            _text(text, f"{name}: {at}")
            for at, text in enumerate(
                [data]
                if isinstance(data, str)
                else listed(data, name, "a string or a list of strings")
            )
        ]
        for name, data in zip(_DATA, (data_1, data_2), strict=True)
    )
    if len(left) == 1:
        left = left * len(right)
    if len(left) != len(right):
        raise ValueError(
            f"data_1 has {len(left)} texts and data_2 has {len(right)}; give one "
            "text as data_1, or as many texts as in data_2"
        )
    return list(zip(left, right, strict=True))


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} is {kind_of(value)}; give a string")
    return checked_text(value, name)


def _cosine(
    one: PoolingRequestOutput[Float32], other: PoolingRequestOutput[Float32]
) -> ScoringRequestOutput:
    score = None
    if one.outputs is not None and other.outputs is not None:
        score = ScoringOutput(float(one.outputs.astype(np.float64) @ other.outputs))
    return ScoringRequestOutput(
        other.request_id,
        score,
        one.prompt_token_ids + other.prompt_token_ids,
        one.num_cached_tokens + other.num_cached_tokens,
        error=one.error or other.error,
    )
