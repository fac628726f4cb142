"""A call's prompts to hidden states, and these to results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import cached_property, lru_cache
from itertools import count
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from batchinfer.build import EngineContext
from batchinfer.config import ClassifyConfig, EmbedConfig, ModelConfig
from batchinfer.console.meter import Meter
from batchinfer.engine.request import Completion
from batchinfer.errors import NotYetError, RowError
from batchinfer.llm.calls import Calls
from batchinfer.llm.pooling.choose import class_name
from batchinfer.llm.pooling.outputs import PoolingRequestOutput
from batchinfer.llm.pooling.params import PoolingParams
from batchinfer.llm.run import OnError, ProgressBar, progress, truncated
from batchinfer.pooling.classifier import Classifier, read_classifier
from batchinfer.pooling.embedding import embedding
from batchinfer.pooling.embedding_modules import EmbeddingModules, read_embedding_modules
from batchinfer.process import gc_frozen
from batchinfer.requests import PromptRow, pooling_request
from batchinfer.text.prompts import Prompt

Float32 = npt.NDArray[np.float32]
_Result = TypeVar("_Result")


class PoolingRunner:
    """Runs prompts for their last hidden states.

    Args:
        tokens: what a reranker answers with, no and yes; None: its own head says.
    """

    def __init__(
        self,
        model: ModelConfig,
        context: EngineContext,
        calls: Calls,
        tokens: tuple[str, ...] | None = None,
    ) -> None:
        self._model = model
        self._context = context
        self._calls = calls
        self._tokens = tokens
        self._numbers = count()
        self._classifier = lru_cache(maxsize=None)(self._read_classifier)

    @cached_property
    def is_classifier(self) -> bool:
        """Whether two texts are scored by a head, not by how alike their embeddings are."""
        name = class_name(self._model.name, self._model.revision)
        return self._tokens is not None or name.endswith("ForSequenceClassification")

    @cached_property
    def pooling(self) -> tuple[str, ...]:
        """As ``Request.pooling``."""
        return (
            self.classifier(PoolingParams()).pooling
            if self.is_classifier
            else self._modules.pooling
        )

    def embedder(self, params: PoolingParams) -> Callable[[Float32], Float32]:
        """What makes an embedding, float32 [D], of a hidden state [H].

        Raises:
            NotYetError: the model makes its embeddings in a way that is not built.
            ValueError: they have fewer numbers than are asked for.
        """
        modules = self._modules
        config = EmbedConfig(normalize=params.activates, dimensions=params.dimensions)
        if modules.pooling != self.pooling or not modules.can_pool:
            by = ", ".join(modules.pooling)
            raise NotYetError(f"LLM.embed with a causal model or a classifier that pools by {by}")
        if (params.dimensions or 1) > modules.width:
            raise ValueError(
                f"dimensions is {params.dimensions}; the model's embeddings have {modules.width}"
            )
        return lambda hidden_state: embedding(hidden_state, modules, config)

    def classifier(self, params: PoolingParams) -> Classifier:
        """What makes scores of hidden states.

        Raises:
            ModelError: the model has no head that classifies.
        """
        return self._classifier(params.activates)

    def run(
        self,
        prompts: Sequence[Prompt | RowError],
        adapters: Sequence[int],
        params: PoolingParams,
        result: Callable[[Float32], _Result],
        on_error: OnError,
        use_tqdm: ProgressBar,
    ) -> list[PoolingRequestOutput[_Result]]:
        """What ``result`` makes of each prompt's hidden state [H].

        Raises:
            ValueError: a prompt cannot be run, and ``on_error`` is ``raise``; before any is.
        """
        rows = [
            self._row(at, prompt, adapter, params)
            for at, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True))
        ]
        errors = {row.row_id: row.prompt for row in rows if isinstance(row.prompt, RowError)}
        if errors and on_error == "raise":
            first = min(errors)
            raise ValueError(f"prompt {first}: {errors[first].message}")
        requests = [pooling_request(row, self.pooling) for row in rows if row.row_id not in errors]
        names = [str(next(self._numbers)) for _ in rows]
        outputs: dict[int, PoolingRequestOutput[_Result]] = {
            at: PoolingRequestOutput(names[at], None, [], 0, error=error)
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
                outputs[at] = _output(names[at], completion, result)
                bar.update()
        return [outputs[at] for at in range(len(rows))]

    def _row(
        self, at: int, prompt: Prompt | RowError, adapter: int, params: PoolingParams
    ) -> PromptRow:
        if isinstance(prompt, Prompt):
            kept = params.truncate_prompt_tokens
            prompt = truncated(prompt, kept, self._context.max_model_len)
        row = PromptRow(at, prompt, adapter=adapter)
        if isinstance(prompt, RowError):
            return row
        refusal = self._context.engine.refusal(pooling_request(row))
        return row if refusal is None else PromptRow(at, RowError(*refusal))

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
