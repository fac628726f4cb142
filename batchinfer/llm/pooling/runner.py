"""A call's prompts to hidden states, and these to results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from batchinfer.builders.context import EngineContext
from batchinfer.config import ClassifyConfig, EmbedConfig, ModelConfig
from batchinfer.console.meter import Meter
from batchinfer.engine.request import Completion
from batchinfer.errors import NotYetError, RowError
from batchinfer.llm.calls import Calls
from batchinfer.llm.pooling.choose import class_name
from batchinfer.llm.pooling.outputs import PoolingRequestOutput
from batchinfer.llm.pooling.params import PoolingParams
from batchinfer.llm.run import OnError, ProgressBar, progress
from batchinfer.pooling.classifier import Classifier, read_classifier
from batchinfer.pooling.embedding import Embedder
from batchinfer.pooling.embedding_modules import EmbeddingModules, read_embedding_modules
from batchinfer.pooling.framed_prompts import cut_in_frame, frame_of
from batchinfer.process.process import gc_frozen
from batchinfer.requests.requests import PromptRow, pooling_request
from batchinfer.text.prompts import Prompt

Float32 = npt.NDArray[np.float32]
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Made(Generic[_Result]):
    """What a call makes of a prompt, by its parameters."""

    params: PoolingParams
    pooling: tuple[str, ...]
    """As ``Request.pooling``."""
    result: Callable[[Float32], _Result]
    """Of its hidden state [H]."""


class PoolingRunner:
    """Runs prompts for their last hidden states.

    Args:
        tokens: what a reranker answers with, no and yes; None: its own head says.
        random_weights: whether the model's weights are made up, so that no head goes with them.
    """

    def __init__(
        self,
        model: ModelConfig,
        context: EngineContext,
        calls: Calls,
        tokens: tuple[str, ...] | None = None,
        *,
        random_weights: bool = False,
    ) -> None:
        self._model = model
        self._context = context
        self._calls = calls
        self._tokens = tokens
        self._random_weights = random_weights
        self._numbers = count()
        self._classifier = lru_cache(maxsize=None)(self._read_classifier)

    @cached_property
    def is_classifier(self) -> bool:
        """Whether two texts are scored by a head, not by how alike their embeddings are."""
        name = class_name(self._model.name, self._model.revision)
        return self._tokens is not None or name.endswith("ForSequenceClassification")

    @property
    def embedding_size(self) -> int:
        """Numbers of an embedding."""
        return self._modules.width

    def embedder(self, params: PoolingParams) -> Embedder:
        """What makes an embedding, float32 [D], of a hidden state [H].

        Raises:
            ValueError: the model is loaded to write text, or embeddings have fewer numbers than are
                asked for.
        """
        config = EmbedConfig(normalize=params.activates, dimensions=params.dimensions)
        embedder = Embedder(self._modules, config)
        if embedder.reads_whole_texts and self._context.shares_prefixes:
            raise ValueError(
                f"LLM.embed: the model pools by {', '.join(embedder.pooling)} and is loaded "
                'otherwise; give runner="pooling"'
            )
        if (params.dimensions or 1) > self.embedding_size:
            raise ValueError(
                f"dimensions is {params.dimensions}; the model's embeddings have "
                f"{self.embedding_size}"
            )
        return embedder

    def classifier(self, params: PoolingParams) -> Classifier:
        """What makes scores of hidden states.

        Raises:
            ModelError: the model has no head that classifies.
            NotYetError: its weights are made up.
            ValueError: ``dimensions`` are asked for.
        """
        if params.dimensions is not None:
            raise ValueError(
                f"dimensions is {params.dimensions}; it cuts embeddings, not labels or scores: "
                "leave it out"
            )
        if self._random_weights:
            raise NotYetError("LLM(load_format='dummy') of a model that classifies or scores")
        return self._classifier(params.activates)

    def run(
        self,
        prompts: Sequence[Prompt | RowError],
        adapters: Sequence[int],
        made: Sequence[Made[_Result]],
        on_error: OnError,
        use_tqdm: ProgressBar,
        names: Sequence[str] | None = None,
    ) -> list[PoolingRequestOutput[_Result]]:
        """What is made of each prompt's hidden state.

        Args:
            made: of each prompt.
            names: what errors call the prompts; None: by their numbers.

        Raises:
            ValueError: a prompt cannot be run, and ``on_error`` is ``raise``; before any is.
        """
        rows = [
            self._row(at, prompt, adapter, each.params)
            for at, (prompt, adapter, each) in enumerate(zip(prompts, adapters, made, strict=True))
        ]
        errors = {row.row_id: row.prompt for row in rows if isinstance(row.prompt, RowError)}
        if errors and on_error == "raise":
            first = min(errors)
            name = f"prompt {first}" if names is None else names[first]
            raise ValueError(f"{name}: {errors[first].message}")
        requests = [
            pooling_request(row, made[row.row_id].pooling)
            for row in rows
            if row.row_id not in errors
        ]
        request_ids = [str(next(self._numbers)) for _ in rows]
        outputs: dict[int, PoolingRequestOutput[_Result]] = {
            at: PoolingRequestOutput(request_ids[at], None, [], 0, error=error)
            for at, error in errors.items()
        }
        meter = Meter(len(rows))
        with (
            progress(len(rows), use_tqdm) as bar,
            closing(self._calls.run(requests, meter)) as completions,
            gc_frozen(),
        ):
            bar.update(len(outputs))
            for completion in completions:
                at = completion.request.row_id
                outputs[at] = _output(request_ids[at], completion, made[at].result)
                bar.update()
        return [outputs[at] for at in range(len(rows))]

    def _row(
        self, at: int, prompt: Prompt | RowError, adapter: int, params: PoolingParams
    ) -> PromptRow:
        most = self.most_tokens(params)
        if isinstance(prompt, Prompt) and most is not None and len(prompt.token_ids) > most:
            frame = (0, 0) if prompt.text is None else self._frame
            prompt = cut_in_frame(prompt, most, frame)
        row = PromptRow(at, prompt, adapter=adapter)
        if isinstance(prompt, RowError):
            return row
        refusal = self._context.engine.refusal(pooling_request(row))
        return row if refusal is None else PromptRow(at, RowError(*refusal))

    def most_tokens(self, params: PoolingParams) -> int | None:
        """Tokens that prompts are cut to; None: they are not.

        Raises:
            ValueError: there is no room for so many.
        """
        most, longest = params.truncate_prompt_tokens, self._context.max_model_len
        if most is not None and most > longest:
            raise ValueError(
                f"truncate_prompt_tokens is {most}, more than max_model_len, which is {longest}"
            )
        # A causal model's engine keeps room for a token that it draws.
        return longest - self._context.shares_prefixes if most == -1 else most

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


def _output(
    name: str, completion: Completion, result: Callable[[Float32], _Result]
) -> PoolingRequestOutput[_Result]:
    outputs, error = None, None
    if completion.error_code is None:
        assert completion.hidden_state is not None
        outputs = result(completion.hidden_state)
    else:
        error = RowError(completion.error_code, completion.error_message or "")
    token_ids = completion.request.prompt_token_ids.tolist()
    return PoolingRequestOutput(
        name, outputs, token_ids, completion.stats.cached_tokens, error=error
    )
