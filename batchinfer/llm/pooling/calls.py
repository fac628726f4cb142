"""The calls of an ``LLM`` that draw no tokens: vectors, labels and scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from batchinfer.builders.context import EngineContext
from batchinfer.config import PromptConfig
from batchinfer.errors import NotYetError, RowError
from batchinfer.llm.calls import OneCall
from batchinfer.llm.compatibility import settle
from batchinfer.llm.lora import Adapters, LoRARequest
from batchinfer.llm.pooling.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from batchinfer.llm.pooling.params import PoolingParams, params_of_all, params_of_each
from batchinfer.llm.pooling.runner import Made, PoolingRunner
from batchinfer.llm.prompts import PromptLike, checked_text, kind_of, listed, read_prompts
from batchinfer.llm.run import OnError, ProgressBar
from batchinfer.pooling.classifier import Classifier
from batchinfer.pooling.embedding import Embedder
from batchinfer.text.pairs.joined import PairBuilder
from batchinfer.text.processes.pool import TextProcesses
from batchinfer.text.prompts import Prompt

Float32 = npt.NDArray[np.float32]
AdapterNames = str | Sequence[str | None] | None
Requests = LoRARequest | Sequence[LoRARequest | None] | None
ParamsOfEach = PoolingParams | Sequence[PoolingParams] | None
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
        pooling_params: ParamsOfEach = None,
        adapter: AdapterNames = None,
        lora_request: Requests = None,
        use_tqdm: ProgressBar = True,
        errors: OnError = "raise",
        **others: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Make a vector of each prompt, from the hidden states of its tokens.

        Args:
            prompts: as of ``generate``; texts are taken raw.
            pooling_params: ``dimensions`` cuts vectors, ``normalize=False`` keeps their length;
                they have length 1 without it. For all prompts, or a list of one for each.
            others: as of ``generate``.

        Returns:
            An output for each prompt, in order; its ``outputs.embedding`` is a list of floats.

        Raises:
            TypeError, ValueError, RuntimeError: as ``generate``; ``dimensions`` are too many.
            NotYetError: an argument is not built yet.
        """
        _check("embed", others, errors)

        def make(params: PoolingParams) -> Made[EmbeddingOutput]:
            embed = self._pooling.embedder(params)

            def vector(hidden_state: Float32) -> EmbeddingOutput:
                return EmbeddingOutput(embed(hidden_state).tolist())

            return Made(params, embed.pooling, vector)

        how = ("embed", pooling_params, adapter, lora_request, errors, use_tqdm)
        return list(map(EmbeddingRequestOutput.of, self._pool(prompts, make, *how)))

    def classify(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        *,
        pooling_params: ParamsOfEach = None,
        adapter: AdapterNames = None,
        lora_request: Requests = None,
        use_tqdm: ProgressBar = True,
        errors: OnError = "raise",
        **others: Any,
    ) -> list[ClassificationRequestOutput]:
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
        _check("classify", others, errors)

        def make(params: PoolingParams) -> Made[ClassificationOutput]:
            classifier = self._pooling.classifier(params)

            def probs(hidden_state: Float32) -> ClassificationOutput:
                return ClassificationOutput(classifier(hidden_state).tolist())

            return Made(params, classifier.pooling, probs)

        how = ("classify", pooling_params, adapter, lora_request, errors, use_tqdm)
        return list(map(ClassificationRequestOutput.of, self._pool(prompts, make, *how)))

    def encode(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        pooling_params: ParamsOfEach = None,
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
        if not isinstance(task, str) or task not in make_of:
            raise NotYetError(f"LLM.encode(pooling_task={task!r})")
        _check("encode", others, errors)

        def make(params: PoolingParams) -> Made[PoolingOutput]:
            head = make_of[task](params)

            def tensor(hidden_state: Float32) -> PoolingOutput:
                return PoolingOutput(torch.from_numpy(head(hidden_state)))

            return Made(params, head.pooling, tensor)

        how = ("encode", pooling_params, adapter, lora_request, errors, use_tqdm)
        return self._pool(prompts, make, *how)

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
    ) -> list[ScoringRequestOutput]:
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
        _check("score", others, errors)
        params = params_of_all(pooling_params)
        pairs = _pairs(data_1, data_2)
        if not self._has_tokenizer:
            raise ValueError("LLM.score needs a tokenizer; leave skip_tokenizer_init out")
        how = (params, adapter, lora_request, errors, use_tqdm)
        by_head = self._pooling.is_classifier
        found = (self._scored_by_head if by_head else self._scored_by_cosine)(pairs, *how)
        return list(map(ScoringRequestOutput.of, found))

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
            makes = Made(params, classifier.pooling, result)
            return self._run(made, [makes] * len(made), None, *how)

    def _scored_by_cosine(
        self, pairs: list[tuple[str, str]], params: PoolingParams, *how: Any
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        params = replace(params, use_activation=True)
        embed = self._pooling.embedder(params)
        names: dict[str, str] = {}  # of each text once
        for data, side in zip(("data_1", "data_2"), zip(*pairs, strict=True), strict=False):
            for at, text in enumerate(side):
                names.setdefault(text, f"{data}: {at}")
        texts = list(names)
        with self._one_call("score"):
            made = [Made(params, embed.pooling, embed)] * len(texts)
            found = self._run(self._prompts(texts), made, list(names.values()), *how)
        by_text = dict(zip(texts, found, strict=True))
        return [_cosine(by_text[one], by_text[other]) for one, other in pairs]

    def _pool(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        make: Callable[[PoolingParams], Made[_Result]],
        name: str,
        pooling_params: ParamsOfEach,
        *how: Any,
    ) -> list[PoolingRequestOutput[_Result]]:
        with self._one_call(name):
            size = self._context.vocab_size
            read = read_prompts(prompts, size, has_tokenizer=self._has_tokenizer)
            params = params_of_each(pooling_params, len(read))
            made = {one: make(one) for one in dict.fromkeys(params)}
            return self._run(self._prompts(read), [made[one] for one in params], None, *how)

    def _run(
        self,
        prompts: Sequence[Prompt | RowError],
        made: Sequence[Made[_Result]],
        names: Sequence[str] | None,
        adapter: AdapterNames,
        lora_request: Requests,
        errors: OnError,
        use_tqdm: ProgressBar,
    ) -> list[PoolingRequestOutput[_Result]]:
        numbers = self._adapters.of_each(adapter, lora_request, len(prompts))
        return self._pooling.run(prompts, numbers, made, errors, use_tqdm, names)


def _check(call: str, others: Mapping[str, Any], errors: object) -> None:
    """Refuse arguments of a call that are vLLM's and not built, or nobody's."""
    settle(f"LLM.{call}", others, _KNOWN, stacklevel=4)
    if errors not in ("raise", "return"):
        raise ValueError(f"errors is {errors!r}; it must be 'raise' or 'return'")


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
