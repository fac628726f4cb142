"""Tasks whose results come from a pooled hidden state: one request per row, without sampling."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from batchinfer.config import PromptConfig
from batchinfer.engine.request import Completion, Request
from batchinfer.errors import RowError
from batchinfer.job.rows.finished_row import (
    FinishedRow,
    error_value,
    finished_row,
    seen_text,
    stats_of,
)
from batchinfer.job.rows.task import LoadedTask
from batchinfer.pooling.framed_prompts import FramedPromptBuilder
from batchinfer.requests.requests import PromptRow, pooling_request
from batchinfer.text.processes.worker import Builder
from batchinfer.text.prompts import Prompt, PromptBuilder, Rendered, RowValues
from batchinfer.text.tokenize_rows import RenderedText
from batchinfer.text.tokenizer import Tokenizer

Results = Callable[[npt.NDArray[np.float32]], Mapping[str, Any]]
"""Converts a hidden state, float32 [H], to a row's values in the task's output columns."""


@dataclass
class Pooled(LoadedTask):
    """Makes one request per row, and converts its pooled hidden state to results."""

    tokenizer: Tokenizer
    results: Results
    failed_results: Mapping[str, Any]
    include: Collection[str]
    pooling: tuple[str, ...]
    result_bytes: int

    def requests(self, row: PromptRow) -> list[Request]:
        return [pooling_request(row, self.pooling)]

    def finish(self, row: PromptRow, completions: Sequence[Completion]) -> FinishedRow:
        (completion,) = completions
        error = None
        results = dict(self.failed_results)
        if completion.error_code is not None:
            error = error_value(completion.error_code, completion.error_message)
        else:
            assert completion.hidden_state is not None
            results |= self.results(completion.hidden_state)
        if "prompt" in self.include:
            results["prompt"] = seen_text(row, self.tokenizer)
        return finished_row(row, results, error, stats_of(completion))


def plain_prompts(
    config: PromptConfig,
    tokenizer: Tokenizer,
    *,
    prefix: str = "",
    pools_prefix: bool = True,
    most_tokens: int | None = None,
    **others: Any,
) -> Builder:
    """Return a prompt builder that applies a chat template only to conversations, not to texts.

    Args:
        prefix: text to put before each text.
        pools_prefix: True to pool the tokens of the prefix too.
        most_tokens: maximum number of tokens in a prompt; None for the model's maximum.
    """
    default = "messages" if "messages" in others["columns"] else "prompt"
    is_text = config.template or (config.column or default) not in others["conversation_columns"]
    if config.chat_template == "auto" and config.messages is None and is_text:
        config = replace(config, chat_template="none")
    if most_tokens is not None:
        others["max_model_len"] = min(others["max_model_len"], most_tokens)
    prompts = FramedPromptBuilder(config, tokenizer, **others)
    if not prefix:
        return prompts
    unpooled = 0 if pools_prefix else _num_prefix_tokens(tokenizer, prefix)
    return _PrefixedPrompts(prompts, prefix, unpooled)


class _PrefixedPrompts:
    """Builds prompts with ``prefix`` before texts, but not before token ids or conversations.

    Args:
        unpooled: number of tokens at the beginning of a text that are not pooled.
    """

    def __init__(self, prompts: PromptBuilder, prefix: str, unpooled: int = 0) -> None:
        self._prompts = prompts
        self._prefix = prefix
        self._unpooled = unpooled
        self.columns = prompts.columns

    def render(self, rows: Sequence[RowValues]) -> list[Rendered]:
        return [
            replace(item, text=self._prefix + item.text) if _begins_with_it(item) else item
            for item in self._prompts.render(rows)
        ]

    def tokenize(self, rendered: Sequence[Rendered]) -> list[Prompt | RowError]:
        prompts = self._prompts.tokenize(rendered)
        if not self._unpooled:
            return prompts
        return [
            self._without_prefix(prompt) if _begins_with_it(item) else prompt
            for item, prompt in zip(rendered, prompts, strict=True)
        ]

    def _without_prefix(self, prompt: Prompt | RowError) -> Prompt | RowError:
        if isinstance(prompt, RowError):
            return prompt
        if len(prompt.token_ids) <= self._unpooled:
            what = (
                f"no token of the text is left after the {self._unpooled} tokens of "
                "the model's prompt"
            )
            return RowError("prompt_too_long", what)
        return replace(prompt, unpooled=self._unpooled)


def _begins_with_it(item: Rendered) -> TypeGuard[RenderedText]:
    return isinstance(item, RenderedText) and item.add_special_tokens


def _num_prefix_tokens(tokenizer: Tokenizer, prefix: str) -> int:
    """Count the tokens of a prefix, with the special tokens before it but not those after it.

    sentence-transformers counts a prompt's tokens in the same way (base/modules/transformer.py,
    ``_get_prompt_length``).
    """
    (ids,) = tokenizer.encode_batch([prefix], add_special_tokens=True, parse_special_tokens=True)
    ends = len(ids) > 0 and tokenizer.num_control_ids(ids[-1:]) > 0
    return len(ids) - ends
