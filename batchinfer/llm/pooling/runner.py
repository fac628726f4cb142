"""Runs prompts, and turns their hidden states into embeddings or scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from batchinfer.builders.context import EngineContext
from batchinfer.config import ClassifyConfig, EmbedConfig, ModelConfig
from batchinfer.errors import NotYetError, RowError
from batchinfer.llm.pooling.choose_runner import class_name
from batchinfer.llm.pooling.params import PoolingParams, PoolingRequestOutput
from batchinfer.llm.run_requests import OnError, ProgressBar, RequestRunner
from batchinfer.pooling.classifier import Classifier, read_classifier
from batchinfer.pooling.embedding import Embedder, EmbeddingModules, read_embedding_modules
from batchinfer.pooling.framed_prompts import cut_in_frame, frame_of
from batchinfer.requests.requests import PromptRow, pooling_request
from batchinfer.text.prompts import Prompt

Float32 = npt.NDArray[np.float32]
Head = Embedder | Classifier
Output = TypeVar("Output", bound=PoolingRequestOutput[Any])


@dataclass(frozen=True)
class PoolingRequest:
    """A prompt of a call, with its parameters and its adapter."""

    prompt: Prompt | RowError
    params: PoolingParams
    head: Head
    """Turns the prompt's hidden state into values."""
    adapter: int
    name: str


class PoolingRunner:
    """Runs the prompts of pooling calls.

    Args:
        tokens: tokens with which a reranker answers no and yes; None if the model has its own head.
        random_weights: True if the model's weights are random, which makes a stored classification
            head useless.
    """

    def __init__(
        self,
        model: ModelConfig,
        context: EngineContext,
        calls: RequestRunner,
        tokens: tuple[str, ...] | None = None,
        *,
        random_weights: bool = False,
    ) -> None:
        self._model = model
        self._context = context
        self._calls = calls
        self._tokens = tokens
        self._random_weights = random_weights
        self._request_ids = count()
        self._classifier = lru_cache(maxsize=None)(self._read_classifier)

    @cached_property
    def is_classifier(self) -> bool:
        """True if a head scores pairs of texts; False if their score is the similarity of
        embeddings."""
        name = class_name(self._model.name, self._model.revision)
        return self._tokens is not None or name.endswith("ForSequenceClassification")

    @property
    def embedding_size(self) -> int:
        """Number of dimensions of an embedding."""
        return self._modules.width

    def embedder(self, params: PoolingParams) -> Embedder:
        """Return a function that turns a hidden state [H] into an embedding, float32 [D].

        Raises:
            ValueError: the model's pooling needs ``LLM(runner="pooling")``, or ``dimensions`` is
                too large.
        """
        config = EmbedConfig(normalize=params.activates, dimensions=params.dimensions)
        embedder = Embedder(self._modules, config)
        if embedder.reads_whole_texts and self._context.shares_prefixes:
            raise ValueError(
                f"LLM.embed: the model pools by {', '.join(embedder.pooling)}, "
                'which requires LLM(..., runner="pooling")'
            )
        if (params.dimensions or 1) > self.embedding_size:
            raise ValueError(
                f"dimensions is {params.dimensions}, but the model's embeddings "
                f"have only {self.embedding_size}"
            )
        return embedder

    def classifier(self, params: PoolingParams) -> Classifier:
        """Return a function that turns a hidden state [H] into scores of labels, float32 [L].

        Raises:
            ModelError: the model has no classification head.
            NotYetError: the model's weights are random.
            ValueError: ``dimensions`` is given.
        """
        if params.dimensions is not None:
            raise ValueError(
                f"dimensions is {params.dimensions}, but it applies only to "
                "embeddings, not to labels or scores; leave it out"
            )
        if self._random_weights:
            raise NotYetError("LLM(load_format='dummy') for a model that classifies or scores")
        return self._classifier(params.activates is not False)

    def run(
        self,
        items: Sequence[PoolingRequest],
        make_result: Callable[[Float32], Any],
        kind: type[Output],
        on_error: OnError,
        use_tqdm: ProgressBar,
    ) -> list[Output]:
        """Return the output of each prompt.

        Args:
            make_result: turns the values of a head into the output's ``outputs``.

        Raises:
            ValueError: a prompt cannot run, and ``on_error`` is ``raise``. In this case, no prompt
                has run.
        """
        request_ids = [str(next(self._request_ids)) for _ in items]
        requests, outputs = [], dict[int, Output]()
        for at, item in enumerate(items):
            row = self._row(at, item)
            if not isinstance(row.prompt, RowError):
                requests.append(pooling_request(row, item.head.pooling))
            elif on_error == "raise":
                raise ValueError(f"{item.name}: {row.prompt.message}")
            else:
                outputs[at] = kind(request_ids[at], None, [], 0, error=row.prompt)
        with self._calls.completions(requests, len(items), use_tqdm) as (completions, _, bar):
            bar.update(len(outputs))
            for completion in completions:
                at, result, error = completion.request.row_id, None, None
                if completion.error_code is None:
                    assert completion.hidden_state is not None
                    result = make_result(items[at].head(completion.hidden_state))
                else:
                    error = RowError(completion.error_code, completion.error_message or "")
                outputs[at] = kind(
                    request_ids[at],
                    result,
                    completion.request.prompt_token_ids.tolist(),
                    completion.stats.cached_tokens,
                    error=error,
                )
                bar.update()
        return [outputs[at] for at in range(len(items))]

    def _row(self, at: int, item: PoolingRequest) -> PromptRow:
        prompt, most = item.prompt, self.most_tokens(item.params)
        if isinstance(prompt, Prompt) and most is not None and len(prompt.token_ids) > most:
            frame = (0, 0) if prompt.text is None else self._frame
            prompt = cut_in_frame(prompt, most, frame)
        row = PromptRow(at, prompt, adapter=item.adapter)
        if isinstance(prompt, RowError):
            return row
        refusal = self._context.engine.refusal(pooling_request(row))
        return row if refusal is None else PromptRow(at, RowError(*refusal))

    def most_tokens(self, params: PoolingParams) -> int | None:
        """Return the number of tokens to which longer prompts are truncated; None for no limit.

        Raises:
            ValueError: ``truncate_prompt_tokens`` is more than ``max_model_len``.
        """
        most, longest = params.truncate_prompt_tokens, self._context.max_model_len
        if most is not None and most > longest:
            raise ValueError(
                f"truncate_prompt_tokens is {most}; it must be at most "
                f"max_model_len, which is {longest}"
            )
        return longest if most == -1 else most

    @cached_property
    def _frame(self) -> tuple[int, int]:
        return frame_of(self._context.tokenizer)

    @cached_property
    def _modules(self) -> EmbeddingModules:
        return read_embedding_modules(self._model.name, self._model.revision)

    def _read_classifier(self, activates: bool) -> Classifier:
        config = ClassifyConfig(
            query_column=None if self._tokens is None else "query",
            document_column=None if self._tokens is None else "document",
            tokens=self._tokens,
            activation="auto" if activates else "none",
        )
        token_id = self._context.tokenizer.single_token_id
        return read_classifier(self._model.name, self._model.revision, config, token_id)
