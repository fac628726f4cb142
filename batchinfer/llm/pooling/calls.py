"""The calls of an ``LLM`` that draw no tokens: vectors, labels and scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from batchinfer.build import EngineContext
from batchinfer.config import PromptConfig
from batchinfer.errors import NotYetError, RowError
from batchinfer.llm.calls import OneCall
from batchinfer.llm.compatibility import settle
from batchinfer.llm.lora import Adapters, LoRARequest
from batchinfer.llm.pooling.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
)
from batchinfer.llm.pooling.params import PoolingParams
from batchinfer.llm.pooling.runner import PoolingRunner
from batchinfer.llm.prompts import PromptLike, checked_text, kind_of, listed, read_prompts
from batchinfer.llm.run import OnError, ProgressBar
from batchinfer.pooling.classifier import Classifier
from batchinfer.pooling.embedding import Embedder
from batchinfer.text.children.pool import TextProcesses
from batchinfer.text.pairs.joined import PairBuilder
from batchinfer.text.prompts import Prompt

Float32 = npt.NDArray[np.float32]
AdapterNames = str | Sequence[str | None] | None
Requests = LoRARequest | Sequence[LoRARequest | None] | None
_Result = TypeVar("_Result")

_KNOWN = ("prompts", "pooling_params", "adapter", "lora_request", "use_tqdm", "errors")
_ANY_LENGTH = 2**31
_PAIR = ("query", "document")


class PoolingCalls:
    """``embed``, ``classify``, ``score`` and ``encode`` of an ``LLM``."""

    _context: EngineContext
    _one_call: OneCall
    _pooling: PoolingRunner
    _processes: TextProcesses
    _has_tokenizer: bool
    _adapters: Adapters
    _prompts: Callable[[Sequence[str | Prompt]], list[Prompt | RowError]]

    def embed(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        *,
        pooling_params: PoolingParams | None = None,
        adapter: AdapterNames = None,
        lora_request: Requests = None,
        use_tqdm: ProgressBar = True,
        errors: OnError = "raise",
        **others: Any,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """Make a vector of each prompt, from the hidden states of its tokens.

        Args:
            prompts: as of ``generate``; texts are taken raw.
            pooling_params: ``dimensions`` cuts vectors, ``normalize=False`` keeps their length;
                they have length 1 without it.
            others: as of ``generate``.

        Returns:
            An output for each prompt, in order; its ``outputs.embedding`` is a list of floats.

        Raises:
            TypeError, ValueError, RuntimeError: as ``generate``; ``dimensions`` are too many.
            NotYetError: an argument is not built yet.
        """
        params = _checked("embed", others, pooling_params, errors)
        embed = self._pooling.embedder(params)

        def result(hidden_state: Float32) -> EmbeddingOutput:
            return EmbeddingOutput(embed(hidden_state).tolist())

        how = ("embed", params, embed.pooling, adapter, lora_request, errors, use_tqdm)
        return self._pool(prompts, result, *how)

    def classify(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        *,
        pooling_params: PoolingParams | None = None,
        adapter: AdapterNames = None,
        lora_request: Requests = None,
        use_tqdm: ProgressBar = True,
        errors: OnError = "raise",
        **others: Any,
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """Classify prompts, by a model whose head does that (``...ForSequenceClassification``).

        Args:
            pooling_params: ``activation=False`` gives logits.
            others: as of ``embed``.

        Returns:
            An output for each prompt, in order; its ``outputs.probs`` has a score for each label.

        Raises:
            TypeError, ValueError, RuntimeError, NotYetError: as ``embed``.
            ModelError: the model has no such head.
        """
        params = _checked("classify", others, pooling_params, errors)
        classifier = self._pooling.classifier(params)

        def result(hidden_state: Float32) -> ClassificationOutput:
            return ClassificationOutput(classifier(hidden_state).tolist())

        how = ("classify", params, classifier.pooling, adapter, lora_request, errors, use_tqdm)
        return self._pool(prompts, result, *how)

    def encode(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        pooling_params: PoolingParams | None = None,
        *,
        pooling_task: str | None = None,
        adapter: AdapterNames = None,
        lora_request: Requests = None,
        use_tqdm: ProgressBar = True,
        errors: OnError = "raise",
        **others: Any,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """``embed`` or ``classify``, with tensors.

        Args:
            pooling_task: ``embed`` or ``classify``; default what the model has a head for.
            others: as of ``embed``.

        Returns:
            An output for each prompt, in order; its ``outputs.data`` is a float32 tensor.

        Raises:
            TypeError, ValueError, RuntimeError, NotYetError, ModelError: as those.
        """
        import torch

        task = pooling_task or ("classify" if self._pooling.is_classifier else "embed")
        make_of: dict[str, Callable[[PoolingParams], Embedder | Classifier]] = {
            "embed": self._pooling.embedder,
            "classify": self._pooling.classifier,
        }
        if task not in make_of:
            raise NotYetError(f"LLM.encode(pooling_task={task!r})")
        make = make_of[task](_checked("encode", others, pooling_params, errors))

        def result(hidden_state: Float32) -> PoolingOutput:
            return PoolingOutput(torch.from_numpy(make(hidden_state)))

        params = pooling_params or PoolingParams()
        how = ("encode", params, make.pooling, adapter, lora_request, errors, use_tqdm)
        return self._pool(prompts, result, *how)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        pooling_params: PoolingParams | None = None,
        adapter: AdapterNames = None,
        lora_request: Requests = None,
        use_tqdm: ProgressBar = True,
        errors: OnError = "raise",
        **others: Any,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """Say how well texts go together: one with each of several, or each with its own.

        A model with a head of one label takes both texts joined by its tokenizer; of others the
        score is the cosine of the texts' vectors.

        Args:
            data_1: a text, or as many as ``data_2`` has.
            data_2: a text or several.
            others: as of ``embed``; an adapter is one for all.

        Returns:
            An output for each pair, in order; its ``outputs.score`` is a float.

        Raises:
            TypeError, ValueError, RuntimeError, NotYetError, ModelError: as ``classify``.
        """
        params = _checked("score", others, pooling_params, errors)
        pairs = _pairs(data_1, data_2)
        if not self._has_tokenizer:
            raise ValueError("LLM.score needs a tokenizer; leave skip_tokenizer_init out")
        how = (params, adapter, lora_request, errors, use_tqdm)
        if self._pooling.is_classifier:
            return self._scored_by_head(pairs, *how)
        return self._scored_by_cosine(pairs, *how)

    def _scored_by_head(
        self, pairs: list[tuple[str, str]], params: PoolingParams, *how: Any
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        classifier = self._pooling.classifier(params)
        if len(classifier.labels) != 1:
            raise ValueError(
                f"LLM.score needs a model with one label; this one has {len(classifier.labels)}: "
                "call LLM.classify"
            )

        def result(hidden_state: Float32) -> ScoringOutput:
            return ScoringOutput(float(classifier(hidden_state)[0]))

        most = self._pooling.most_tokens(params)
        recipe = partial(
            PairBuilder,
            PromptConfig(parse_special_tokens=True, on_too_long="truncate_right"),
            pair_columns=_PAIR,
            max_model_len=_ANY_LENGTH if most is None else most,
            columns=_PAIR,
            leaves_room=False,
        )
        with self._one_call("score"):
            rows = [dict(zip(_PAIR, pair, strict=True)) for pair in pairs]
            made = list(map(_as_given, self._processes.prompts(recipe).build(rows)))
            return self._run(made, result, params, classifier.pooling, *how)

    def _scored_by_cosine(
        self, pairs: list[tuple[str, str]], params: PoolingParams, *how: Any
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        params = replace(params, use_activation=True)
        embed = self._pooling.embedder(params)
        names: dict[str, str] = {}  # of each text once
        for data, texts in zip(("data_1", "data_2"), zip(*pairs, strict=True), strict=False):
            for at, text in enumerate(texts):
                names.setdefault(text, f"{data}: {at}")
        texts = list(names)
        with self._one_call("score"):
            prompts, called = self._prompts(texts), list(names.values())
            found = self._run(prompts, embed, params, embed.pooling, *how, names=called)
        by_text = dict(zip(texts, found, strict=True))
        return [_cosine(by_text[one], by_text[other]) for one, other in pairs]

    def _pool(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        result: Callable[[Float32], _Result],
        name: str,
        *how: Any,
    ) -> list[PoolingRequestOutput[_Result]]:
        with self._one_call(name):
            size = self._context.vocab_size
            read = read_prompts(prompts, size, has_tokenizer=self._has_tokenizer)
            return self._run(self._prompts(read), result, *how)

    def _run(
        self,
        prompts: Sequence[Prompt | RowError],
        result: Callable[[Float32], _Result],
        params: PoolingParams,
        pooling: tuple[str, ...],
        adapter: AdapterNames,
        lora_request: Requests,
        errors: OnError,
        use_tqdm: ProgressBar,
        names: Sequence[str] | None = None,
    ) -> list[PoolingRequestOutput[_Result]]:
        numbers = self._adapters.of_each(adapter, lora_request, len(prompts))
        return self._pooling.run(prompts, numbers, params, pooling, result, errors, use_tqdm, names)


def _checked(
    call: str, others: Mapping[str, Any], params: PoolingParams | None, errors: object
) -> PoolingParams:
    """The parameters of a call whose other arguments are those of vLLM, or refused."""
    settle(f"LLM.{call}", others, _KNOWN, stacklevel=4)
    if errors not in ("raise", "return"):
        raise ValueError(f"errors is {errors!r}; it must be 'raise' or 'return'")
    if params is None:
        return PoolingParams()
    if not isinstance(params, PoolingParams):
        raise TypeError(f"pooling_params is {kind_of(params)}; give PoolingParams(...)")
    return params


def _pairs(data_1: str | Sequence[str], data_2: str | Sequence[str]) -> list[tuple[str, str]]:
    several = [
        [given] if isinstance(given, str) else listed(given, name, "a text, or a list of texts")
        for name, given in (("data_1", data_1), ("data_2", data_2))
    ]
    ones, others = (
        [_text(text, f"{name}: {at}") for at, text in enumerate(texts)]
        for name, texts in zip(("data_1", "data_2"), several, strict=True)
    )
    if len(ones) == 1:
        ones = ones * len(others)
    if len(ones) != len(others):
        raise ValueError(
            f"data_1 has {len(ones)} texts and data_2 {len(others)}; give one, or as many"
        )
    return list(zip(ones, others, strict=True))


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} is {kind_of(value)}; give a text")
    return checked_text(value, name)


def _as_given(prompt: Prompt | RowError) -> Prompt | RowError:
    """A pair's prompt, or its error in words of ``score``: there are no columns."""
    if not isinstance(prompt, RowError):
        return prompt
    message = prompt.message
    for column, name in zip(_PAIR, ("data_1", "data_2"), strict=True):
        message = message.replace(f"column {column}", f"its text of {name}")
    return RowError(prompt.code, message)


def _cosine(
    one: PoolingRequestOutput[Float32], other: PoolingRequestOutput[Float32]
) -> PoolingRequestOutput[ScoringOutput]:
    score = None
    if one.outputs is not None and other.outputs is not None:
        score = ScoringOutput(float(one.outputs.astype(np.float64) @ other.outputs))
    return PoolingRequestOutput(
        other.request_id,
        score,
        one.prompt_token_ids + other.prompt_token_ids,
        one.num_cached_tokens + other.num_cached_tokens,
        error=one.error or other.error,
    )
